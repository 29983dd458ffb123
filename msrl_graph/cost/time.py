"""Seconds of the operations of a node, for rows of given lengths.

Invariant: each method returns the seconds of one operation and assumes no order of operations. passes/estimate.py adds
up the seconds for rows of the greatest length. A simulation adds up the seconds for rows of other lengths. Seconds are
those of one data-parallel group, whose devices all work on the same rows. Seconds never decrease with more rows or
tokens. A pass has matrix products (at a rate that depends on their size), attention and memory accesses. If a device
runs asynchronously to Python, only the longer of two times counts: launching operators or running operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..analysis.sequences import sequences
from ..backends.spec import BYTES, Act, EngineSpec, OperatorCalls, gradient_type, is_compiled, optimizer_residency
from ..hardware.cluster import Device, Figure, weakest
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Node
from ..ir.plan import Plan
from ..ir.workload import kv_bytes
from ..model.architecture import Model
from ..model.layers import AttentionMixer
from ..sharding.layout import Layout
from . import holdings
from .adapter_dropout import mask_seconds
from .backward import NOTHING, WHOLE, RecomputedShares, kept_seconds, logits_seconds
from .batch_counts import BatchCounts
from .collectives import Collectives, total
from .host_copies import copy_seconds, fetch_seconds, uncovered_seconds
from .kv_cache import KvCache
from .lengths import Rows
from .operators import (
    CAPPED,
    DRAWING,
    KERNELS,
    PRODUCTS,
    SCORING,
    ForwardWork,
    count_moved_elements,
    describe_rates,
    find_slowest_stage,
    layer_calls,
)


@dataclass(frozen=True)
class Costs:
    """The seconds of a node's operations. They are cached unless they depend on rows."""

    plan: Plan
    engines: holdings.Engines
    node: str

    @cached_property
    def graph_node(self) -> Node:
        return self.plan.graph.node(self.node)

    @cached_property
    def layout(self) -> Layout:
        return self.plan.placement(self.node).layout

    @cached_property
    def spec(self) -> EngineSpec:
        return holdings.spec(self.plan, self.engines, self.node)

    @cached_property
    def _eager(self) -> Callable[[Act, Layout], OperatorCalls] | None:
        """The function that counts the operators of a pass; None if kernels are fused."""
        fused = is_compiled(self.plan.placement(self.node))
        return None if fused else self.spec.eager(self.device.kind.where)

    @cached_property
    def model(self) -> Model:
        return self.plan.model(self.node)

    @property
    def device(self) -> Device:
        return self.plan.cluster.device

    @cached_property
    def dtype(self) -> str:
        return holdings.dtype(self.plan, self.node)

    @cached_property
    def group(self) -> int:
        """The number of devices of one dp group; all these devices compute the same rows."""
        return self.layout.devices // self.layout.dp

    @cached_property
    def _recomputed(self) -> RecomputedShares:
        option = self.plan.placement(self.node).engine.options.get("recompute")
        return RecomputedShares.find(self.model, option, self.layout)

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(self.plan.cluster, self.plan.placement(self.node), self.model, self.spec, self.dtype)

    @cached_property
    def _parameters(self) -> tuple[float, float]:
        """The numbers of parameters that one token uses: in all layers, and in the head."""
        model = self.model
        embedding, head_size = (entries * model.hidden for entries in (model.vocabulary, model.outputs))
        return model.active_parameters - embedding - head_size * (not model.tied), head_size

    @cached_property
    def _slowest_stage_factor(self) -> float:
        """The FLOP of the pipeline stage that has the most, divided by the mean."""
        return find_slowest_stage(self.model, self.layout, holdings.row_tokens(self.plan, self.node))

    def _bubble_factor(self, batches: int) -> float:
        """Return the factor by which bubbles slow a pipeline.

        The source is arXiv:2104.04473, section 2.2. A step has `batches` micro-batches.
        """
        return 1 + (self.layout.pp - 1) / (self.layout.vpp * batches)

    @cached_property
    def batches(self) -> BatchCounts:
        """The numbers of micro-batches of an infer or update node."""
        return BatchCounts(self.plan, self.node)

    @cached_property
    def _update(self) -> UpdateAttributes:
        return UpdateAttributes.of(self.graph_node)

    @cached_property
    def _looks_ahead(self) -> bool:
        return holdings.looks_ahead(self.plan, self.node)

    @cached_property
    def _weights(self) -> int:
        return holdings.weights(self.plan, self.engines, self.node)

    @cached_property
    def _optimizer(self) -> int:
        return holdings.optimizer(self.plan, self.engines, self.node)

    def _cache_bytes(self, tokens: float) -> float:
        """Return the KV-cache bytes of one sequence of `tokens` tokens on one device."""
        return kv_bytes(self.model, self.layout, tokens, BYTES[self.dtype])

    def rows(self, count: float) -> Rows:
        """Return the sums over `count` consecutive rows, each of the greatest length.

        Sequences of one prompt share the prompt's tokens. The tokens of a prompt are counted even if only some of its
        rows are among the `count` rows. In an update, each mini-batch has the same fraction of each prompt's rows.
        """
        sequences, tokens, scored, fan = self._row_sizes
        count = float(count * sequences)
        if self.graph_node.verb == "update":
            rows = holdings.row_count(self.plan, self.node)
            fan = max(1.0, fan * min(1.0, self._update.step_rows(rows) / rows))
        both = math.gcd(int(count), int(fan)) if count.is_integer() and fan.is_integer() else 1
        prompts = max(1.0, 1 + (count - both) / fan)
        return Rows.equal_rows(count, (tokens - scored) / sequences, scored / sequences, count / prompts)

    @cached_property
    def _row_sizes(self) -> tuple[int, int, int, float]:
        """A row's numbers of sequences, tokens, scored tokens, and sequences per context."""
        plan = self.plan
        node = self.node
        count = sequences(plan.graph, self.graph_node).count
        return (
            count,
            holdings.row_tokens(plan, node),
            holdings.scored_tokens(plan, node),
            float(holdings.fan(plan, node)),
        )

    def prefill(self, lengths: Sequence[float]) -> Figure:
        """Return the seconds to prefill one prompt per entry of `lengths` (token counts)."""
        count = len(lengths)
        tokens = sum(lengths)
        capped = sum(map(self.model.count_capped, lengths)) * CAPPED
        moved = self._elementwise_bytes(tokens) + self._logits_bytes(count, DRAWING) + capped
        pairs = sum(length * length for length in lengths) / max(count, 1)
        work = ForwardWork(tokens, count, count, math.sqrt(pairs), pairs, moved)
        parts = [self._pass("prefill", work), self.collectives.tensor_parallel(tokens, count, drawn=True)]
        return total(*parts, self.collectives.experts(tokens, 1))

    def decode_step(self, sequences: float, cached: float, diverged: float = 0.0, prompt: float = 0.0) -> Figure:
        """Return the seconds to generate one more token for each sequence.

        `cached` is the sum of the sequences' context lengths. In this step, `diverged` sequences begin to differ from
        another sequence after `prompt` equal tokens, and recompute the tokens after the last full cache block.
        """
        length = cached / max(sequences, 1e-9)
        passes = self.spec.time.cache_passes * sequences * self._cache_bytes(length) * self.group
        tokens = sequences + (
            diverged * (prompt % self.spec.time.block) if self.spec.time.block and self._eager else 0.0
        )
        moved = self._elementwise_bytes(tokens) + self._logits_bytes(sequences, DRAWING) + passes
        # A query sees every key. `pairs` are whole squares, of which causal attention needs half.
        pairs = length * (1 if "attention" in self.device.curves else 2)
        work = ForwardWork(tokens, sequences, sequences, length, pairs, moved)
        parts = [self._pass("decode", work), self.collectives.tensor_parallel(tokens, sequences, drawn=True)]
        begun = self._eager("prefill", self.layout).sequence if self._eager else 0.0
        launch = self.device.launch
        parts.append(Figure(diverged * begun * launch.value, launch.source, "new sequences x launch"))
        return total(*parts, self.collectives.experts(tokens, 1))

    @cached_property
    def cache(self) -> KvCache:
        """The KV cache of a generation."""
        return KvCache(self.plan, self.engines, self.node)

    def allocate_cache(self) -> Figure:
        """Return the seconds to allocate and zero a KV cache."""
        sequences = min(self.cache.at_once, self.cache.count_sequences(self.cache.bound))
        block = self.spec.time.block if self._eager else 0
        link = self.device.copies
        tokens = -(-holdings.row_tokens(self.plan, self.node) // block) * block if block else 0
        return Figure(
            sequences * self._cache_bytes(tokens) / link.value, link.source, "cache bytes / copies into new memory"
        )

    def micro_batch(self, rows: Rows, batches: int = 0) -> Figure:
        """Return the seconds of a micro-batch: forward, and in an update also backward.

        `batches` is the number of micro-batches of a step; by default, with all rows at the greatest length.

        Recomputation adds a forward pass of its share of the layers. A loss that needs a pass before any gradient adds
        another forward pass.
        """
        update = self.graph_node.verb == "update"
        tokens = rows.tokens
        count = rows.count
        pairs = rows.squares / max(rows.count, 1e-9)
        laid = 0.0
        around = tokens
        if self.device.kind.where in self.spec.time.shares_beginnings:
            tokens = rows.fed
            count = rows.count - rows.twins
            pairs = max(rows.longest - 1, 1) ** 2
            # In a ring, keys and values travel in their layout, by rows.
            around = count * rows.longest if self.layout.cp_kind == "ring" else tokens
            # Attention's operands are copied to a layout by rows, its result back to tokens.
            laid = 4 * self.model.query_key_size * count * rows.longest
        moved = self._elementwise_bytes(tokens) + self._logits_bytes(rows.response, SCORING) + laid * BYTES[self.dtype]
        moved += count * self.model.count_capped(math.sqrt(pairs)) * CAPPED
        work = ForwardWork(tokens, rows.response, count, math.sqrt(pairs), pairs, moved)
        looks_ahead = update and self._looks_ahead
        parts = [self._pass("update", work, 1 + self.model.backward_share) if update else self._pass("infer", work)]
        again = self._recomputed if update else NOTHING
        parts += [self._pass("infer", work)] * looks_ahead
        if again is not NOTHING:
            moved_again = self._elementwise_bytes(tokens) * again.moved + laid * BYTES[self.dtype] * again.attention
            parts.append(self._pass("infer", replace(work, scored=0, moved=moved_again), shares=again))
        if update and again.moved < 1 and self._eager is not None:
            kept = 1 - again.moved
            parts.append(
                kept_seconds(self.model, self.spec, self.layout, self.device, self.dtype, kept * tokens, kept * moved)
            )
        if update:
            parts.append(logits_seconds(self.model, self.spec, self.layout, self.device, self.dtype, rows.response))
        passes = (3 if update else 1) + looks_ahead
        among = self.collectives
        cp = self.layout.cp
        parts += [
            among.tensor_parallel(tokens / cp, rows.response / cp, backward=update),
            among.context(around, passes + again.attention),
            among.experts(tokens / cp, passes + again.experts),
            among.gathers(update),
            among.stages(tokens / cp, update),
        ]
        if looks_ahead:
            parts += [among.tensor_parallel(tokens / cp, rows.response / cp), among.gathers(False)]
        host = self.device.overheads.row
        if update:
            parts.append(
                mask_seconds(
                    self.model, self.spec, self.layout, self.device, self.dtype, tokens, passes - 1 + again.products
                )
            )
            parts.append(self._offloaded_activations(tokens, math.fsum(part.value for part in parts)))
        cost = total(*parts, Figure(rows.count * host.value, host.source, "rows x host overhead"))
        if self.layout.pp == 1:
            return cost
        factor = self._slowest_stage_factor * self._bubble_factor(batches or self.batches.count_in_step())
        return replace(
            cost, value=cost.value * factor, basis=f"{cost.basis}; x {factor:.3g}, the slowest stage and the bubbles"
        )

    def optimizer_step(self) -> Figure:
        """Return the seconds to compute the gradient norm and to do an optimizer step."""
        gradients = holdings.gradients(self.plan, self.engines, self.node)
        moved: float = self._weights + gradients + 2 * self._optimizer
        basis = "weights, gradients and optimizer state / memory bandwidth"
        if self._eager is not None:
            # An eager norm makes float64 squares of the gradients: the gradients read, four float64 written or read.
            moved += (1 + 4 * 8 / BYTES[gradient_type(self.plan.placement(self.node))]) * gradients
        size = moved / max(len(self.model.weights), 1)
        bandwidth = self.device.rate("memory_bandwidth", size)
        parts = [Figure(moved / bandwidth.value, bandwidth.source, basis), self._calls("step")]
        if optimizer_residency(self.plan.placement(self.node)) == "parts":
            parts.append(copy_seconds(self.device, 2 * self._optimizer, "optimizer state in from host memory and back"))
        agree = self.device.collective("all_reduce").least
        axes = sum(ranks > 1 for ranks in (self.layout.tp, self.layout.cp, self.layout.dp, self.layout.pp))
        norm = Figure(agree.value * axes, agree.source, "ranks agree on the norm")
        return total(*parts, norm, self.collectives.copies())

    def fetch(self) -> Figure:
        """Return the seconds to copy what is offloaded in when the node begins."""
        return fetch_seconds(self.plan, self.engines, self.node)

    def _offloaded_activations(self, tokens: float, computing: float) -> Figure:
        """Return the seconds that offloading activations adds to `computing` seconds."""
        if not (away := holdings.activations_away(self.plan, self.engines, self.node)):
            return Figure(0.0, "derived", "activations are not offloaded")
        limit = self.batches.limit
        bound = self.rows(self.batches.step_rows if limit.tokens else limit.full_rows)
        shared = self.device.kind.where in self.spec.time.shares_beginnings
        most = bound.fed if shared else bound.tokens
        share = tokens / min(most, limit.most_tokens or most)
        copying = copy_seconds(self.device, round(2 * away * share), "activations out and back in")
        return uncovered_seconds(copying, self.device, computing)

    def exchange(self) -> Figure:
        """Return the seconds of a gradient exchange; 0 if micro-batches include it."""
        if self.graph_node.verb != "update" or self.spec.divides_weights(self.layout):
            return Figure(
                0.0, "derived", "within each micro-batch" if self.graph_node.verb == "update" else "no gradients"
            )
        return self.collectives.exchange()

    def _calls(self, act: Act, sequences: float = 0.0) -> Figure:
        launch = self.device.launch
        layers = self.model.layers
        # A pipeline stage runs its own layers; in decoding once for each part.
        layers = layers if act == "decode" else -(-layers // self.layout.pp)
        if self._eager is None:
            factor = 3 if act == "update" else act != "step"
            seconds = factor * layers * KERNELS.value * launch.value
            return Figure(seconds, weakest(launch, KERNELS), "layers x 12 x launch")
        calls = self._eager(act, self.layout)
        number = layer_calls(act, calls, self.model, self.spec) * layers + calls.rest + calls.sequence * sequences
        return Figure(number * launch.value, launch.source, "operators x launch")

    def _pass(self, act: Act, work: ForwardWork, factor: float = 1, shares: RecomputedShares = WHOLE) -> Figure:
        device = self.device
        item = BYTES[self.dtype]
        layers = self.model.layers
        group = self.group
        inside, head_size = self._parameters
        products = [
            (2 * work.tokens * inside / (PRODUCTS * layers * group), PRODUCTS * layers),
            (2 * work.scored * head_size / group, 1),
        ]
        rates = [device.rate(self.dtype, flop) for flop, _ in products]
        multiplied = math.fsum(flop * number / rate.value for (flop, number), rate in zip(products, rates, strict=True))
        multiplied *= shares.products
        per_head = math.fsum(
            mixer.heads * count * self._head_seconds(act, mixer, work, rates[0].value)
            for mixer, count in self.model.attention_mixers.items()
        )
        attention = (
            shares.attention
            * (per_head * work.sequences + work.count_scan_flop(act, self.model) / rates[0].value)
            / group
        )
        weights = self._decode_weight_bytes(work.tokens) if act == "decode" else self._pass_weight_bytes
        size = work.tokens * self.model.hidden * 3 * item / group
        bandwidths = [device.rate("memory_bandwidth", weights / (PRODUCTS * layers)), device.rate("layer", size)]
        read = shares.products * weights / bandwidths[0].value
        moved = work.moved / group / bandwidths[1].value
        calls = self._calls(act, work.sequences)
        if not device.kind.runs_ahead:
            seconds = shares.calls * calls.value + factor * (max(multiplied, read) + attention + moved)
        else:
            seconds = max(shares.calls * calls.value, factor * max(multiplied + attention, read + moved))
        source = weakest(*rates, *bandwidths, calls)
        return Figure(seconds, source, f"{describe_rates(device, rates[0], factor)}, {calls.basis}")

    def _head_seconds(self, act: Act, mixer: AttentionMixer, work: ForwardWork, rate: float) -> float:
        """Return the seconds that one head of a layer's mixer needs for one sequence."""
        decode = act == "decode"
        flop = mixer.count_flop(decode) * work.pairs * mixer.share_of_pairs(work.length, decode)
        # A measured rate includes the mask.
        return (
            flop / self.device.rate("attention", flop).value if "attention" in self.device.curves else flop / 2 / rate
        )

    @cached_property
    def _pass_weight_bytes(self) -> float:
        """The bytes of weights that a device reads in a pass over many tokens."""
        if self.model.experts:
            return sum(self.collectives.device_parameters) * BYTES[self.dtype]
        return sum(self._parameters) * BYTES[self.dtype] * self.layout.cp / self.group

    def _decode_weight_bytes(self, sequences: float) -> float:
        """Return the bytes of weights that a device reads for one token per sequence.

        If routing is random, some experts get no tokens and are not read. A pipeline stage reads its weights pp times.
        """
        dense, routed = self.collectives.device_parameters
        tokens = sequences * max(1.0, self.layout.ep * self.layout.etp / self.layout.tp)
        share = max((experts.active / experts.number for experts in self.model.experts), default=0.0)
        touched: float = 1 - (1 - share) ** tokens
        return self._weights * (dense + routed * touched) / (dense + routed) * self.layout.pp

    def _elementwise_bytes(self, tokens: float) -> float:
        """Return the bytes that operators move between the matrix products of layers.

        A fused engine has 0: its assumed FLOP/s allow for these bytes.
        """
        elements = 0 if self._eager is None else count_moved_elements(self.model, self.spec.count_copies(self.layout))
        return tokens * elements * BYTES[self.dtype]

    def _logits_bytes(self, positions: float, times: int) -> float:
        """Return the bytes that `times` accesses to the float32 logits read or write."""
        copies = self.layout.tp if times == DRAWING else 1  # each tp rank samples
        return positions * self.model.outputs * times * 4 * copies if self._eager else 0.0

    def steps(self) -> int:
        """Return the number of optimizer steps of an update node in one iteration."""
        return self._update.steps(holdings.row_count(self.plan, self.node))
