"""Signs in the metrics that something is wrong with a run.

A sign is reported when it first appears. It is reported again only if it has been absent for CALM iterations. So a
figure that swings around its threshold is reported once.

Invariant: the reports depend only on the metrics lines in their order. So a resumed run reports the same signs as a run
without the interruption. The program states the thresholds in its `run { }` block. A sign that ends the run is reported
by `end_reason`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ir.graph import Graph, Node
from ...ir.plan import Plan, is_reported
from ..data.numerics import find_comparison

PAGE = "docs/guides/training_problems.md"
CALM = 10


class HealthChecks:
    """Checks of a run's metrics; call `look` with the metrics line of each iteration."""

    def __init__(self, plan: Plan) -> None:
        self.graph = plan.graph
        self.run = plan.deploy.run
        self.compares = find_comparison(plan)
        self.judged = {column: plan.graph.writer(column) for column in judged_columns(plan.graph)}
        self.flat = dict.fromkeys(self.judged, 0)  # latest iterations in a row without spread
        self.first: dict[str, float] = {}  # entropy of each update in its first iteration
        self.lines = 0
        self.seen: dict[str, int] = {}  # by sign, the last line that had it

    def look(self, line: dict[str, Any]) -> list[str]:
        """Return a warning for each new sign in the metrics line of an iteration."""
        self.lines += 1
        signs = dict(self._signs(line))
        recent = {sign for sign, line_number in self.seen.items() if self.lines - line_number <= CALM}
        new = [
            f"warning: {words} in iteration {line['iteration']} (`{node.name}`, {node.span.place}): {PAGE}"
            for sign, (words, node) in signs.items()
            if sign not in recent
        ]
        self.seen |= dict.fromkeys(signs, self.lines)
        return new

    def end_reason(self, line: dict[str, Any]) -> str:
        """Return why the run ends with this iteration; "" if the run continues."""
        node = self._find_drift(line) if self.run.on_drift == "stop" else None
        if node is None:
            return ""
        return (
            f"`{node.name}` ({node.span.place}) in iteration {line['iteration']}: {self._describe_drift(line)}: {PAGE}"
        )

    def _find_drift(self, line: dict[str, Any]) -> Node | None:
        """Return the node that measures drift, if the drift is more than `max_drift`.

        The drift is the difference between the trainer's and the generator's log-probabilities. Returns None if the
        drift is at most `max_drift`, or if no node of the plan measures drift.
        """
        bound = self.run.max_drift
        if self.compares is None or bound is None or not line.get("logp_drift", 0.0) > bound:
            return None
        return self.graph.node(self.compares.node)

    def _describe_drift(self, line: dict[str, Any]) -> str:
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
        compares = self._find_drift(line) if run.on_drift == "warn" else None
        if compares is not None:
            yield "drift", (f"{self._describe_drift(line)},", compares)
        generations = list(self.graph.verb("generate"))
        updates = list(self.graph.verb("update"))
        for node in generations:
            key = "response_truncated" if node is generations[0] else f"{node.name}/response_truncated"
            if line.get(key, 0.0) > run.warn_truncated:
                yield key, (f"{line[key]:.0%} of the responses were cut at their bound", node)
        for node in updates:
            metric_prefix = f"{node.name}/" if len(updates) > 1 else ""
            entropy = line.get(f"{metric_prefix}entropy")
            if entropy is not None:
                first = self.first.setdefault(node.name, entropy)
                if entropy < run.warn_entropy * first:
                    yield (
                        f"{metric_prefix}entropy",
                        (f"the entropy has fallen from {first:.3g} to {entropy:.3g} nats a token", node),
                    )
            for key in (
                figure_key
                for figure_key in line
                if figure_key.startswith(metric_prefix)
                and figure_key.removeprefix(metric_prefix) in ("loss/kl", "clip/kl")
            ):
                if run.warn_kl and line[key] > run.warn_kl:
                    yield key, (f"`{key}` is {line[key]:.3g} nats a token, over {run.warn_kl:g},", node)


def judged_columns(graph: Graph) -> list[str]:
    """Return the columns from which nodes compute group-relative advantages.

    Such a column has one value per response. A node computes the advantage of a response from the values of several
    responses.
    """
    compared = [
        node for node in graph.nodes if node.per != "row" and any(graph.column(column).dims for column in node.writes)
    ]
    return sorted({column for node in compared for column in node.reads if is_reported(graph, column)})
