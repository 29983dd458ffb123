"""The page docs/reference/metrics.md, filled in from the registry of metrics.

Invariant: names, units, reductions and meanings of metrics come from ir/metrics.py. metrics.md in this folder has the
rest of the page. These code blocks are filled in:

    ```metrics TABLE    a table of `ITERATION_TABLES` or `EVALUATION_TABLES`
    ```prometheus all   the table of the metrics for Prometheus
    ```placeholders all the list of the placeholders in names
    ```reductions all   the list of reductions

`python -m msrl_graph.reference.metric_page` prints the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..ir.iteration_metrics import ITERATION_TABLES
from ..ir.metric import PLACEHOLDERS, REDUCTIONS, Metric
from ..ir.metrics import EVALUATION_TABLES, PROMETHEUS

SOURCE = Path(__file__).parent / "metrics.md"
TABLES = ITERATION_TABLES | EVALUATION_TABLES  # type: ignore[operator]
_BLOCK = re.compile(r"^```(metrics|prometheus|placeholders|reductions) ([^\n]+)\n```$", re.MULTILINE)
_OWN = {
    "update": "if there are several updates: the figure of the update NODE",
    "generate": "the figure of the second or a later `generate` node",
}


def document() -> str:
    """Return the text of docs/reference/metrics.md."""
    return _BLOCK.sub(lambda match: _fill_block(match[1], match[2]), SOURCE.read_text(encoding="utf-8"))


def _fill_block(kind: str, name: str) -> str:
    match kind:
        case "metrics":
            return _metrics_table(TABLES[name])
        case "prometheus":
            return _prometheus_table()
        case "placeholders":
            return "\n".join(f"- {word}: {meaning}" for word, meaning in PLACEHOLDERS.items())
    return "\n".join(f"- *{word}*: {meaning}" for word, meaning in REDUCTIONS.items())


def _metrics_table(metrics: Sequence[Metric]) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.reduction} | {metric.doc} |" for metric in metrics]
    for verb, meaning in _OWN.items():
        if names := [f"`NODE/{metric.name}`" for metric in metrics if metric.verb == verb]:
            rows.append(f"| {', '.join(names)} | | | {meaning} |")
    return "\n".join(["| key | unit | reduction | meaning |", "|---|---|---|---|", *rows])


def _prometheus_table() -> str:
    rows = []
    for metric in PROMETHEUS:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        labels = ", ".join(f"`{label}`{values and f': {values}'}" for label, values in metric.labels.items())
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.doc} |")
    return "\n".join(["| name | type | labels | meaning |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(document(), end="")
