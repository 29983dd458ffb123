"""The registry of metrics: all figures that a run reports.

Invariant: every key of a line of metrics.jsonl is the name of a metric here, and every family of metrics for Prometheus
is in `PROMETHEUS`. The tables of docs/reference/metrics.md, the names that no reported column may have, and the HELP
and TYPE lines for Prometheus are made from this module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

from .graph import Graph
from .iteration_metrics import ITERATION_TABLES
from .metric import FAILURES, PLACEHOLDERS, Metric, PrometheusMetric
from .plan import is_reported

EVALUATION = (
    Metric("evaluation", "", "one", "the name of the evaluation, by default the name of its data"),
    Metric("after_iterations", "", "one", "the number of iterations that had ended before the evaluation"),
    Metric("seconds", "s", "one", "the time that the evaluation took"),
    Metric(
        "COLUMN",
        "as written",
        "mean",
        "the mean of each reported column over its finite values (`null` if there are none), over the rows that did "
        "not fail",
    ),
    Metric("without/COLUMN", "rows", "sum", "as in an iteration"),
    Metric("wrong/REASON", "rows", "sum", "as in an iteration"),
    Metric("verify/cut_off", "rows", "sum", "as in an iteration"),
    Metric("failed", "rows", "sum", f"the number of rows that failed {FAILURES}", "generate"),
    Metric("failed/REASON", "rows", "sum", "the same by reason", "generate"),
    Metric("NODE/failed", "rows", "sum", "the number of rows whose function failed"),
    Metric("NODE/failed/REASON", "rows", "sum", "the same by reason"),
)
SEVERAL_RESPONSES = (
    Metric(
        "COLUMN/pass@K",
        "",
        "mean",
        "the probability that at least one of K responses passes. A response passes if its value is at least `passing` "
        "(default: 1). If c of n responses pass, the probability is 1 - C(n - c, K) / C(n, K). This is the unbiased "
        "estimator of [Chen et al. 2021](https://arxiv.org/abs/2107.03374), equation 1",
    ),
    Metric("COLUMN/best@K", "as written", "mean", "the largest value of K responses"),
    Metric(
        "COLUMN/maj@K",
        "as written",
        "mean",
        "with `vote = COLUMN`: the value of the most frequent answer of K responses",
    ),
    Metric(
        "COLUMN/fewer@K",
        "prompts",
        "sum",
        "the number of prompts that have fewer than K values, because rows failed or values are not finite. The other "
        "figures exclude these prompts. No key if there are none",
    ),
)
GROUPS = (
    Metric("COLUMN/GROUP", "as written", "mean", "the mean of the rows with this value alone"),
    Metric("COLUMN/pass@K/GROUP", "", "mean", "`COLUMN/pass@K` of these rows"),
    Metric("COLUMN/best@K/GROUP", "as written", "mean", "`COLUMN/best@K` of these rows"),
    Metric("COLUMN/maj@K/GROUP", "as written", "mean", "`COLUMN/maj@K` of these rows"),
    Metric("COLUMN/fewer@K/GROUP", "prompts", "sum", "`COLUMN/fewer@K` of these rows"),
    Metric("rows/GROUP", "prompts", "sum", "the number of prompts that have this value"),
)
EVALUATION_TABLES: Mapping[str, tuple[Metric, ...]] = {
    "evaluation": EVALUATION,
    "several responses": SEVERAL_RESPONSES,
    "groups": GROUPS,
}
ITERATION_METRICS = tuple(metric for table in ITERATION_TABLES.values() for metric in table)
EVALUATION_METRICS = tuple(metric for table in EVALUATION_TABLES.values() for metric in table)
# The names that no reported column may have: each is the key of another figure.
RESERVED = frozenset(
    metric.name
    for metric in (*ITERATION_METRICS, *EVALUATION_METRICS)
    if "/" not in metric.name and not metric.placeholders
)
PROMETHEUS = (
    PrometheusMetric("msrl_iterations", "counter", {}, "the number of iterations that ended"),
    PrometheusMetric(
        "msrl_tokens", "counter", {"kind": "`prompt`, `response`"}, "as `prompt_tokens` and `response_tokens`"
    ),
    PrometheusMetric("msrl_rows", "counter", {}, "as `rows`: rows that optimizer steps saw"),
    PrometheusMetric(
        "msrl_dock_moved_bytes",
        "counter",
        {"node": "", "way": ""},
        "as `dock_bytes`: `put`, `get`, `get away`, `get here`",
    ),
    PrometheusMetric("msrl_dock_messages", "counter", {}, "as `dock_messages`"),
    PrometheusMetric(
        "msrl_wait_seconds",
        "counter",
        {"process": ""},
        "the seconds that the process waited for rows, including waits that overlap with other work",
    ),
    PrometheusMetric(
        "msrl_restarts",
        "counter",
        {"of": "`run`, or a process"},
        "the number of restarts. A restart of a dock counts only if a client scraped before and after the restart",
    ),
    PrometheusMetric("msrl_iterations_asked", "gauge", {}, "the total number of iterations of the run"),
    PrometheusMetric(
        "msrl_iterations_done",
        "gauge",
        {},
        "the number of finished iterations of the run, including iterations before this start",
    ),
    PrometheusMetric(
        "msrl_metric", "gauge", {"key": ""}, "the figures of the last iteration, by their keys in metrics.jsonl"
    ),
    PrometheusMetric("msrl_phase_seconds", "gauge", {"phase": ""}, "the `phases` of the last iteration"),
    PrometheusMetric("msrl_evaluation", "gauge", {"evaluation": "", "key": ""}, "the last figures of the evaluation"),
    PrometheusMetric(
        "msrl_state_rows",
        "gauge",
        {"node": "", "what": "`done`, `handed`, `known`"},
        "the rows of the current iteration that a node has finished (`done`), that it has received (`handed`), and "
        "that are known to exist (`known`). A row counts once per epoch",
    ),
    PrometheusMetric(
        "msrl_waiting_seconds", "gauge", {"who": ""}, "the seconds that each waiting process has waited for rows"
    ),
    PrometheusMetric("msrl_warehouse_bytes", "gauge", {"host": ""}, "the bytes of rows in the warehouse of the host"),
    PrometheusMetric(
        "msrl_memory_bytes", "gauge", {"host": "", "process": ""}, "the resident memory, including shared memory"
    ),
    PrometheusMetric("msrl_host_memory_used_bytes", "gauge", {"host": ""}, "the used memory of the host"),
    PrometheusMetric("msrl_host_memory_bytes", "gauge", {"host": ""}, "the total memory of the host"),
)


def find_metric(key: str, graph: Graph, evaluates: bool = False) -> Metric | None:
    """Return the metric of a key of a metrics line; None if there is none.

    `graph` is the graph of the program, whose names take the places of placeholders. `evaluates` says whether the line
    is that of an evaluation. If several names match, the result is the one with the fewest placeholders.
    """
    metrics = EVALUATION_METRICS if evaluates else ITERATION_METRICS
    matching = [metric for metric in metrics if _pattern(metric, graph).fullmatch(key)]
    return min(matching, key=lambda metric: len(metric.placeholders), default=None)


def _pattern(metric: Metric, graph: Graph) -> re.Pattern[str]:
    """Return the pattern of the keys of a metric in a program."""
    known: Mapping[str, Collection[str]] = {
        "COLUMN": [column.name for column in graph.columns if is_reported(graph, column.name)],
        "STATE": [state.name for state in graph.states],
        "NODE": [node.name for node in graph.nodes],
    }
    parts = [
        (_alternatives(known[part]) if part in known else _SHAPES[part]) if part in PLACEHOLDERS else re.escape(part)
        for part in metric.parts()
    ]
    nodes = [node.name for node in graph.verb(metric.verb)] if metric.verb else []
    prefix = f"(?:{_alternatives(nodes)}/)?" if nodes else ""
    return _compiled(prefix + "".join(parts))


def _alternatives(names: Collection[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})" if names else "(?!)"


_compiled = functools.cache(re.compile)
# What the other placeholders stand for. A GROUP may contain anything.
_SHAPES = {
    "TERM": r"\w+",
    "NAME": r"\w+",
    "FIGURE": r"[a-z]\w*",
    "REASON": r"\w[\w ]*",
    "N": r"\d+",
    "K": r"\d+",
    "GROUP": r"\w+=[\s\S]*",
}
