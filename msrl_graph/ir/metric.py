"""Descriptions of metrics: name, unit, reduction and meaning.

A word in capitals in a name is a placeholder, such as COLUMN in `COLUMN/std`. `PLACEHOLDERS` says what it stands for.

Invariant: this module describes metrics; metrics.py has the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# How the values of processes, rows and steps become the one value of a line.
Reduction = Literal["one", "mean", "sum", "max", "ratio"]
REDUCTIONS: Mapping[Reduction, str] = {
    "one": "the driver knows the value",
    "mean": "the mean of all values of all processes",
    "sum": "the sum of all processes",
    "max": "the largest value of all processes",
    "ratio": "computed from sums of all processes",
}
PLACEHOLDERS = {
    "COLUMN": "a column whose mean is reported",
    "STATE": "a state of the algorithm",
    "NODE": "a node",
    "TERM": "a loss term",
    "NAME": "the name of a loss term in the sum of an update",
    "FIGURE": "a figure that a loss term returns",
    "REASON": "a reason",
    "N": "a number of versions",
    "K": "a number of responses",
    "GROUP": "`by` of the evaluation, `=` and a value of this column",
}


@dataclass(frozen=True)
class Metric:
    """A figure that a run reports.

    - `name`: the key of the figure in a metrics line, with placeholders in capitals.
    - `unit`: the unit; "" for a plain number.
    - `reduction`: how the values of several processes become one value.
    - `doc`: the meaning, as Markdown. Links are relative to docs/reference/.
    - `verb`: the verb of the nodes that have a figure of their own, `NODE/name`, if the program has several such nodes;
      "" if there is only one figure.
    """

    name: str
    unit: str
    reduction: Reduction
    doc: str
    verb: str = ""

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.name))

    def parts(self) -> Iterator[str]:
        """Yield the placeholders of the name, and the texts between them."""
        end = 0
        for match in _PLACEHOLDER.finditer(self.name):
            yield self.name[end : match.start()]
            yield match[0]
            end = match.end()
        yield self.name[end:]


@dataclass(frozen=True)
class PrometheusMetric:
    """A family of metrics for Prometheus, with its labels and their values.

    A counter counts from the start of the attempt; a gauge has the most recent value.
    """

    name: str
    kind: Literal["counter", "gauge"]
    labels: Mapping[str, str]
    doc: str

    @property
    def help(self) -> str:
        """The meaning as plain text."""
        return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", self.doc).replace("`", "")


_PLACEHOLDER = re.compile(rf"\b(?:{'|'.join(sorted(PLACEHOLDERS, key=len, reverse=True))})\b")
FAILURES = "([below](#rows-that-failed))"
