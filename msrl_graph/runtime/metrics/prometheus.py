"""What those who watch a run are told, as Prometheus reads it: docs/metrics.md has the names.

Invariant: it shows facts of run_status.py and has none of its own. Counters begin anew with an attempt of a run, which
Prometheus is made for.
"""

from __future__ import annotations

from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .run_status import RunFacts

PATIENCE = 2.0  # seconds that a scrape waits for a look at the docks
# Of what is counted: how it is called, what it is, and the labels that its parts are told apart by.
COUNTED = {
    "iterations": ("msrl_iterations", "iterations that ended", ()),
    "tokens": ("msrl_tokens", "tokens of all responses, and of a prompt once a response", ("kind",)),
    "rows": ("msrl_rows", "rows that optimizer steps saw", ()),
    "moved": ("msrl_dock_moved_bytes", "bytes of rows put into warehouses and got from them", ("node", "way")),
    "messages": ("msrl_dock_messages", "messages to the docks", ()),
    "waited": ("msrl_wait_seconds", "seconds that a process waited for rows", ("process",)),
}


class Collector:
    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts

    def describe(self) -> list[Metric]:
        return []  # else it would be collected, and wait, when it is registered

    def collect(self) -> Iterable[Metric]:
        facts = self.facts
        now = facts.fresh(PATIENCE)
        totals = list(facts.totals.items())
        for what, (name, help, labels) in COUNTED.items():
            counter = CounterMetricFamily(name, help, labels=labels)
            for (of, *values), total in totals:
                if of == what:
                    counter.add_metric(values, total)
            yield counter
        restarts = CounterMetricFamily("msrl_restarts", "processes started again, and of the run itself", labels=["of"])
        for what, number in {"run": 0, **facts.restarts}.items():
            restarts.add_metric([what], number)
        yield restarts
        yield _gauge("msrl_iterations_asked", "iterations that the run is to have", (), {(): now.total})
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
            "seconds of each phase in the last iteration, the slowest process's",
            ("phase",),
            {(name,): seconds for name, seconds in last.get("phases", {}).items()},
        )
        held: dict[tuple[str, ...], float] = {
            (e["evaluation"], key): value
            for e in list(facts.evaluations)
            for key, value in e.items()
            if isinstance(value, int | float) and key != "after_iterations"
        }
        yield _gauge("msrl_evaluation", "the last figures of each evaluation", ("evaluation", "key"), held)
        yield _gauge(
            "msrl_state_rows",
            "rows of the iteration under way, by worker state",
            ("node", "what"),
            {
                (s.node, what): number
                for s in now.states
                for what, number in (("done", s.done), ("handed", s.handed), ("known", s.of))
            },
        )
        waits: dict[tuple[str, ...], float] = {}
        for w in now.waits:
            waits[w.who.replace("`", ""),] = w.seconds
        yield _gauge("msrl_waiting_seconds", "for how long who waits for rows has waited", ("who",), waits)
        yield _gauge(
            "msrl_warehouse_bytes",
            "bytes of rows in each host's warehouse",
            ("host",),
            {(str(h.number),): h.held for h in now.hosts if h.held is not None},
        )
        yield _gauge(
            "msrl_memory_bytes",
            "resident memory of each process, what it shares included",
            ("host", "process"),
            {(str(h.number), p.name): p.memory for h in now.hosts for p in h.processes if p.memory},
        )
        for name, help, of in (
            ("msrl_host_memory_used_bytes", "memory of each host that is used", "used"),
            ("msrl_host_memory_bytes", "memory of each host", "total"),
        ):
            yield _gauge(name, help, ("host",), {(str(h.number),): getattr(h, of) for h in now.hosts})


def _gauge(name: str, help: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]) -> Metric:
    gauge = GaugeMetricFamily(name, help, labels=labels)
    for label, value in values.items():
        gauge.add_metric(label, value)
    return gauge


def handler(facts: RunFacts) -> type[BaseHTTPRequestHandler]:
    """Serves them."""
    registry = CollectorRegistry()
    registry.register(Collector(facts))
    found: type[BaseHTTPRequestHandler] = MetricsHandler.factory(registry)
    return found
