"""Tables of the language reference, generated from the source code.

The tables are Markdown and show the types and bounds of attributes, functions, presets and engines.

Invariant: this file has no list of names of its own. A table contains only names and facts from the code that declares
them.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import algorithms
from ..dsl import expressions
from ..hardware.cluster import SHARES, Device, Figure
from ..hardware.device_presets import DEVICES
from ..ir.attribute_schema import Attribute
from ..ir.graph import ELEMENTS, KINDS, Expr
from ..ir.kinds import FlagKind, FormKind, QuantityKind, TrackersKind, WordsKind, join_words
from ..ir.options import ClusterOptions
from ..ir.signatures import CallKind, Option, Signature
from ..ir.statements import STATEMENTS
from . import syntax
from .preset_tables import engines_table, models_table

# These figures differ between machines, so the document states their origin instead.
MACHINES = ("cpu", "here")


# Attributes


@dataclass(frozen=True)
class AttributeRow:
    """The texts that describe an attribute of a statement.

    - `takes`: the kind of value that the attribute accepts.
    - `note`: some attributes of `cluster` are figures that can be peak values. For these attributes, `note` is a
      sentence that says with which device presets the figure is a peak. For all other attributes, `note` is "".
    """

    name: str
    takes: str
    default: str
    meaning: str
    note: str = ""

    def text(self, statement: str) -> str:
        """Return the reference text of the attribute, for the statement `statement`."""
        default = f", by default {self.default}" if self.default else ""
        return f"An attribute of `{statement}`: {self.takes}{default}.\n\n{self.meaning}{self.note and ' ' + self.note}"


def attributes(statement: str) -> list[AttributeRow]:
    """Return a description of each attribute that a statement declares."""
    declared = STATEMENTS[statement].declared()
    return [
        AttributeRow(name, str(attribute.kind), default(attribute), attribute.doc, _note(statement, name))
        for name, attribute in declared.items()
    ]


def default(attribute: Attribute) -> str:
    """Return an attribute's default, in words or as a program would write it."""
    value = attribute.default
    if attribute.must:
        return "required"
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
        case TrackersKind():
            return f"`[{', '.join(value)}]`"
        case WordsKind() | FormKind() if not isinstance(value, Expr) or value.kind == "word":
            return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: list[AttributeRow]) -> str:
    if not rows:
        return "There are no attributes."
    lines = [
        f"| `{row.name}` | {_cell(row.takes)} | {_cell(row.default)} | {_cell(f'{row.meaning} {row.note}'.strip())} |"
        for row in rows
    ]
    return "\n".join(["| attribute | takes | default | meaning |", "|---|---|---|---|", *lines])


def _note(statement: str, name: str) -> str:
    return f"*{_peak_note(name, SHARES[name])}*" if statement == "cluster" and name in SHARES else ""


def _peak_note(name: str, share: Figure) -> str:
    """Return a sentence that says which device presets state a peak for a figure.

    Other presets state what programs reach in practice. `name` is the figure, an attribute of `cluster`. `share` is the
    fraction of a peak that programs reach.
    """
    peak = [device.name for device in DEVICES.built_in.values() if name in device.peaks]
    other = [device.name for device in DEVICES.built_in.values() if name not in device.peaks]
    counts = f"A peak, of which {100 * share.value:.0f} % is used"
    if not other:
        return f"{counts}."
    few, many, rest = (
        (peak, counts, "what is reached")
        if len(peak) <= len(other)
        else (other, "What is reached", counts.replace("A", "a", 1))
    )
    return f"{many} with {join_words(tuple(few))}; with all other presets {rest}."


# Functions


@functools.cache
def _functions() -> dict[str, ast.FunctionDef]:
    """Return the parsed definition of each built-in function, by the function's name."""
    functions = {}
    defined = {(module, name) for (_, name), (_, module) in algorithms.library().items()}
    for module in algorithms.MODULES:
        for item in ast.parse((algorithms.FOLDER / f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(item, ast.FunctionDef) and (module, item.name) in defined:
                functions[item.name] = item
    return functions


def _call(signature: Signature) -> str:
    """Return a call of a function as a program writes it, with the default options."""
    args = _functions()[signature.name].args
    defaults = {arg.arg: value for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    return f"{signature.name}({', '.join(_option(option, defaults[option.name]) for option in signature.options)})"


def _option(option: Option, default: ast.expr | None) -> str:
    if default is None:
        return option.name
    value = ast.literal_eval(default)
    text = f'"{value}"' if option.kind == "str" else str([*value] if isinstance(value, tuple) else value)
    shown = {True: "true", False: "false"}.get(value, text) if isinstance(value, bool) else text
    return option.name if value is None else f"{option.name} = {shown}"


def _function_text(signature: Signature) -> str:
    """Return the description of a function: its docstring, with added sentences.

    The added sentences state the columns that the function reads, the rows that it needs, and the words that its
    options accept.
    """
    first, _, rest = (ast.get_docstring(_functions()[signature.name]) or "").partition("\n\n")
    reads = ", ".join(
        f"`{column}`{' (if present)' if column in signature.optional else ''}" for column in signature.columns
    )
    reads += f"{', ' * bool(reads)}all remaining columns of the node" if signature.rest else ""
    sentences = [f"Reads {reads}." if reads else "Reads nothing."] if signature.kind in ("function", "loss") else []
    sentences += [f"Needs all or none of {join_words(signature.together, ' and ')}."] if signature.together else []
    filled = join_words(
        tuple(
            filled_name
            for filled_name in signature.fills
            if filled_name != "rng" and not filled_name.endswith("lengths")
        ),
        " and ",
    )
    sentences += [f"The update provides {filled}."] if filled and signature.kind == "loss" else []
    tokens = tuple(sorted(signature.logps | signature.scores))
    sentences += [f"Token columns: {join_words(tokens, ' and ')}."] if tokens else []
    sentences += [
        f"`{option.name}`: {join_words((*option.words, *(f'{call}(…)' for call in option.calls)))}."
        for option in signature.options
        if option.words or option.calls
    ]
    needs = {
        "group": "whole groups or the whole batch: set `per`",
        "batch": "`per = batch`",
        "mini_batch": "all rows of the mini-batch (the update passes them)",
    }
    sentences += [f"Needs {needs[signature.scope]}."] if signature.scope in needs else []
    sentences += ["Random, with the seed of the run."] if signature.rng else []
    return "\n\n".join(part for part in (" ".join(first.split()), " ".join(sentences), rest) if part)


def _list_functions(kind: str) -> str:
    texts = [
        _function(signature)
        for (function_kind, _), (signature, module) in sorted(algorithms.library().items())
        if function_kind == kind and module in algorithms.MODULES
    ]
    return "\n\n".join(texts)


def _function(signature: Signature) -> str:
    return f"**`{_call(signature)}`**: {_function_text(signature)}"


def _algorithms() -> str:
    return "\n".join(f"- `{name}`: {text}{_params(name)}" for name, text in _files().items())


def _params(algorithm: str) -> str:
    """Return a line with the params of a built-in algorithm, and their defaults."""
    from ..compiler.pipeline import check

    return f"\n  Params: {', '.join(f'`{name} = {value}`' for name, value in check(algorithm).params.items())}."


@functools.cache
def _files() -> dict[str, str]:
    """Return the comment at the top of each built-in algorithm's file, by algorithm."""
    descriptions = {}
    for path in sorted(algorithms.FOLDER.glob("*.rlg")):
        comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        descriptions[path.stem] = " ".join(line.removeprefix("#").strip() for line in comment)
    return descriptions


# Presets


def _figure(figure: Figure, unit: str, share: float) -> str:
    peak = f", a peak: {100 * share:.0f} % reached" if share < 1 else ""
    return f"{quantity(figure.value, unit)}{peak} ({figure.source}: {figure.basis})"


def quantity(value: float, unit: str) -> str:
    """Return a figure as a program writes it: `64 GB`, `10 us`."""
    if unit == "s":
        sizes = (("min", 60), ("s", 1), ("ms", 1e-3), ("us", 1e-6))
        name, size = next(((unit_name, seconds) for unit_name, seconds in sizes if value >= seconds), ("us", 1e-6))
    else:
        name, size = next(
            ((prefix, factor) for prefix, factor in reversed(expressions.PREFIXES.items()) if value >= factor), ("", 1)
        )
    return f"{value / size:.6g} {name}{unit if unit != 's' else ''}"


def figures(device: Device) -> Iterator[tuple[str, str]]:
    """Yield the name and preset value of each figure that `cluster` can also set.

    The value is "" if the preset does not set the figure.
    """
    for name, kind in ClusterOptions.kinds().items():
        if isinstance(kind, QuantityKind) and name != "network":
            figure = device.figure(name)
            yield name, _figure(figure, kind.unit, device.share(name)) if figure is not None else ""


def _device(device: Device) -> str:
    if device.name in MACHINES:
        return "The memory is that of this machine. The other figures are assumed for one core per rank."
    return "\n".join(
        [
            "| figure | value and source |",
            "|---|---|",
            *(f"| `{name}` | {text} |" for name, text in figures(device) if text),
        ]
    )


def _devices() -> str:
    """Return a table of the figures of all device presets.

    If several presets have the same value of a figure, these presets share a line.
    """
    lines = ["| figure | preset | value | source |", "|---|---|---|---|"]
    presets_ = [device_ for name, device_ in DEVICES.built_in.items() if name not in MACHINES]
    by_device = {device_.name: dict(figures(device_)) for device_ in presets_}
    for name in next(iter(by_device.values())):
        by_text: dict[str, list[str]] = {}
        for device, figure_texts in by_device.items():
            by_text.setdefault(figure_texts[name], []).append(device)
        for text, devices in by_text.items():
            value, _, basis = text.partition(" (")
            if text:
                lines.append(
                    f"| `{name}` | {join_words(tuple(devices), ', ')} | {value} | {_cell(basis.removesuffix(')'))} |"
                )
    return "\n".join(lines)


# Words of the language


def _kinds() -> str:
    lines = [f"| `{kind}` | {', '.join(verbs)} |" for kind, verbs in KINDS.items()]
    return "\n".join(["| kind | verbs |", "|---|---|", *lines, "| `function` | any word |"])


def _units() -> str:
    decimal = expressions.PREFIXES
    binary = expressions.BINARY
    sizes = (join_words(tuple(f"{prefix}B" for prefix in powers), ", ") for powers in (decimal, binary))
    lines = [
        f"| bytes | {' (powers of 1000), '.join(sizes)} (powers of 1024) |",
        f"| work | {join_words(tuple(f'{prefix}FLOP' for prefix in decimal), ', ')} |",
        "| rate | bytes or work per second, such as `MB/s` or `TFLOP/s` |",
        f"| time | {join_words(tuple(expressions.SECONDS), ', ')} |",
    ]
    return "\n".join(["| kind | units |", "|---|---|", *lines])


def _elements() -> str:
    return join_words(tuple(ELEMENTS), ", ")


LISTS: dict[str, Callable[[], str]] = {
    "reserved": lambda: join_words(tuple(syntax.reserved()), ", "),
    "units": _units,
    "algorithms": _algorithms,
    "functions": lambda: _list_functions("function"),
    "terms": lambda: _list_functions("loss"),
    "optimizers": lambda: _list_functions("optimizer"),
    "schedules": lambda: _list_functions("schedule"),
    "values": lambda: _list_functions("option"),
    "devices": _devices,
    "models": models_table,
    "engines": engines_table,
    "kinds": _kinds,
    "elements": _elements,
}


# For each kind of call: the name of its list in LISTS, and the words for one function of this kind.
_KINDS: dict[CallKind, tuple[str, str]] = {
    "loss": ("terms", "A loss term"),
    "function": ("functions", "A function"),
    "optimizer": ("optimizers", "An optimizer"),
    "schedule": ("schedules", "A schedule"),
    "option": ("values", "A value of an option"),
}


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield (list, name, text) of each reference entry that is not about an attribute.

    `list` is the key of the entry's list in `LISTS`: functions, loss terms, algorithms, devices, models, engines …
    """
    for (kind, name), (signature, module) in sorted(algorithms.library().items()):
        if module not in algorithms.MODULES:
            continue
        list_name, kind_text = _KINDS[kind]
        yield list_name, name, f"{kind_text}: {_function(signature)}"
    for name, text in _files().items():
        yield "algorithms", name, f"An algorithm of the package, `import {name}`: {text}"
    for name, device in DEVICES.built_in.items():
        yield "devices", name, f"A preset of `device`.\n\n{_device(device)}"
    for list_name, what, table_text in (
        ("models", "A preset of `model`.", models_table()),
        ("engines", "An engine.", engines_table()),
    ):
        header = table_text.splitlines()[:2]
        rows = table_text.splitlines()[2:]
        for row in rows:
            if row.startswith("| `"):
                yield list_name, row.split("`")[1], "\n".join([f"{what}\n", *header, row])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
