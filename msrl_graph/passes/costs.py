"""costs: seconds of what a node-state does, piece by piece, for rows of given lengths.

Invariant: nothing is composed here and no order assumed; estimate.py adds pieces up at the columns' bounds, a simulation at lengths of
its own. Seconds are those of one data-parallel group (all its devices work on the same rows), and never less for more rows or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..cluster import Figure, weakest
from ..engine import BYTES
from ..graph import Node
from ..plan import Plan, Reshard, Traffic
from . import holdings

UTILISATION = Figure(0.4, "assumed", "40 % of peak FLOP/s")
KERNELS = Figure(12, "assumed", "12 kernels a layer")


@dataclass(frozen=True)
class Rows:
    """Rows that are computed together, in sums over them: tokens of the prompts (each row its own), of the responses, and squares of the
    whole lengths, for attention. Numbers may be fractions: what stands for a mean."""

    count: float
    prompt: float
    response: float
    squares: float

    @property
    def tokens(self) -> float:
        return self.prompt + self.response

    @classmethod
    def alike(cls, count: float, prompt: float, response: float) -> Rows:
        """`count` rows, all of one length."""
        return cls(count, count * prompt, count * response, count * (prompt + response) ** 2)

    @classmethod
    def of(cls, lengths: Iterable[tuple[float, float]]) -> Rows:
        """Rows of (prompt, response) tokens."""
        found = list(lengths)
        prompt, response = (sum(x[i] for x in found) for i in (0, 1))
        return cls(len(found), prompt, response, sum((p + r) ** 2 for p, r in found))


@dataclass(frozen=True)
class Costs:
    """What the node-state `node` of a plan costs; `plan` has placements, `engines` are the specs by name. Make one for a state and keep
    it: what does not depend on rows is counted once."""

    plan: Plan
    engines: holdings.Engines
    node: str

    @cached_property
    def state(self) -> Node:
        return self.plan.graph.node(self.node)

    @cached_property
    def _rate(self) -> Figure:
        """FLOP/s of a data-parallel group."""
        layout, flops = self.plan.placement(self.node).layout, self.plan.cluster.device.flops[self._dtype]
        devices = layout.devices // layout.dp
        return Figure(devices * flops.value * UTILISATION.value, weakest(flops, UTILISATION), f"devices x {UTILISATION.value} x FLOP/s")

    @cached_property
    def _dtype(self) -> str:
        return holdings.dtype(self.plan, self.node)

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        """That every token meets in the layers, and in the head."""
        model = self.plan.model(self.node)
        ends = model.vocabulary * model.hidden
        return model.parameters - ends * (1 if model.tied else 2), ends

    @cached_property
    def _weights(self) -> int:
        return holdings.weights(self.plan, self.engines, self.node)

    @cached_property
    def _cache(self) -> float:
        """Bytes of keys and values that a step reads on one device, a token."""
        model, layout = self.plan.model(self.node), self.plan.placement(self.node).layout
        return 2 * model.layers * -(-model.kv_heads // layout.tp) * model.head_dim * BYTES[self._dtype]

    @cached_property
    def _launches(self) -> Figure:
        """Seconds that the kernels of a forward pass take at least."""
        launch = self.plan.cluster.device.launch
        seconds = self.plan.model(self.node).layers * KERNELS.value * launch.value
        return Figure(seconds, weakest(launch, KERNELS), f"layers x {KERNELS.value:.0f} x launch")

    def _flops(self, tokens: float, scored: float, pairs: float) -> float:
        """Of a forward pass: `pairs` counts the keys that all tokens together look at."""
        model = self.plan.model(self.node)
        layers, head = self._parameters
        return 2 * layers * tokens + 2 * head * scored + 4 * model.layers * model.heads * model.head_dim * pairs

    def rows(self, count: float) -> Rows:
        """So many rows at their bounds."""
        written = holdings.scored_tokens(self.plan, self.node)
        return Rows.alike(count, holdings.row_tokens(self.plan, self.node) - written, written)

    def prefill(self, lengths: Sequence[float]) -> Figure:
        """The forward pass over prompts of so many tokens each, once for all samples of a prompt."""
        flops = self._flops(sum(lengths), len(lengths), sum(n * n for n in lengths) / 2)
        seconds = flops / self._rate.value + self._launches.value
        return Figure(seconds, weakest(self._rate, self._launches), f"FLOP / ({self._rate.basis}) + {self._launches.basis}")

    def decode_step(self, sequences: float, cached: float) -> Figure:
        """One more token of each of so many sequences, whose keys and values are `cached` tokens in all."""
        bandwidth = self.plan.cluster.device.memory_bandwidth
        moved = (self._weights + cached * self._cache) / bandwidth.value
        seconds = max(moved, self._flops(sequences, sequences, cached) / self._rate.value) + self._launches.value
        basis = f"max((weights + KV read) / bandwidth, FLOP / ({self._rate.basis})) + {self._launches.basis}"
        return Figure(seconds, weakest(self._rate, bandwidth, self._launches), basis)

    def micro_batch(self, rows: Rows) -> Figure:
        """One micro-batch: a forward pass of an infer; of an update the backward pass too, and with full recomputation a second forward
        pass."""
        factor = 1
        if self.state.verb == "update":
            factor = 4 if self.plan.placement(self.node).engine.options.get("recompute") == "full" else 3
        flops = self._flops(rows.tokens, rows.response, rows.squares / 2)
        seconds = factor * (flops / self._rate.value + self._launches.value)
        basis = f"{factor} x (FLOP / ({self._rate.basis}) + {self._launches.basis})"
        return Figure(seconds, weakest(self._rate, self._launches), basis)

    def optimizer_step(self) -> Figure:
        """AdamW on a device's part: gradients and state are read, weights and state written."""
        bandwidth = self.plan.cluster.device.memory_bandwidth
        moved = self._weights + holdings.gradients(self.plan, self.engines, self.node) + 2 * self._optimizer
        return Figure(moved / bandwidth.value, bandwidth.source, "weights, gradients and optimizer state / memory bandwidth")

    @cached_property
    def _optimizer(self) -> int:
        return holdings.optimizer(self.plan, self.engines, self.node)

    def exchange(self) -> Figure:
        """The gradients' ring all-reduce over dp (2 x bytes x (dp - 1) / dp a rank), of one optimizer step."""
        cluster, placement = self.plan.cluster, self.plan.placement(self.node)
        layout = placement.layout
        if self.state.verb != "update" or layout.dp == 1:
            return Figure(0.0, "derived", "one data-parallel group")
        whole = self.plan.model(self.node).parameters * BYTES[self._dtype] // layout.tp
        ring = 2 * whole * (layout.dp - 1) / layout.dp
        if cluster.host(placement.first) == cluster.host(placement.first + layout.devices - 1):
            link = cluster.device.device_link
            return Figure(ring / link.value, link.source, "2 x gradients x (dp - 1) / dp / device link")
        rings, link = min(layout.tp, cluster.devices_per_node), cluster.between(layout.devices)
        basis = f"2 x gradients x (dp - 1) / dp, {rings} ring(s) through each host's links; {link.basis}"
        return Figure(ring * rings / link.value, link.source, basis)

    def micro_batches(self) -> int:
        """Of one group, in a pass over an iteration's rows."""
        return -(-holdings.group_rows(self.plan, self.node) // holdings.micro_batch(self.plan, self.node))

    def steps(self) -> int:
        """Optimizer steps of an update in an iteration."""
        rows = holdings.row_count(self.plan, self.node)
        return max(1, rows // int(self.state.number("mini_batch", rows))) * int(self.state.number("epochs", 1))


def dispatch(edge: Traffic, part: float = 1.0) -> Figure:
    """Moving a part of an iteration's rows along a sample edge."""
    return Figure(edge.seconds.value * part, edge.seconds.source, edge.seconds.basis)


def reshard(edge: Reshard) -> Figure:
    """All steps of a reshard but the swap-in, which overlaps."""
    count = "four" if edge.mode == "send" else "five"
    return Figure(sum(s.seconds.value for s in edge.steps), weakest(*(s.seconds for s in edge.steps)), f"the sum of the {count} steps")


def swap_in(edge: Reshard) -> Figure:
    return edge.swap_in.seconds
