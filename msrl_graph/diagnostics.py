"""What the compiler says to its user.

Invariant: a user's mistake is a `Diagnostic` with a code from `CODES`, never an exception's text; `Fault` carries one or more of
them up to the command line. A message is lower case, without a final full stop, in the user's words; the fix stands in `help`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of source text: 1-based lines and columns, the end exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """From the start of this span to the end of `other`."""
        return Span(self.file, self.line, self.column, other.end_line, other.end_column)


NOWHERE = Span("", 0, 0, 0, 0)


@dataclass(frozen=True)
class Diagnostic:
    """One thing to tell: what is wrong, where, and what to do about it."""

    code: str
    message: str
    span: Span = NOWHERE
    help: str = ""
    severity: Severity = "error"
    related: tuple[tuple[Span, str], ...] = ()

    def __post_init__(self) -> None:
        assert self.code in CODES, f"undocumented code {self.code}"


class Fault(Exception):
    """Ends a compilation or refuses a run; holds what to tell."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(f"[{d.code}] {d.message}" for d in diagnostics))
        self.diagnostics = diagnostics

    def __reduce__(self) -> tuple[type[Fault], tuple[Diagnostic, ...]]:
        return type(self), self.diagnostics  # from one process to another


def nearest(name: str, known: Iterable[str], lead: str = "did you mean") -> str:
    """A help line with the known name that is nearest to `name`, or with all of them when none is near and they are few."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"{lead} `{close[0]}`?"
    if names and len(names) <= 12:
        return "known here: " + ", ".join(f"`{n}`" for n in names)
    return ""


def render(diagnostic: Diagnostic, sources: Mapping[str, str], style: str = "full") -> str:
    """The text of one diagnostic; `sources` maps a file's name to its text, for the underlined line."""
    head = f"{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}"
    span = diagnostic.span
    if style == "concise":
        where = f"{span.file}:{span.line}:{span.column}: " if span.line else ""
        return where + head + (f" (help: {diagnostic.help})" if diagnostic.help else "")
    margin = " " * len(str(max([span.line, *(s.line for s, _ in diagnostic.related)])))
    lines = [head]
    if span.line:
        lines += _excerpt(span, sources, margin)
    for other, note in diagnostic.related:
        lines += [f"{margin} = note: {note}", *_excerpt(other, sources, margin)]
    if diagnostic.help:
        indent = "\n" + " " * (len(margin) + 9)
        lines.append(f"{margin} = help: {diagnostic.help.replace(chr(10), indent)}")
    return "\n".join(lines)


def _excerpt(span: Span, sources: Mapping[str, str], margin: str) -> list[str]:
    lines = [f"{margin}--> {span.file}:{span.line}:{span.column}"]
    text = sources.get(span.file, "").split("\n")
    if span.line <= len(text) and span.file in sources:
        source = text[span.line - 1].rstrip("\r")
        end = span.end_column if span.end_line == span.line else len(source) + 1
        # Tabs keep their place above the carets, so that the underline meets the text in any terminal.
        lead = "".join("\t" if c == "\t" else " " for c in source[: span.column - 1])
        carets = "^" * max(1, end - span.column)
        number = str(span.line).rjust(len(margin))
        lines += [f"{margin} |", f"{number} | {source}", f"{margin} | {lead}{carets}"]
    return lines


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list of {code, severity, message, span, help, related}; positions are 1-based, ends exclusive."""

    def place(span: Span) -> dict[str, object] | None:
        if not span.line:
            return None
        return {
            "file": span.file,
            "start": {"line": span.line, "column": span.column},
            "end": {"line": span.end_line, "column": span.end_column},
        }

    return json.dumps(
        [
            {
                "code": d.code,
                "severity": d.severity,
                "message": d.message,
                "span": place(d.span),
                "help": d.help,
                "related": [{"span": place(s), "message": m} for s, m in d.related],
            }
            for d in diagnostics
        ],
        indent=2,
    )


# Every code, with what it means and why it matters: the text of `msrl-compile --explain CODE`.
CODES: dict[str, str] = {
    "syntax": "The text does not follow the grammar. One syntax error is told at a time: what follows it cannot be trusted.",
    "empty-file": "The file holds no algorithm, import, cluster or deploy, so there is nothing to compile.",
    "not-yet": (
        "The statement is part of the language and was understood, but this version cannot compile it. It is refused rather than ignored."
    ),
    "missing-file": "A file that the program names does not exist, or cannot be read.",
    "unknown-name": "A name that nothing in the file declares.",
    "unknown-column": (
        "A node reads or writes a column that the `columns` block does not declare. A misspelt name would otherwise look like "
        "an empty field."
    ),
    "unknown-attribute": "An attribute that this statement does not have. It would otherwise be ignored in silence, and a default used.",
    "unknown-option": "An option word or parameter that the called function does not have.",
    "unknown-function": "No function, loss term or optimizer has this name.",
    "unknown-verb": (
        "The worker's kind does not have this verb: a policy can generate, infer and update; a value or reward model infer and update."
    ),
    "unknown-model": "The model is neither a preset nor a folder with a Hugging Face config.json.",
    "unknown-device": "No device preset has this name.",
    "unknown-engine": "No engine has this name.",
    "unknown-unit": "The unit is not one that the language knows.",
    "bad-layout": "A layout's sizes do not fit each other, or the layout of another state that computes with the same weights.",
    "bad-place": (
        "`place` and `apart` contradict each other, the cluster, or the algorithm: a state is in one pool, states that share weights are "
        "in the same one, and no device is in two."
    ),
    "duplicate-name": "Two declarations share one name. Params, columns, states, workers and labels share one name space.",
    "two-writers": (
        "Two nodes write one column. A column has one writer, so that its value never depends on which came last; write a "
        "second column instead."
    ),
    "never-written": "A node reads a column that no node and no source writes.",
    "no-path": (
        "A node reads a column, but no path of sample edges leads from the column's writer to the node, so the rows would never reach it."
    ),
    "cycle": "The sample edges form a cycle: each node waits for the other, for ever.",
    "unreachable": "No path of sample edges leads from the source to this node, so it would never run.",
    "unused-column": "A column is written and nobody reads it: it costs memory and traffic for nothing.",
    "no-reshard": (
        "A worker is updated and generates, but no resharding edge leads from the update to the generation, so it would "
        "generate with the first weights for ever."
    ),
    "bad-reshard": "A resharding edge must lead from the update of a worker to a state that generates with the same model.",
    "frozen-update": "A frozen worker's weights never change, so it has no update.",
    "term-column": "A loss term or function needs a column that the node does not read.",
    "shared-staleness": (
        "`staleness` lets a generation run with older weights while newer ones are made. Where both share devices they take turns, so "
        "there is nothing to gain, and the rows would only be older."
    ),
    "unread-logp": (
        "With `staleness` or `partial`, older weights generated the rows than those that they update. What the weights that generated "
        "thought of each token is known while it is sampled only: a generation writes it as `f32[response]` beside the response, and a "
        "loss that reads it can correct for the difference."
    ),
    "stale-logp": (
        "A clipped loss compares the policy with the one that the responses came from. Without `old_logp` the log-probability of this very "
        "step stands in for it, which is exact for the first optimizer step on a batch only: from the second on the ratio would stay 1 and "
        "nothing would be clipped. More than one step is taken where `epochs` is above 1 or `mini_batch` is smaller than the batch; with "
        "`staleness` the responses are older weights' from the start."
    ),
    "bad-scope": "A statistic over a group needs all rows of the group at once; `per = row` may be given any subset of the rows.",
    "bad-value": "The value is of the wrong kind or out of range.",
    "bad-unit": "A unit where a plain number belongs, or a plain number where a unit is needed.",
    "division-by-zero": "An expression divides by zero.",
    "layout-size": "A layout takes tp x cp x pp x dp devices; its placement has fewer, or a different number.",
    "layout-divide": "The engine cannot divide the model's heads, layers or vocabulary so.",
    "known-bad": (
        "This combination is known to fail, or to be very slow: an engine's own rule, or a fault that others have met. The help says what "
        "to do instead."
    ),
    "mini-batch-divide": "The data-parallel size does not divide the mini-batch, so ranks would compute unequal shares.",
    "out-of-memory": "A phase needs more memory than a device or a host has. The table says what takes how much in each phase.",
    "no-deploy": "The program names no deploy with this name, or none that could be planned.",
    "no-data": "There are no data to train on: no file is named, it is empty, or none of its rows can be used.",
    "bad-data": "A row of the data file is not valid, or lacks a field that the deploy names.",
    "no-resources": "The machines do not have the devices that the plan asks for.",
    "bad-plan": "The plan file cannot be read as a plan of this version.",
    "bad-checkpoint": (
        "The checkpoint to resume from is not there, is damaged, or belongs to another program. Going on from it would give other results "
        "than the run that wrote it."
    ),
    "changed-program": (
        "The checkpoint was written by a program that differs in what decides the result. The run goes on from its weights, but is not the "
        "run that either program alone would have given."
    ),
    "calibration": (
        "What was measured of this machine cannot be used: the file that MSRL_HERE names, or here.json among the user's settings, is "
        "missing, broken, of another version, or of another machine. Seconds are predicted with assumed figures. `msrl-doctor --calibrate` "
        "writes it anew."
    ),
    "run-failed": "A process of the run died, or a wait passed its deadline.",
}
