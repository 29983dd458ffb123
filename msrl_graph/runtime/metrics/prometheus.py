"""Metrics of a run for Prometheus; docs/reference/metrics.md has the names.

Invariant: all values come from run_status.py. Counters restart from zero with each attempt of a run; Prometheus
supports such resets.
"""

from __future__ import annotations

from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .run_status import RunFacts

PATIENCE = 2.0  # seconds that a scrape waits for a look at the docks
# By what is counted: name of the counter, description, and the labels of its parts.
COUNTED = {
    "iterations": ("msrl_iterations", "iterations that ended", ()),
    "tokens": ("msrl_tokens", "tokens of all responses, and of the prompt of each response", ("kind",)),
    "rows": ("msrl_rows", "rows that optimizer steps saw", ()),
    "moved": ("msrl_dock_moved_bytes", "bytes of rows put into warehouses and got from them", ("node", "way")),
    "messages": ("msrl_dock_messages", "messages to the docks", ()),
    "waited": ("msrl_wait_seconds", "seconds that a process waited for rows", ("process",)),
}


class Collector:
    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts

    def describe(self) -> list[Metric]:
        return []  # else registration would collect, and wait

    def collect(self) -> Iterable[Metric]:
        facts = self.facts
        now = facts.fresh(PATIENCE)
        totals = list(facts.totals.items())
        for kind, (name, help, labels) in COUNTED.items():
            counter = CounterMetricFamily(name, help, labels=labels)
            for (total_kind, *values), total in totals:
                if total_kind == kind:
                    counter.add_metric(values, total)
            yield counter
        restarts = CounterMetricFamily("msrl_restarts", "restarts of processes, and of the run itself", labels=["of"])
        for process, number in {"run": 0, **facts.restarts}.items():
            restarts.add_metric([process], number)
        yield restarts
        yield _gauge("msrl_iterations_asked", "iterations that the run will have in all", (), {(): now.total})
        yield _gauge("msrl_iterations_done", "iterations of the run that are done", (), {(): now.done})
        last = facts.lines[-1] if facts.lines else {}
        yield _gauge(
            "msrl_metric",
            "the last iteration's figures, by their keys in metrics.jsonl",
            ("key",),
            {(key,): last[key] for key in now.curves},
        )
        yield _gauge(
            "msrl_phase_seconds",
            "seconds of each phase in the last iteration, in its slowest process",
            ("phase",),
            {(name,): seconds for name, seconds in last.get("phases", {}).items()},
        )
        figures: dict[tuple[str, ...], float] = {
            (evaluation["evaluation"], key): value
            for evaluation in list(facts.evaluations)
            for key, value in evaluation.items()
            if isinstance(value, int | float) and key != "after_iterations"
        }
        yield _gauge("msrl_evaluation", "the last figures of each evaluation", ("evaluation", "key"), figures)
        yield _gauge(
            "msrl_state_rows",
            "rows of the iteration in progress, by worker state",
            ("node", "what"),
            {
                (state.node, count_name): number
                for state in now.states
                for count_name, number in (("done", state.done), ("handed", state.handed), ("known", state.of))
            },
        )
        waits: dict[tuple[str, ...], float] = {}
        for wait in now.waits:
            waits[wait.who.replace("`", ""),] = wait.seconds
        yield _gauge("msrl_waiting_seconds", "seconds that each waiting process has waited for rows", ("who",), waits)
        yield _gauge(
            "msrl_warehouse_bytes",
            "bytes of rows in each host's warehouse",
            ("host",),
            {(str(host.number),): host.held for host in now.hosts if host.held is not None},
        )
        yield _gauge(
            "msrl_memory_bytes",
            "resident memory of each process, including shared memory",
            ("host", "process"),
            {
                (str(host.number), process.name): process.memory
                for host in now.hosts
                for process in host.processes
                if process.memory
            },
        )
        for name, help, attribute in (
            ("msrl_host_memory_used_bytes", "memory of each host that is used", "used"),
            ("msrl_host_memory_bytes", "memory of each host", "total"),
        ):
            yield _gauge(name, help, ("host",), {(str(host.number),): getattr(host, attribute) for host in now.hosts})


def _gauge(name: str, help: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]) -> Metric:
    gauge = GaugeMetricFamily(name, help, labels=labels)
    for label, value in values.items():
        gauge.add_metric(label, value)
    return gauge


def handler(facts: RunFacts) -> type[BaseHTTPRequestHandler]:
    """Return a request handler class that serves the metrics of a run."""
    registry = CollectorRegistry()
    registry.register(Collector(facts))
    handler_class: type[BaseHTTPRequestHandler] = MetricsHandler.factory(registry)
    return handler_class
