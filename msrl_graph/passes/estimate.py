"""Estimate: the seconds of each phase and of an iteration, and the throughput.

Without staleness, the seconds of an iteration are the length of its critical path. The throughput is in tokens per
second and device (arXiv:2507.19017, eq. 5). Invariant: this module only adds up seconds; cost/time.py computes the
seconds of each operation. Every row has the greatest length that its columns allow. Nothing is measured in this module.
The source of a figure is the least certain source of its inputs, and its basis is its formula. The work of Python
functions is not counted, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..analysis.async_schedule import Sends, late_states, lead_of_pools, row_age_bound
from ..cost import holdings
from ..cost import transfers as costs
from ..cost.followers import follower_seconds
from ..cost.lengths import Rows
from ..cost.time import Costs
from ..diagnostics.quantities import duration, plural, staleness
from ..diagnostics.sheet import Sheet
from ..hardware.cluster import Figure, weakest
from ..ir.attributes import GenerateAttributes, UpdateAttributes
from ..ir.graph import Graph
from ..ir.plan import FUNCTIONS, Estimate, Phase, Plan, PlanNote, StalenessEstimate
from .facts import Fact, Section
from .spec import Pass, describe_incomplete
from .throughput import critical_path, estimate_pace

EXCHANGE = "gradient exchange"


@dataclass(frozen=True)
class EstimateTime(Pass):
    """The pass that estimates time.

    `rows` are the token counts of all responses of an iteration, if they are known. If `rows` is None, all rows have
    the greatest length that their columns allow.
    """

    name = "estimate"
    title = "Seconds"
    needs = ("place", "reshard", "schedule", "traffic")
    fills = ("estimate",)

    rows: Rows | None = None

    def apply(self, plan: Plan) -> Plan:
        seconds: dict[tuple[str, str], Figure] = {}  # by instruction
        used: dict[tuple[str, str], set[str]] = {}  # the pools whose ranks take part
        phases: list[Phase] = []
        sends = Sends(plan)
        for edge in plan.reshards:
            src = plan.placement(edge.src).pool
            dst = plan.placement(edge.dst).pool
            alone = edge.copied is not None  # fetched from a copy, which the update's ranks make
            # Weights that are not sent each time cost this share on average.
            share = sends.share((edge.src, edge.dst)) if alone else 1.0
            seconds["RESHARD", edge.dst] = _scale_by_share(costs.reshard(plan, edge), share)
            used["RESHARD", edge.dst] = {dst} if alone else {src, dst}
            if alone:
                seconds["PUBLISH", edge.dst] = _scale_by_share(costs.publish(plan, edge), share)
                used["PUBLISH", edge.dst] = {src}
            if edge.swap_in.bytes:
                seconds["SWAP_IN", edge.src] = costs.swap_in(edge)
                used["SWAP_IN", edge.src] = {src}
        # Edges of different pools run in parallel: a phase shows the pool that spends most.
        for name, op in (("reshard", "RESHARD"), ("copy to send from", "PUBLISH"), ("swap in (H2D)", "SWAP_IN")):
            by_pool = {
                pool.name: [figure for key, figure in seconds.items() if key[0] == op and pool.name in used[key]]
                for pool in plan.pools
            }
            pool, figures = max(by_pool.items(), key=lambda item: math.fsum(figure.value for figure in item[1]))
            if figures:
                basis = figures[0].basis if len(figures) == 1 else "the sum of all resharding edges'"
                phases.append(
                    Phase(name, pool, Figure(math.fsum(figure.value for figure in figures), weakest(*figures), basis))
                )
        for node in plan.graph.nodes:
            pool = plan.placement(node.name).pool
            if pool == FUNCTIONS:
                if node.verb != "source":
                    figure = costs.function_overhead(plan, holdings.row_count(plan, node.name))
                    phases.append(Phase(node.name, pool, figure))
                    seconds["RUN", node.name] = figure
                continue
            figure, exchange = self.of_node(plan, node.name)
            phases.append(Phase(node.name, pool, figure))
            seconds["RUN", node.name] = figure
            if exchange.value:
                phases.append(Phase(f"{EXCHANGE} of {node.name}", pool, exchange))
                seconds["RUN", node.name] = Figure(
                    figure.value + exchange.value, weakest(figure, exchange), "compute, then exchange"
                )
        dispatch = [traffic.seconds for traffic in plan.traffic if traffic.bytes]
        if dispatch:
            total = math.fsum(part.value for part in dispatch)
            phases.append(
                Phase("dispatch, all sample edges", "docks", Figure(total, weakest(*dispatch), "the sum of the edges"))
            )
        around = costs.iteration_overhead(plan)
        phases.append(Phase("start and end", "driver", around))
        values = {key: figure.value for key, figure in seconds.items()}
        paced = estimate_pace(plan, values, around.value)
        source = weakest(around, plan.cluster.device.overheads.handover, *seconds.values(), *dispatch)
        iteration = Figure(paced.seconds, source, paced.why)
        staleness = None
        if lead_of_pools(plan):
            length, path = critical_path(plan, values)
            mean = Figure(paced.mean_staleness(plan), source, "in the long run")
            in_step = Figure(length + around.value, source, f"critical path: {path}")
            staleness = StalenessEstimate(mean, row_age_bound(plan), in_step)
        notes = plan.notes
        if names := [
            graph_node.name
            for graph_node in plan.graph.nodes
            if plan.placement(graph_node.name).pool == FUNCTIONS and graph_node.verb != "source"
        ]:
            notes += (
                PlanNote(
                    "estimate",
                    f"only the call overhead of Python functions is counted, not their work: {', '.join(names)}",
                ),
            )
        if words := describe_filters(plan.graph):
            notes += (PlanNote("estimate", words),)
        if any(generation.cuts for generation in plan.graph.verb("generate")):
            notes += (
                PlanNote("estimate", "partial rollout is not estimated: `msrl-compile --simulate N` shows its gain"),
            )
        rate = _throughput(plan, iteration)
        return replace(plan, estimate=Estimate(tuple(phases), iteration, rate, staleness), notes=notes)

    def of_node(self, plan: Plan, node: str) -> tuple[Figure, Figure]:
        """Return the seconds of a node, and of its gradient exchanges, in an iteration.

        The function reads the placement of this node, and no other placement of the plan.
        """
        costs = Costs(plan, self.engines, node)
        exchange = costs.exchange()
        return self._seconds(costs), replace(exchange, value=exchange.value * costs.steps())

    def _seconds(self, node: Costs) -> Figure:
        """Return a node's seconds for all rows of an iteration, except gradient exchanges."""
        if node.graph_node.verb == "generate":
            return self._generation_seconds(node)
        plan = node.plan
        in_step = node.batches.count_in_step(self.rows.tokens / self.rows.count if self.rows else 0)
        batches = node.batches.steps * in_step
        epochs = UpdateAttributes.of(node.graph_node).epochs
        count = holdings.row_count(plan, node.node) / (node.layout.dp * batches)
        rows = node.rows(count) if self.rows is None else self._sample_rows(node, self.rows, count)
        batch = node.micro_batch(rows, in_step)
        seconds = batch.value * batches * epochs
        basis = f"micro-batches: {batch.basis}"
        source = batch.source
        if node.graph_node.verb == "update":
            step = node.optimizer_step()
            seconds += step.value * node.steps()
            basis = f"{basis}; steps: {step.basis}"
            source = weakest(batch, step)
            if (follow := follower_seconds(node)).value:
                seconds += follow.value
                basis = f"{basis}; {follow.basis}"
                source = weakest(batch, step, follow)
        if (fetch := node.fetch()).value:
            seconds = seconds + fetch.value
            basis = f"{basis}; {fetch.basis}"
            source = weakest(Figure(seconds, source, basis), fetch)
        return Figure(seconds, source, basis)

    def _sample_rows(self, node: Costs, rows: Rows, count: float) -> Rows:
        """Return the token counts of `count` rows of an iteration.

        In an update, the rows of a mini-batch are first sampled from all prompts. The `count` rows are then consecutive
        rows of the mini-batch.
        """
        samples = max(
            (holdings.samples(node.plan, generation.name) for generation in node.plan.graph.verb("generate")), default=1
        )
        mini = (
            UpdateAttributes.of(node.graph_node).step_rows(rows.count)
            if node.graph_node.verb == "update"
            else rows.count
        )
        drawn = rows.sample(mini / rows.count, samples) if mini < rows.count else rows
        return drawn.take_share(count / drawn.count)

    def _generation_seconds(self, node: Costs) -> Figure:
        """Return a generation's seconds for all rows of an iteration.

        A wave that is larger than the number of sequences that run at one time takes as many rounds as are needed
        (a fraction: an engine that preempts replaces each sequence that ends at once). cost/kv_cache.py has the model
        of preemption.
        """
        plan = node.plan
        name = node.node
        cache = node.cache
        samples = holdings.samples(plan, name)
        prompts = holdings.group_rows(plan, name)
        written = holdings.written_tokens(plan, name)
        rows = self.rows or Rows.equal_rows(
            prompts * samples, holdings.row_tokens(plan, name) - written, written, samples
        )
        prompt = rows.prompt / rows.count
        # The prefill gives the first token, and a row's last token is not fed back. Rows that have sampled the same
        # tokens so far may be computed as one.
        steps = max(rows.longest - prompt - 1, 0)
        fed = rows.response - rows.count
        if node.device.kind.where in node.spec.time.shares_beginnings:
            fed -= rows.alike_response - rows.twins
        fed /= rows.count
        response = rows.response / rows.count
        running = cache.running(prompt, response)
        prefill = step = Figure(0.0, "derived", "nothing is generated")
        total = node.allocate_cache().value
        for (wave, begun), number in cache.waves().items():
            rounds = max(1.0, wave / running)
            together = max(1, int(begun / rounds))
            prefill = node.prefill([prompt] * together)
            live = wave * fed / max(steps, 1) / rounds
            parted = max(wave * (1 - rows.twins / rows.count) - begun, 0) / rounds if steps else 0.0
            step = node.decode_step(live, live * (prompt + steps / 2), parted / max(steps, 1), prompt)
            preempted = wave * cache.preempted_share(wave, prompt, response)
            again = preempted * node.prefill([prompt + response / 2]).value if preempted else 0.0
            total += number * (begun / together * prefill.value + rounds * steps * step.value + again)
        host = plan.cluster.device.overheads.row
        total += holdings.group_rows(plan, name) * samples * host.value
        return Figure(total, weakest(prefill, step, host), f"a wave: prefill {prefill.basis}; each step {step.basis}")

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify that the plan has an estimate of the iteration time."""
        if plan.estimate is None:
            yield describe_incomplete("estimate")

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        estimate = plan.estimate
        if estimate is None:
            return
        page.heading("Estimate", "every row at its bound")
        rows = [
            (phase.name, duration(phase.seconds.value), phase.seconds.source, phase.seconds.basis)
            for phase in estimate.phases
        ]
        page.table(("phase", "seconds", "source", "how"), rows, (1,), (2,))
        iteration = estimate.iteration_seconds
        rate = estimate.tokens_per_second_per_device
        page.line(f"an iteration: {duration(iteration.value)} ({iteration.source}); {iteration.basis}")
        page.line(f"throughput: {rate.value:,.4g} tokens/s/device ({rate.source}); {rate.basis}")
        if (stale := estimate.staleness) is not None:
            mean = stale.mean
            in_step = stale.in_step_seconds
            page.line(f"staleness: the weights that generate are {staleness(mean.value, stale.bound)} ({mean.source})")
            for state, most in late_states(plan).items():
                page.line(f"state {state}: rows are sampled by its value from up to {plural(most, 'iteration')} before")
            saving = describe_saving(iteration, in_step)
            page.line(f"the same pools in step: {duration(in_step.value)} ({in_step.source}); {saving}")
        cut = [node for node in plan.graph.verb("generate") if node.cuts]
        if cuts := max((GenerateAttributes.of(node).cuts for node in cut), default=0):
            age = plural(row_age_bound(plan), "version")
            page.line(f"partial rollout: rows are at most {age} old; {cuts} of these are due to `cuts`")

    @staticmethod
    def facts(plan: Plan) -> Section:
        if plan.estimate is None:
            return {}
        iteration = plan.estimate.iteration_seconds
        rate = plan.estimate.tokens_per_second_per_device
        section = {
            "an iteration": {"": Fact(iteration.value, "s")},
            "throughput": {"": Fact(rate.value, "tokens/s/device")},
        }
        if (stale := plan.estimate.staleness) is not None:
            section["staleness"] = {"": Fact(stale.mean.value, "versions")}
            section["the same pools in step"] = {"": Fact(stale.in_step_seconds.value, "s")}
        return section | {phase.name: {"": Fact(phase.seconds.value, "s")} for phase in plan.estimate.phases}


def _scale_by_share(figure: Figure, share: float) -> Figure:
    """Return the mean cost per iteration of an operation that only some iterations do.

    `share` is the fraction of the iterations that do the operation. `figure` is the cost in one iteration that does it.
    """
    if share == 1:
        return figure
    return replace(
        figure, value=figure.value * share, basis=f"in {100 * share:.3g} % of the iterations, {figure.basis}"
    )


def describe_filters(graph: Graph) -> str:
    """Return a note on the filters that the plan ignores; "" if there are no filters."""
    names = [node.name for node in graph.nodes if "keep" in node.attributes or "select" in node.attributes]
    return (
        f"rows that filters drop count as kept, and the rounds of a refill are not counted: {', '.join(names)}"
        if names
        else ""
    )


def _throughput(plan: Plan, iteration: Figure) -> Figure:
    """Return the throughput in tokens per second and device (arXiv:2507.19017, eq. 5).

    The tokens are those of the first generation's rows, each of the greatest length. If there is no generation, the
    tokens of the rows that the first update reads are counted.
    """
    nodes = [graph_node.name for graph_node in plan.graph.verb("generate")] or [
        graph_node.name for graph_node in plan.graph.verb("update")
    ]
    if not nodes or not iteration.value:
        return Figure(0.0, iteration.source, "nothing is generated or updated")
    node = nodes[0]
    written = holdings.written_tokens(plan, node)
    prompt = holdings.row_tokens(plan, node) - written
    value = holdings.row_count(plan, node) * (prompt + written) / plan.cluster.devices / iteration.value
    return Figure(value, iteration.source, "rows x (prompt + response) / devices / seconds (arXiv:2507.19017, eq. 5)")


def describe_saving(iteration: Figure, in_step: Figure) -> str:
    """Describe the fraction of an iteration's time that staleness saves.

    `in_step` is the time of an iteration if no pool may run ahead of the updates.
    """
    share = 1 - iteration.value / in_step.value
    return f"staleness saves {100 * share:.3g} % of it" if share > 0 else "staleness saves none of it"
