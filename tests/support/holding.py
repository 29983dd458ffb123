"""What is held of our code: names, calls, overrides and patches, where they stand, and what is wrong with them.

Invariant: a name of theirs that is met is held, once a place; nothing else is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from contracts import Call, Contracts, Unknown, gives, misfit, named, takes, unlike
from modules import signature_of
from things import Of, Ref, Things, bare

VARIABLE = re.compile(r"VLLM_(ASCEND_)?[A-Z0-9_]+")


def closely(name: str) -> bool:
    """Whether members of instances are held too, and overrides. Those of torch are not, but for torch.cuda: they run
    here, by a newer version; its names and what is called by them are held."""
    return not name.startswith("torch.") or name.startswith("torch.cuda.")


class Problem(NamedTuple):
    file: str
    line: int
    says: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.says}"


class Holding:
    """What was met so far, of the file that `path` names."""

    def __init__(self, contracts: Contracts, table: Mapping[str, Sequence[str]]) -> None:
        self.contracts = contracts
        self.table = table
        self.path = ""
        self.problems: dict[Problem, None] = {}
        self.names: set[tuple[str, int, str]] = set()
        self.calls: set[tuple[str, int, int]] = set()
        self.replaced: set[tuple[str, int]] = set()  # overrides and patches

    def _problem(self, node: ast.AST, says: str) -> None:
        self.problems[Problem(self.path, getattr(node, "lineno", 0), says)] = None

    def _strings(self, tree: ast.Module) -> None:
        """Variables of the environment that vLLM reads: it says nothing of those that it does not know."""
        for node in ast.walk(tree):
            said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if found := VARIABLE.fullmatch(said):
                self._held(f"{'vllm_ascend' if found[1] else 'vllm'}.envs.{said}", node)

    def _held(self, name: str, node: ast.AST) -> tuple[str, Any]:
        """A name of theirs as it is used at a node: the name that it leads to, and its line; None: it has none."""
        if not self.contracts.has(name):
            return name, None
        self.names.add((self.path, getattr(node, "lineno", 0), name))
        try:
            whole, line = self.contracts.whole(name)
        except Unknown:
            self._problem(node, f"`{name}` has no contract: run `make contracts`")
            return name, None
        if line is None:
            self._problem(node, f"{self.contracts.title(name)} has no `{name}`")
        return whole, line

    def _is(self, name: str, node: ast.AST) -> Things:
        """What a name of theirs is."""
        whole, line = self._held(name, node)
        if line is None:
            return ()
        if isinstance(line, str) and line.startswith("value"):
            if whole in self.table:
                return self._stated(self.table[whole])
            return tuple(Of(t) for t in bare(gives(line))) if gives(line) else ()
        return (Ref(whole),)

    def _stated(self, said: Sequence[str]) -> Things:
        """Of a table: modules and functions with a colon behind them, else types, of the packages that there are."""
        known = [t for t in said if self.contracts.has(t)]
        return tuple(Ref(t[:-1]) if t.endswith(":") else Of(t) for t in known)

    def _call(self, whole: str, line: Any, call: Call, node: ast.AST) -> None:
        every = takes(line)
        if not every:
            return
        self.calls.add((self.path, getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
        wrong = [misfit(text, call) for text in every]
        if all(wrong):
            says = f"`{whole}` of {self.contracts.title(whole)} "
            says += wrong[0] if len(wrong) == 1 else f"fits in none of its {len(wrong)} forms: one {wrong[0]}"
            self._problem(node, says)

    def _narrowed(self, call: Call, name: str, every: list[str], node: ast.AST) -> Call:
        """A call of one of several alternatives: what may be given by name goes to those of them that know it."""
        if not call.maybe or len(every) < 2:
            return call
        known = {one: {n for text in takes(self._held(one, node)[1]) for n in named(text)} for one in every}
        maybe = (n for n in call.maybe if n in known[name] or not any(n in some for some in known.values()))
        return replace(call, maybe=frozenset(maybe))

    def _replaces(self, name: str, takes_ours: str, theirs: str, node: ast.AST) -> None:
        """Whether a function of ours can stand where one of theirs is called."""
        whole, line = self._held(theirs, node)
        if not takes(line) or not closely(whole):
            return
        self.replaced.add((self.path, getattr(node, "lineno", 0)))
        if all(unlike(takes_ours, one) for one in takes(line)):
            title = self.contracts.title(whole)
            their = takes(line)[0]
            says = f"`{name}{takes_ours}` stands for `{whole}{their}` of {title}, and takes other arguments"
            self._problem(node, says)

    def _override(self, method: ast.FunctionDef, theirs: list[str], mentioned: bool) -> None:
        """A method in a class of ours above which these are; one that code of ours mentions may be our own."""
        name = method.name
        for base in theirs:
            try:
                _, line = self.contracts.whole(f"{base}.{name}")
            except Unknown:
                self._problem(method, f"`{base}.{name}` has no contract: run `make contracts`")
                return
            if line is not None:
                self._replaces(name, signature_of(method, True), f"{base}.{name}", method)
                return
        if theirs and not mentioned:
            lacks = f"{self.contracts.title(theirs[0])} has no `{theirs[0]}.{name}`"
            self._problem(method, f"`{name}` overrides nothing: {lacks}")
