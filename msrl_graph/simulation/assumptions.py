"""The user's assumptions: lengths of rows, slow devices, seconds of functions.

Invariant: the assumptions are immutable data, parsed once. A number is sampled from a distribution by applying the
inverse distribution function to one uniform random number. So a distribution with longer lengths makes each row longer,
and never changes which of two rows is longer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from ..analysis.sequences import sequences, token_columns
from ..diagnostics import Diagnostic, Fault, nearest
from ..diagnostics.surface import by_surface, name_option
from ..files.paths import is_folder
from ..ir.graph import Graph
from ..ir.plan import Plan

_CALL = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_NORMAL = NormalDist()
# Inverse distribution functions, by name: the parameters, and the value at a share u in (0, 1).
INVERSES: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "fixed": (("tokens",), lambda u, n: n),
    "uniform": (("least", "most"), lambda u, a, b: a + (b - a) * u),
    "normal": (("mean", "std"), lambda u, mean, std: mean + std * _NORMAL.inv_cdf(u)),
    "lognormal": (("median", "sigma"), lambda u, median, sigma: median * math.exp(sigma * _NORMAL.inv_cdf(u))),
    "geometric": (("mean",), lambda u, mean: 1.0 if mean <= 1 else math.ceil(math.log1p(-u) / math.log1p(-1 / mean))),
}


@dataclass(frozen=True)
class Distribution:
    """A named distribution with its arguments."""

    name: str
    arguments: tuple[float, ...]

    def value_at(self, share: float) -> float:
        """Return the quantile of the distribution for a share in (0, 1).

        The share is the fraction of all values that are below the quantile.
        """
        return float(INVERSES[self.name][1](share, *self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{argument:g}' for argument in self.arguments)})"


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths from a file. After the last length, the first length is used again.

    There is one length per row, in the order of the rows' numbers. With `by_iteration`, there is only one length per
    iteration, and all rows of the iteration have this length.
    """

    name: str
    values: tuple[float, ...]
    by_iteration: bool

    def length_of(self, iteration: int, row: int, rows: int) -> float:
        return self.values[(iteration if self.by_iteration else iteration * rows + row) % len(self.values)]

    def __str__(self) -> str:
        return self.name


Source = Distribution | RecordedLengths


@dataclass(frozen=True)
class Stragglers:
    """The share of devices that are slow, and how many times slower they compute.

    The same devices are slow in all iterations. A larger share adds slow devices: every device that is slow with the
    smaller share is still slow.
    """

    share: float = 0.0
    factor: float = 1.0

    def __str__(self) -> str:
        return (
            f"{100 * self.share:g} % of the devices, {self.factor:g} times slower"
            if self.share and self.factor > 1
            else "none"
        )


@dataclass(frozen=True)
class Specs:
    """The assumptions of a simulation.

    `lengths` has the lengths of rows by column. If a column is not in `lengths`, its rows have the greatest length that
    the program allows. `functions` has the seconds per row by function node.
    """

    lengths: Mapping[str, Source]
    stragglers: Stragglers
    functions: Mapping[str, Distribution]
    seed: int


def read_specs(
    plan: Plan, lengths: Sequence[str], stragglers: str, functions: Mapping[str, str | float], seed: int
) -> Specs:
    """Parse the assumptions of a simulation. Raises Fault.

    The arguments have the formats that `simulate` documents.
    """
    sources: dict[str, Source] = {}
    for text in lengths:
        sources |= _parse_lengths(plan, text)
    return Specs(
        sources,
        _parse_stragglers(stragglers),
        {node: _parse_function(plan, node, str(seconds)) for node, seconds in functions.items()},
        seed,
    )


def generated_columns(graph: Graph) -> list[str]:
    """Return the columns that generations write."""
    return [column for node in graph.verb("generate") for column in sequences(graph, node).scored]


def _parse_lengths(plan: Plan, text: str) -> dict[str, Source]:
    """Return lengths by column from `[COLUMN=]DISTRIBUTION(…)` or `[COLUMN=]FILE`.

    If the text names no column, all columns that generations write get the lengths. If the file has a pair [prompt,
    response] per line, the lengths of prompts are also returned.
    """
    known = token_columns(plan.graph)
    responses = generated_columns(plan.graph)
    column, equals, rest = text.partition("=")
    stated = bool(equals) and re.fullmatch(r"\s*[A-Za-z]\w*\s*", column) is not None
    column, rest = (column.strip(), rest.strip()) if stated else ("", text.strip())
    if stated and column not in known:
        message = f"`{name_option('lengths', text)}`: there is no token column `{column}`"
        raise Fault(Diagnostic("unknown-column", message, help=nearest(column, known)))
    if _CALL.fullmatch(rest):
        return dict.fromkeys([column] if stated else responses, distribution(rest, name_option("lengths", text)))
    prompts, response_lengths, by_iteration = _read_lengths(rest)
    lengths: dict[str, Source] = dict.fromkeys(
        [column] if stated else responses, RecordedLengths(rest, response_lengths, by_iteration)
    )
    sources = [known_column for known_column in known if plan.graph.writer(known_column).verb == "source"]
    if prompts and not stated and len(sources) == 1:
        lengths[sources[0]] = RecordedLengths(rest, _prompt_lengths(plan, prompts, by_iteration), by_iteration)
    return lengths


def _prompt_lengths(plan: Plan, prompts: tuple[float, ...], by_iteration: bool) -> tuple[float, ...]:
    """Return one length per prompt.

    A file of pairs [prompt, response] repeats the length of a prompt for each response to the prompt. The first of
    these repeated lengths is used. If `by_iteration` is True, `prompts` has one length per iteration and is returned
    unchanged.
    """
    first = next(iter(plan.graph.verb("generate")), None)
    return prompts if by_iteration or first is None else prompts[:: plan.graph.fan(plan.graph.row_level(first))]


def distribution(text: str, flag: str) -> Distribution:
    """Parse a distribution; `flag` is the text of the flag, to be shown in messages."""
    match = _CALL.fullmatch(text)
    name = match[1] if match else text
    if match is None or name not in INVERSES:
        help = nearest(name, INVERSES) or f"use one of {', '.join(INVERSES)}"
        raise Fault(Diagnostic("bad-value", f"`{flag}`: unknown distribution `{name}`", help=help))
    parameters, _ = INVERSES[name]
    try:
        arguments = tuple(float(argument) for argument in match[2].split(",") if argument.strip())
    except ValueError:
        arguments = ()
    usage = f"write `{name}({', '.join(parameters)})`"
    if len(arguments) != len(parameters) or not all(map(math.isfinite, arguments)):
        raise Fault(Diagnostic("bad-value", f"`{flag}`: `{name}` takes {' and '.join(parameters)}", help=usage))
    if min(arguments) < 0 or (name == "uniform" and arguments[0] > arguments[1]):
        message = f"`{flag}`: {'the least is above the most' if min(arguments) >= 0 else 'numbers must be 0 or more'}"
        raise Fault(Diagnostic("bad-value", message, help=usage))
    return Distribution(name, arguments)


def _read_lengths(name: str) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Read a file of lengths.

    The file has JSON lines. Each line is the length of a response, a pair [prompt, response], or a line of a run's
    metrics. Returns:

    - the lengths of prompts; empty if some line has no length of a prompt,
    - the lengths of responses,
    - whether the file has metrics. Lengths from metrics are means over an iteration.
    """
    path = Path(name)
    path = path / "metrics.jsonl" if is_folder(path) else path
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "its lines are not JSON"
        message = f"cannot read the lengths {name}: {str(why).lower()}"
        raise Fault(
            Diagnostic("missing-file", message, help=f"name a file or a distribution: {', '.join(INVERSES)}")
        ) from None
    pairs = list(_parse_pairs(lines))
    by_iteration = any(isinstance(line, dict) for line in lines)
    plain = not by_iteration or all(isinstance(line, dict) for line in lines)
    if not pairs or None in pairs or not plain:
        help = "each line must be a number of tokens, a pair [prompt, response], or a line of a run's metrics"
        raise Fault(Diagnostic("bad-value", f"the file {name} does not contain lengths", help=help))
    known = [pair for pair in pairs if pair is not None]
    prompts = tuple(prompt for prompt, _ in known if prompt is not None)
    return prompts if len(prompts) == len(known) else (), tuple(response for _, response in known), by_iteration


def _parse_pairs(lines: Iterable[object]) -> Iterable[tuple[float | None, float] | None]:
    """Yield (prompt length, response length) for each line of a file of lengths.

    The prompt length is None if the line has only a response length. The pair is None if the line has no lengths.
    Metrics of evaluations are skipped.
    """

    def is_count(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0

    for line in lines:
        match line:
            case int() | float() if is_count(line):
                yield None, float(line)
            case [int() | float() as prompt, int() | float() as response] if is_count(prompt) and is_count(response):
                yield float(prompt), float(response)
            case {"evaluation": _}:
                continue
            case {
                "response_length": (int() | float()) as mean,
                "prompt_tokens": prompts,
                "response_tokens": responses,
            } if responses:
                yield prompts * mean / responses, float(mean)
            case _:
                yield None


def _parse_stragglers(text: str) -> Stragglers:
    if not text.strip():
        return Stragglers()
    match = re.fullmatch(r"\s*([\d.]+)\s*(%?)\s*x\s*([\d.]+)\s*", text)
    try:
        share, factor = (float(match[1]) / (100 if match[2] else 1), float(match[3])) if match else (-1.0, 0.0)
    except ValueError:
        share = -1.0
        factor = 0.0
    if not 0 <= share <= 1 or factor < 1:
        message = f"`{name_option('stragglers', text)}` is not a share of the devices and a factor of slowness"
        raise Fault(Diagnostic("bad-value", message, help="write `1% x3`"))
    return Stragglers(share, factor)


def _parse_function(plan: Plan, node: str, text: str) -> Distribution:
    known = [
        function_node.name
        for function_node in plan.graph.nodes
        if function_node.verb != "source" and plan.graph.worker(function_node.worker).kind == "function"
    ]
    name = by_surface(command_line=f"--function {node}={text}", python=f"function_seconds={{{node!r}: {text!r}}}")
    if node not in known:
        message = f"`{name}`: there is no function node `{node}`"
        raise Fault(Diagnostic("unknown-name", message, help=nearest(node, known)))
    if _CALL.fullmatch(text):
        return distribution(text, name)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        message = f"`{name}` is not a number of seconds per row"
        raise Fault(Diagnostic("bad-value", message, help=f"write `{node}=0.05` or a distribution of seconds"))
    return Distribution("fixed", (seconds,))
