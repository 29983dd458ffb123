"""What the reference takes from the sources: types and bounds of attributes, functions, presets, engines, as tables of
Markdown.

Invariant: nothing here is a second list of names; what is not in the source of a thing is not in its table.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from .. import algorithms
from ..backends import ENGINES, runs
from ..dsl import expressions
from ..hardware.cluster import DEVICES, SHARES, Device, Figure
from ..hardware.device_kinds import Where
from ..ir.attribute_schema import Attribute
from ..ir.graph import ELEMENTS, KINDS, Expr
from ..ir.kinds import FlagKind, FormKind, QuantityKind, WordsKind, either
from ..ir.options import STATEMENTS, ClusterOptions
from ..ir.signatures import CallKind, Option, Signature
from ..model import models, presets
from . import syntax

# What runs on a machine with another memory or clock says something else there: the document says where it comes from
# instead.
MACHINES = ("cpu", "here")


# Attributes


@dataclass(frozen=True)
class AttributeRow:
    """An attribute: what it takes, what it is without being stated, what it means; `note` says what this version cannot
    do with it."""

    name: str
    takes: str
    default: str
    meaning: str
    note: str = ""

    def text(self, of: str) -> str:
        """As an entry of its own."""
        default = f", by default {self.default}" if self.default else ""
        return f"An attribute of `{of}`: {self.takes}{default}.\n\n{self.meaning}{self.note and ' ' + self.note}"


def attributes(of: str) -> list[AttributeRow]:
    """The rows of a statement."""
    declared = STATEMENTS[of].declared()
    return [AttributeRow(name, str(a.kind), default(a), a.doc, _note(of, name)) for name, a in declared.items()]


def default(attribute: Attribute) -> str:
    """What an attribute is without being stated, as a program would state it, or in words."""
    value = attribute.default
    if attribute.must:
        return "must be given"
    if attribute.shown is not None:
        return attribute.shown
    match attribute.kind:
        case QuantityKind(unit):
            return (
                f"{quantity(value.value, unit)} ({value.source})"
                if isinstance(value, Figure)
                else quantity(value, unit)
            )
        case FlagKind():
            return f"`{'true' if value else 'false'}`"
        case WordsKind() | FormKind() if not isinstance(value, Expr) or value.kind == "word":
            return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: list[AttributeRow]) -> str:
    if not rows:
        return "It has no attributes."
    lines = [
        f"| `{r.name}` | {_cell(r.takes)} | {_cell(r.default)} | {_cell(f'{r.meaning} {r.note}'.strip())} |"
        for r in rows
    ]
    return "\n".join(["| attribute | takes | default | meaning |", "|---|---|---|---|", *lines])


def _note(of: str, name: str) -> str:
    return f"*{_nature(name, SHARES[name])}*" if of == "cluster" and name in SHARES else ""


def _nature(name: str, share: Figure) -> str:
    """Whether a figure of a cluster is a peak or what is reached, by the presets."""
    peak = [d.name for d in DEVICES.values() if name in d.peaks]
    other = [d.name for d in DEVICES.values() if name not in d.peaks]
    counts = f"A peak, of which {100 * share.value:.0f} % count"
    if not other:
        return f"{counts}."
    few, many, rest = (
        (peak, counts, "what is reached")
        if len(peak) <= len(other)
        else (other, "What is reached", counts.replace("A", "a", 1))
    )
    return f"{many} with {either(tuple(few))}; with the others {rest}."


# Functions


@functools.cache
def _functions() -> dict[str, ast.FunctionDef]:
    """The package's functions as they are written, by name."""
    found = {}
    for module in {module for _, module in algorithms.library().values()}:
        for item in ast.parse((algorithms.FOLDER / f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(item, ast.FunctionDef):
                found[item.name] = item
    return found


def _call(signature: Signature) -> str:
    """How a program writes a call: its options with their defaults."""
    args = _functions()[signature.name].args
    defaults = {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    return f"{signature.name}({', '.join(_option(o, defaults[o.name]) for o in signature.options)})"


def _option(option: Option, default: ast.expr | None) -> str:
    if default is None:
        return option.name
    value = ast.literal_eval(default)
    text = f'"{value}"' if option.kind == "str" else str([*value] if isinstance(value, tuple) else value)
    shown = {True: "true", False: "false"}.get(value, text) if isinstance(value, bool) else text
    return option.name if value is None else f"{option.name} = {shown}"


def _function_text(signature: Signature) -> str:
    """Of a function: what it reads, the words of its options, whom it needs, and its own first words."""
    first, _, rest = (ast.get_docstring(_functions()[signature.name]) or "").partition("\n\n")
    reads = ", ".join(f"`{c}`{' (if there)' if c in signature.optional else ''}" for c in signature.columns)
    reads += f"{', ' * bool(reads)}all columns of the node that are left" if signature.rest else ""
    facts = [f"Reads {reads}." if reads else "Reads nothing."] if signature.kind in ("function", "loss") else []
    facts += [f"All or none of {either(signature.together, ' and ')}."] if signature.together else []
    filled = either(tuple(f for f in signature.fills if f != "rng" and not f.endswith("lengths")), " and ")
    facts += [f"The update gives it {filled}."] if filled and signature.kind == "loss" else []
    tokens = tuple(sorted(signature.logps | signature.scores))
    facts += [f"{either(tokens, ' and ')} stand for columns of tokens."] if tokens else []
    facts += [
        f"`{o.name}`: {either((*o.words, *(f'{c}(…)' for c in o.calls)))}."
        for o in signature.options
        if o.words or o.calls
    ]
    needs = {
        "group": "whole groups or the batch: `per`",
        "batch": "`per = batch`",
        "mini_batch": "all rows of the mini-batch, and gets them",
    }
    facts += [f"Needs {needs[signature.scope]}."] if signature.scope in needs else []
    facts += ["Draws at random, by the run's seed."] if signature.rng else []
    return "\n\n".join(part for part in (" ".join(first.split()), " ".join(facts), rest) if part)


def _listed(kind: str) -> str:
    found = [_function(s) for (k, _), (s, _) in sorted(algorithms.library().items()) if k == kind]
    return "\n\n".join(found)


def _function(signature: Signature) -> str:
    return f"**`{_call(signature)}`**: {_function_text(signature)}"


def _algorithms() -> str:
    return "\n".join(f"- `{name}`: {text}{_params(name)}" for name, text in _files().items())


def _params(algorithm: str) -> str:
    """The params of an algorithm of the package with their defaults, on a line of their own."""
    from ..compiler.pipeline import check

    return f"\n  Params: {', '.join(f'`{name} = {value}`' for name, value in check(algorithm).params.items())}."


@functools.cache
def _files() -> dict[str, str]:
    """The package's algorithms: what the comment at the head of each file says."""
    found = {}
    for path in sorted(algorithms.FOLDER.glob("*.rlg")):
        head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        found[path.stem] = " ".join(line.removeprefix("#").strip() for line in head)
    return found


# Presets


def _figure(figure: Figure, unit: str, share: float) -> str:
    peak = f", a peak: {100 * share:.0f} % reached" if share < 1 else ""
    return f"{quantity(figure.value, unit)}{peak} ({figure.source}: {figure.basis})"


def quantity(value: float, unit: str) -> str:
    """A figure as a program writes it: `64 GB`, `10 us`."""
    if unit == "s":
        sizes = (("min", 60), ("s", 1), ("ms", 1e-3), ("us", 1e-6))
        name, size = next(((n, s) for n, s in sizes if value >= s), ("us", 1e-6))
    else:
        name, size = next(((p, s) for p, s in reversed(expressions.PREFIXES.items()) if value >= s), ("", 1))
    return f"{value / size:.6g} {name}{unit if unit != 's' else ''}"


def figures(device: Device) -> Iterator[tuple[str, str]]:
    """The attributes of `cluster` that a preset sets, each with its figure."""
    for name, kind in ClusterOptions.kinds().items():
        if isinstance(kind, QuantityKind) and name != "network":
            figure = device.figure(name)
            yield name, _figure(figure, kind.unit, device.share(name)) if figure is not None else ""


def _device(device: Device) -> str:
    if device.name in MACHINES:
        return "The memory is this machine's, the other figures are assumed for one core, a rank."
    return "\n".join(
        ["| figure | value and source |", "|---|---|", *(f"| `{n}` | {f} |" for n, f in figures(device) if f)]
    )


def _devices() -> str:
    """The presets, one table: a line for each figure of those that share it and its source."""
    lines = ["| figure | preset | value | source |", "|---|---|---|---|"]
    every = {d.name: dict(figures(d)) for d in DEVICES.values() if d.name not in MACHINES}
    for name in next(iter(every.values())):
        by_text: dict[str, list[str]] = {}
        for device, found in every.items():
            by_text.setdefault(found[name], []).append(device)
        for text, devices in by_text.items():
            value, _, basis = text.partition(" (")
            if text:
                lines.append(
                    f"| `{name}` | {either(tuple(devices), ', ')} | {value} | {_cell(basis.removesuffix(')'))} |"
                )
    return "\n".join(lines)


def _models() -> str:
    lines = ["| preset | family | parameters | layers | hidden | tokenizer |", "|---|---|---|---|---|---|"]
    for name in presets.PRESETS:
        m = models.load(name, Path())
        size = sum(t.elements for t in m.tensors)
        lines.append(
            f"| `{name}` | {m.family} | {size / 1e9:.3g} B | {m.layers} | {m.hidden} | "
            f"{presets.tokenizer(name) or 'its own'} |"
        )
    return "\n".join(lines)


def _engines() -> str:
    lines = [
        "| engine | verbs | divides along | zero | options | families | runs here |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, e in ENGINES.items():
        zero = ", ".join(map(str, e.zero)) if "update" in e.verbs else ""
        here = "yes" if runs(name) else "no: planned and simulated"
        verbs = ", ".join(e.verbs)
        families = ", ".join(e.families)
        cells = (verbs, either(e.axes, ", "), zero, either(e.options, ", "), families, here)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    host, other = (either(tuple(n for n, e in ENGINES.items() if w in e.chosen), ", ") for w in get_args(Where))
    return "\n".join(
        [
            *lines,
            "",
            "Of a layer's experts, `ep` and `etp` divide:",
            "",
            *(f"- `{name}`: {e.spread.words}." for name, e in ENGINES.items()),
            "",
            (
                f"Where the file names no engine, the plan chooses among those that can: on CPUs {host}, on other "
                f"devices {other}; where none of these has the model's family, or divides it as the layout says, among "
                "the others. Of several it takes the one of the quickest iteration that fits."
            ),
        ]
    )


# Words of the language


def _kinds() -> str:
    lines = [f"| `{kind}` | {', '.join(verbs)} |" for kind, verbs in KINDS.items()]
    return "\n".join(["| kind | verbs |", "|---|---|", *lines, "| `function` | any word |"])


def _units() -> str:
    decimal = expressions.PREFIXES
    binary = expressions.BINARY
    sizes = (either(tuple(f"{p}B" for p in powers), ", ") for powers in (decimal, binary))
    lines = [
        f"| bytes | {' (powers of 1000), '.join(sizes)} (powers of 1024) |",
        f"| work | {either(tuple(f'{p}FLOP' for p in decimal), ', ')} |",
        "| rates | each of these a second, as `MB/s` or `TFLOP/s` |",
        f"| time | {either(tuple(expressions.SECONDS), ', ')} |",
    ]
    return "\n".join(["| of | units |", "|---|---|", *lines])


def _elements() -> str:
    return either(tuple(ELEMENTS), ", ")


LISTS: dict[str, Callable[[], str]] = {
    "reserved": lambda: either(tuple(syntax.reserved()), ", "),
    "units": _units,
    "algorithms": _algorithms,
    "functions": lambda: _listed("function"),
    "terms": lambda: _listed("loss"),
    "optimizers": lambda: _listed("optimizer"),
    "schedules": lambda: _listed("schedule"),
    "values": lambda: _listed("option"),
    "devices": _devices,
    "models": _models,
    "engines": _engines,
    "kinds": _kinds,
    "elements": _elements,
}


_KINDS: dict[CallKind, str] = {
    "loss": "A loss term",
    "function": "A function",
    "optimizer": "An optimizer",
    "schedule": "A schedule",
    "option": "A value of an option",
}


def entries() -> Iterator[tuple[str, str]]:
    """Name and text of what is no attribute: functions, loss terms, devices, models, engines."""
    for (kind, name), (signature, _) in sorted(algorithms.library().items()):
        what = _KINDS[kind]
        yield name, f"{what}: {_function(signature)}"
    for name, text in _files().items():
        yield name, f"An algorithm of the package, `import {name}`: {text}"
    for name, device in DEVICES.items():
        yield name, f"A preset of `device`.\n\n{_device(device)}"
    for of, found in (("model", _models()), ("engine", _engines())):
        head = found.splitlines()[:2]
        rows = found.splitlines()[2:]
        for row in rows:
            if row.startswith("| `"):
                yield (
                    row.split("`")[1],
                    "\n".join([f"A preset of `{of}`.\n" if of == "model" else "An engine.\n", *head, row]),
                )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
