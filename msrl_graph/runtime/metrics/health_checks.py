"""Signs in the metrics that a run goes wrong, each told once, and again when it comes back after it was away for CALM
iterations: a figure that swings about its threshold is told of once.

Invariant: a function of the metrics' lines in their order: a run that goes on tells what it would have told. Thresholds
are those of `run`. What ends a run is told apart (`ends`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ir.graph import Graph, Node
from ...ir.plan import Plan, reported
from ..data.numerics import comparison

PAGE = "docs/metrics.md#when-a-run-goes-wrong"
CALM = 10


class HealthChecks:
    """Of a plan's runs. `look` is handed each iteration's line."""

    def __init__(self, plan: Plan) -> None:
        self.graph = plan.graph
        self.run = plan.deploy.run
        self.compares = comparison(plan)
        self.judged = {c: plan.graph.writer(c) for c in judged(plan.graph)}
        self.flat = dict.fromkeys(self.judged, 0)  # iterations without spread up to now
        self.first: dict[str, float] = {}  # the entropy that each update began with
        self.lines = 0
        self.seen: dict[str, int] = {}  # by sign the last line that had it

    def look(self, line: dict[str, Any]) -> list[str]:
        """What is new in this iteration, in words."""
        self.lines += 1
        found = dict(self._signs(line))
        recent = {sign for sign, at in self.seen.items() if self.lines - at <= CALM}
        new = [
            f"warning: {words} in iteration {line['iteration']} (`{node.name}`, {node.span.place}): {PAGE}"
            for sign, (words, node) in found.items()
            if sign not in recent
        ]
        self.seen |= dict.fromkeys(found, self.lines)
        return new

    def ends(self, line: dict[str, Any]) -> str:
        """Why the run ends with this iteration, in words; "": it does not."""
        node = self._drifted(line) if self.run.on_drift == "stop" else None
        if node is None:
            return ""
        return f"`{node.name}` ({node.span.place}) in iteration {line['iteration']}: {self._drift(line)}: {PAGE}"

    def _drifted(self, line: dict[str, Any]) -> Node | None:
        """Who has compared trainer and generator, where they are too far apart."""
        most = self.run.max_drift
        if self.compares is None or most is None or not line.get("logp_drift", 0.0) > most:
            return None
        return self.graph.node(self.compares.node)

    def _drift(self, line: dict[str, Any]) -> str:
        return (
            f"the log-probabilities of trainer and generator differ by {line['logp_drift']:.3g} nats a token, over "
            f"{self.run.max_drift:g}"
        )

    def _signs(self, line: dict[str, Any]) -> Iterator[tuple[str, tuple[str, Node]]]:
        run = self.run
        for name, node in self.judged.items():
            self.flat[name] = self.flat[name] + 1 if line.get(f"{name}/flat") == 1 else 0
            if run.warn_flat and self.flat[name] >= run.warn_flat:
                words = (
                    f"`{name}` has been the same for all responses to a prompt for {run.warn_flat} iterations: "
                    "nothing is learnt from it,"
                )
                yield f"flat {name}", (words, node)
        compares = self._drifted(line) if run.on_drift == "warn" else None
        if compares is not None:
            yield "drift", (f"{self._drift(line)},", compares)
        generations = list(self.graph.verb("generate"))
        updates = list(self.graph.verb("update"))
        for node in generations:
            key = "response_truncated" if node is generations[0] else f"{node.name}/response_truncated"
            if line.get(key, 0.0) > run.warn_truncated:
                yield key, (f"{line[key]:.0%} of the responses were cut at their bound", node)
        for node in updates:
            head = f"{node.name}/" if len(updates) > 1 else ""
            entropy = line.get(f"{head}entropy")
            if entropy is not None:
                first = self.first.setdefault(node.name, entropy)
                if entropy < run.warn_entropy * first:
                    yield (
                        f"{head}entropy",
                        (f"the entropy has fallen from {first:.3g} to {entropy:.3g} nats a token", node),
                    )
            for key in (k for k in line if k.startswith(head) and k.removeprefix(head) in ("loss/kl", "clip/kl")):
                if run.warn_kl and line[key] > run.warn_kl:
                    yield key, (f"`{key}` is {line[key]:.3g} nats a token, over {run.warn_kl:g},", node)


def judged(graph: Graph) -> list[str]:
    """The numbers of a response from which a node makes advantages of its tokens, together with those of other
    responses."""
    compared = [n for n in graph.nodes if n.per != "row" and any(graph.column(c).dims for c in n.writes)]
    return sorted({c for n in compared for c in n.reads if reported(graph, c)})
