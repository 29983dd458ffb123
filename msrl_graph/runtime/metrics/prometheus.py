"""Metrics of a run for Prometheus.

Invariant: all values come from run_status.py. Names, types, labels and meanings come from ir/metrics.py. Counters
restart from zero with each attempt of a run; Prometheus supports such resets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...ir.metrics import PROMETHEUS
from .run_status import RunFacts

Samples = Mapping[tuple[str, ...], float]  # by the values of the labels
PATIENCE = 2.0  # seconds that a scrape waits for a look at the docks
# By what RunFacts counts, the name of the family.
COUNTED = {
    "iterations": "msrl_iterations",
    "tokens": "msrl_tokens",
    "rows": "msrl_rows",
    "moved": "msrl_dock_moved_bytes",
    "messages": "msrl_dock_messages",
    "waited": "msrl_wait_seconds",
}
FAMILIES = {metric.name: metric for metric in PROMETHEUS}


class Collector:
    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts

    def describe(self) -> list[Metric]:
        return []  # else registration would collect, and wait

    def collect(self) -> Iterable[Metric]:
        facts = self.facts
        now = facts.fresh(PATIENCE)
        totals = list(facts.totals.items())
        for kind, name in COUNTED.items():
            yield _family(name, {tuple(values): total for (total_kind, *values), total in totals if total_kind == kind})
        yield _family("msrl_restarts", {(process,): number for process, number in {"run": 0, **facts.restarts}.items()})
        yield _family("msrl_iterations_asked", {(): now.total})
        yield _family("msrl_iterations_done", {(): now.done})
        last = facts.lines[-1] if facts.lines else {}
        yield _family("msrl_metric", {(key,): last[key] for key in now.curves})
        yield _family("msrl_phase_seconds", {(name,): seconds for name, seconds in last.get("phases", {}).items()})
        figures: Samples = {
            (evaluation["evaluation"], key): value
            for evaluation in list(facts.evaluations)
            for key, value in evaluation.items()
            if isinstance(value, int | float) and key != "after_iterations"
        }
        yield _family("msrl_evaluation", figures)
        rows: Samples = {
            (state.node, count_name): number
            for state in now.states
            for count_name, number in (("done", state.done), ("handed", state.handed), ("known", state.of))
        }
        yield _family("msrl_state_rows", rows)
        yield _family("msrl_waiting_seconds", {(wait.who.replace("`", ""),): wait.seconds for wait in now.waits})
        held: Samples = {(str(host.number),): host.held for host in now.hosts if host.held is not None}
        yield _family("msrl_warehouse_bytes", held)
        memory: Samples = {
            (str(host.number), process.name): process.memory
            for host in now.hosts
            for process in host.processes
            if process.memory
        }
        yield _family("msrl_memory_bytes", memory)
        yield _family("msrl_host_memory_used_bytes", {(str(host.number),): host.used for host in now.hosts})
        yield _family("msrl_host_memory_bytes", {(str(host.number),): host.total for host in now.hosts})


def _family(name: str, samples: Samples) -> Metric:
    """Return a family of metrics with its samples, by the values of its labels."""
    family = FAMILIES[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = kind(name, family.help, labels=tuple(family.labels))
    for labels, value in samples.items():
        made.add_metric(labels, value)
    return made


def handler(facts: RunFacts) -> type[BaseHTTPRequestHandler]:
    """Return a request handler class that serves the metrics of a run."""
    registry = CollectorRegistry()
    registry.register(Collector(facts))
    handler_class: type[BaseHTTPRequestHandler] = MetricsHandler.factory(registry)
    return handler_class
