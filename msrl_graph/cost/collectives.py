"""Seconds that the devices of a sharded node spend on communication.

The communication is: all-reduces over tp, rings or all-to-alls over cp, all-to-alls over ep, gathers of sharded
weights, and the exchange of gradients. Invariant: every number of bytes in this module is the number that one device
receives while all devices of its process group communicate. A process group that spans several hosts uses the links
between hosts, even for its ranks on the same host. The seconds assume that communication does not overlap with
computation or with other communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..backends.memory.layer_sizes import INTO_MLP
from ..backends.spec import BYTES, EngineSpec, gradient_type
from ..hardware.cluster import ClusterSpec, Collective, Figure, weakest
from ..ir.optimizer_spec import MASTER
from ..ir.plan import Placement
from ..model.architecture import Model, is_copied
from ..model.layers import ExpertMlp, Layer
from ..sharding.layout import Layout, Side, TensorKind, stage_parts

Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp"]


# The linear layers of Megatron that tensor parallelism shards by columns, with their projections, and those that it
# shards by rows.
COLUMN_LINEARS = ({"q_proj", "k_proj", "v_proj"}, {"q_b_proj"}, {"kv_b_proj"}, INTO_MLP)
ROW_LINEARS = {"o_proj", "down_proj"}
MLP = INTO_MLP | {"down_proj"}


class AdapterSums(NamedTuple):
    """The collectives of adapters in the layers of a pipeline stage.

    `gathers` and `scatters` are numbers of collectives. `gathered` and `scattered` are numbers of elements for each
    token.
    """

    gathers: float
    scatters: float
    gathered: float
    scattered: float


def total(*parts: Figure) -> Figure:
    """Return the sum of figures; the basis of the sum lists the bases of its summands.

    The basis of a figure is the text that says how the figure was computed. The bases of zero figures are left out. The
    values are added with `math.fsum`, like all seconds of a plan. The built-in `sum` is not used, because Python 3.12
    changed how it rounds, and a plan must be the same in all Python versions.
    """
    nonzero = [part for part in parts if part.value] or list(parts[:1])
    return Figure(
        math.fsum(part.value for part in nonzero),
        weakest(*nonzero),
        "; ".join(dict.fromkeys(part.basis for part in nonzero)),
    )


@dataclass(frozen=True)
class Collectives:
    """The costs of the collective operations of one node.

    The costs depend on the node's model, layout, weight type and devices, and on the cluster.
    """

    cluster: ClusterSpec
    placement: Placement
    model: Model
    spec: EngineSpec
    dtype: str

    def stride(self, axis: Axis) -> int:
        """Return the distance, in devices, between two neighbors on an axis such as tp."""
        layout = self.placement.layout
        before: dict[Axis, int] = {
            "tp": layout.inner,
            "cp": layout.inner * layout.tp,
            "dp": layout.tp * layout.cp,
            "etp": 1,
            "ep": layout.etp,
            "edp": layout.etp * layout.ep,
            "pp": layout.stage_devices,
        }
        return before[axis]

    def is_on_one_host(self, axis: Axis) -> bool:
        """Return whether each process group of an axis, such as tp, is on a single host."""
        placement = self.placement
        per_host = self.cluster.devices_per_node
        layout = placement.layout
        on_host = placement.each or per_host
        first = placement.first if not placement.each else 0
        if self.cluster.host(placement.first) == self.cluster.host(placement.device(layout.devices - 1, per_host)):
            return True
        span = self.stride(axis) * int(getattr(layout, axis))
        return on_host % span == first % span == 0

    def seconds(self, kind: str, axis: Axis, received: float, count: float = 1) -> Figure:
        """Return the seconds of `count` collectives in the process groups of an axis.

        `kind` is the name of the collective, such as `all_gather`. `received` is the number of bytes that one device
        receives in all `count` collectives together.
        """
        if (kind, axis) not in self._links:
            self._links[kind, axis] = self._measure_link(kind, axis)
        least, rate, one = self._links[kind, axis]
        return Figure(count * least + received / rate, one.source, one.basis)

    @cached_property
    def _links(self) -> dict[tuple[str, Axis], tuple[float, float, Figure]]:
        """The results of `_measure_link`, cached by collective and axis."""
        return {}

    def _measure_link(self, kind: str, axis: Axis) -> tuple[float, float, Figure]:
        """Look up a collective's latency in seconds and its bandwidth in bytes/s.

        Also returns a figure with the value 0. The source of the figure is the less certain one of two sources: the
        source of the latency and the source of the bandwidth. The basis of the figure is the formula for the
        collective's seconds, as text.
        """
        known = self.cluster.device.collective(kind, getattr(self.placement.layout, axis))
        near = self.is_on_one_host(axis)
        if not near:
            on_host = self.placement.on_host(self.placement.layout.devices, self.cluster.devices_per_node)
            link = self.cluster.between(on_host)
            known = Collective(known.least, Figure(link.value / on_host, link.source, link.basis))
        where = "device link" if near else "link between hosts"
        figure = Figure(0.0, weakest(known.least, known.rate), f"{axis}: collectives x latency + bytes / {where}")
        return known.least.value, known.rate.value, figure

    @cached_property
    def _eager(self) -> bool:
        return self.spec.eager(self.cluster.device.kind.where) is not None

    @cached_property
    def _item(self) -> int:
        return BYTES[self.dtype]

    @cached_property
    def _gradient(self) -> int:
        """Bytes of an element of the gradients' sums."""
        return BYTES[gradient_type(self.placement)]

    @cached_property
    def device_parameters(self) -> tuple[float, float]:
        """The (dense, expert) parameter counts of a device of the largest pipeline stage."""
        return _count_parameters(self.model.kinds, self.placement.layout)

    def tensor_parallel(self, tokens: float, scored: float, backward: bool = False, drawn: bool = False) -> Figure:
        """Return the seconds of the tensor-parallel communication of one forward pass.

        `tokens` is the number of tokens of one context-parallel rank. `scored` is the number of the rank's positions at
        which logits are computed. If `backward` is True, the seconds of the backward pass are added. If `drawn` is
        True, the seconds to broadcast the sampled tokens are added.

        The ranks all-reduce the hidden states after the embedding and in each layer of a pipeline stage. If the engine
        shards sequences over tp, they gather and scatter the hidden states instead. To draw tokens, the ranks gather
        the logits. Otherwise the logits remain sharded, and the ranks all-reduce only a few numbers per position, such
        as the maximum of the logits.
        """
        layout = self.placement.layout
        model = self.model
        tp = layout.tp
        if tp == 1:
            return Figure(0.0, "derived", "no tensor parallelism")
        per_reduction = tokens * model.hidden * self._item * (tp - 1) / tp
        divided = self.spec.memory.divides_sequence and self._eager
        if divided:
            # Mixers and MLPs gather tokens and scatter sums; a backward pass does as much, and gathers the tokens once
            # more for the weights' gradients (arXiv:2205.05198, section 4.2). Routed experts take a rank's own tokens.
            halves = sum(kind.count * (kind.has_mixer + _gathers_tokens(kind)) for kind in model.layer_kinds)
            gathers = 1 + halves / layout.pp * (1 + backward * 2)
            scatters = 1 + halves / layout.pp * (1 + backward)
            adapters = self._adapter_sums(backward)
            small = tokens * self._item * (tp - 1) / tp
            parts = [
                self.seconds("all_gather", "tp", adapters.gathered * small, adapters.gathers),
                self.seconds("reduce_scatter", "tp", adapters.scattered * small, adapters.scatters),
                self.seconds("all_gather", "tp", gathers * per_reduction, gathers),
                self.seconds("reduce_scatter", "tp", scatters * per_reduction, scatters),
            ]
        else:
            count = 1 + model.halves / layout.pp * (1 + backward)
            parts = [self.seconds("all_reduce", "tp", 2 * count * per_reduction, count)]
        if drawn:
            parts.append(self.seconds("all_gather", "tp", scored * model.outputs * self._item * (tp - 1) / tp))
            parts.append(self.seconds("broadcast", "tp", 8 * scored))
        elif not model.scores:
            # The logits stay sharded (policy_head.py). The ranks reduce their maximum, and sums: two of exponentials,
            # and the token's logit. A backward pass sums the gradients of the hidden states.
            elements = 4 * 4 * scored + backward * (not divided) * scored * model.hidden * self._item
            number = 2 + backward * (not divided)
            parts.append(self.seconds("all_reduce", "tp", 2 * elements * (tp - 1) / tp, number))
        return total(*parts)

    def _adapter_sums(self, backward: bool) -> AdapterSums:
        """Return what adapters add to the collectives of sequence parallelism.

        The collectives are those of megatron/stage_adapters.py.
        Adapters of layers that are sharded by columns gather the products of A, and scatter sums of their gradients.
        Adapters of layers that are sharded by rows do it the other way round. Those of experts do neither.
        """
        if (lora := self.model.lora) is None:
            return AdapterSums(0, 0, 0, 0)
        columns = rows = products = 0
        for kind in self.model.layer_kinds:
            own = [name for name in lora.targets if _gathers_tokens(kind) or name not in MLP]
            for linear in COLUMN_LINEARS:
                columns += kind.count * (not linear.isdisjoint(own))
                products += kind.count * len(linear.intersection(own))
            rows += kind.count * len(ROW_LINEARS.intersection(own))
        share = 1 / self.placement.layout.pp
        wide = products * lora.rank
        narrow = rows * lora.rank
        return AdapterSums(
            share * (columns + backward * rows),
            share * (rows + backward * columns),
            share * (wide + backward * narrow),
            share * (narrow + backward * wide),
        )

    def copies(self) -> Figure:
        """Return the seconds to all-reduce the gradients of copied weights over tp.

        Copied weights are weights, such as norms, of which each tensor-parallel rank has a copy. Their gradients are
        reduced once per optimizer step, and only in engines that shard sequences over tp.
        """
        layout = self.placement.layout
        model = self.model
        if layout.tp == 1 or not (self.spec.memory.divides_sequence and self._eager):
            return Figure(0.0, "derived", "all ranks of tp have the same gradients of shared weights")
        copied = [tensor for tensor in model.trained if is_copied(tensor)]
        elements = sum(tensor.elements for tensor in copied if not tensor.experts) / layout.pp
        dense = self.seconds("all_reduce", "tp", 2 * self._gradient * elements * (layout.tp - 1) / layout.tp)
        if layout.etp == 1 or not any(tensor.experts for tensor in copied):
            return dense
        elements = sum(tensor.elements for tensor in copied if tensor.experts) / layout.pp / layout.ep
        return total(
            dense, self.seconds("all_reduce", "etp", 2 * self._gradient * elements * (layout.etp - 1) / layout.etp)
        )

    def stages(self, tokens: float, backward: bool) -> Figure:
        """Return the seconds of the messages between pipeline stages.

        Hidden states are sent forward and, with `backward`, their gradients are sent back. Before each message, the
        sender sends the size of the message.
        """
        if self.placement.layout.pp == 1 or not self._eager:
            return Figure(0.0, "derived", "no separate messages between stages")
        ways = 1 + backward
        return self.seconds("send", "pp", ways * tokens * self.model.hidden * self._item, 2 * ways)

    def context(self, tokens: float, passes: float) -> Figure:
        """Return the seconds of context-parallel communication.

        `tokens` is the number of tokens of a data-parallel group. With a ring, keys and values travel around the ranks
        of cp (arXiv:2310.01889). Without a ring, heads are exchanged before and after attention (Ulysses,
        arXiv:2309.14509). `passes` is the number of passes with this communication; a backward pass counts as two
        passes.
        """
        layout = self.placement.layout
        model = self.model
        cp = layout.cp
        if cp == 1:
            return Figure(0.0, "derived", "no context parallelism")
        layers = model.layers / layout.pp
        share = (cp - 1) / cp
        if layout.cp_kind == "ring":
            sizes = [
                count * 2 * mixer.kv_heads * mixer.head_dim / min(layout.tp, mixer.kv_heads)
                for mixer, count in model.attention_mixers.items()
            ]
            received = tokens * sum(sizes) / layout.pp * share
            return self.seconds("send", "cp", passes * received * self._item, layers * passes * (cp - 1))
        received = tokens / cp * 2 * model.query_key_size / layout.pp / layout.tp * share
        return self.seconds("all_to_all", "cp", passes * received * self._item, layers * passes * 4)

    def experts(self, tokens: float, passes: float) -> Figure:
        """Return the seconds to send tokens to their experts and back.

        `tokens` is the number of tokens of one context-parallel rank. In every layer with experts, each rank sends its
        own tokens over ep. The tokens that arrive at a rank are then gathered by all ranks of etp. `passes` is the
        number of passes with this communication.
        """
        layout = self.placement.layout
        if not self.model.experts or not self.spec.sharding.spread.sends(layout):
            return Figure(0.0, "derived", "experts and their tokens are on the same ranks")
        collectives = 2 * passes * len(self.model.expert_layers) / layout.pp
        chosen = sum(count * experts.active for experts, count in self.model.experts.items()) / layout.pp
        sent = 2 * passes * chosen * tokens / layout.tp * self.model.hidden * self._item
        parts = [Figure(0.0, "derived", "one expert-parallel rank")]
        if layout.ep > 1:
            parts.append(self.seconds("all_to_all", "ep", sent * (layout.ep - 1) / layout.ep, collectives))
        if layout.etp > 1:
            parts.append(self.seconds("all_gather", "etp", sent * (layout.etp - 1), collectives))
        return total(*parts)

    def gathers(self, update: bool) -> Figure:
        """Return the seconds to gather the weights that are sharded over dp.

        A forward pass gathers the weights of every layer, and the weights outside the layers. At ZeRO 3, an update
        gathers the weights a second time for the backward pass. An update also reduce-scatters the gradients. The
        seconds include packing the data before a collective and unpacking the data after the collective.
        """
        layout = self.placement.layout
        if not self.spec.divides_weights(layout):
            return Figure(0.0, "derived", "weights are not sharded")
        units = self.model.layers + 1
        share = (layout.dp - 1) / layout.dp
        received = sum(self.device_parameters) * self._item * share
        times = 2 if update and layout.zero >= 3 else 1
        parts = [self.seconds("all_gather", "dp", received * times, units * times)]
        if update:
            parts.append(self.seconds("reduce_scatter", "dp", received, units))
        # Data is packed before a collective and unpacked after it: four reads or writes.
        laid = 4 * (times + update) * sum(self.device_parameters) * self._item
        rate = self.cluster.device.rate("memory_bandwidth", laid / (times + update) / units)
        return total(*parts, Figure(laid / rate.value, rate.source, "packing and unpacking / memory bandwidth"))

    def exchange(self) -> Figure:
        """Return the seconds to sum the gradients over all replicas of the weights.

        Without a sharded optimizer, the gradients are all-reduced. With a sharded optimizer (ZeRO 1), the gradients are
        reduce-scattered, and the updated weights are gathered. Engines with eager operators also all-reduce the
        gradients if the optimizer is sharded, so that every rank has the whole sum.
        """
        layout = self.placement.layout
        zero1 = self.placement.layout.zero == 1
        both = self._eager and zero1
        replicas = layout.dp * layout.cp
        # Received bytes per weight, from all replicas but this one: gradients twice, or gradients once and the weights,
        # which a float32 step returns in float32.
        per_weight = 2 * self._gradient + MASTER * both if both or not zero1 else self._gradient + self._item
        dense, experts = _count_parameters(self.model.trained_kinds, layout)
        parts = [Figure(0.0, "derived", "one data-parallel group")]
        if replicas > 1:
            received = per_weight * dense * (replicas - 1) / replicas
            parts.append(self.seconds("all_reduce", "dp", received, 1.5 if both else 1))
        if experts and layout.edp > 1:
            parts.append(self.seconds("all_reduce", "edp", per_weight * experts * (layout.edp - 1) / layout.edp))
        return total(*parts)


def _gathers_tokens(kind: Layer) -> bool:
    """Return whether a layer has an MLP that all tp ranks compute together."""
    return kind.has_mlp and not (isinstance(kind.mlp, ExpertMlp) and not kind.mlp.shared)


def _count_parameters(kinds: tuple[TensorKind, ...], layout: Layout) -> tuple[float, float]:
    """Return the (dense, expert) parameter counts of a device.

    The device is of the largest pipeline stage.
    """
    dense, experts = max(stage_parts(kinds, Side(layout)), key=sum)
    return float(dense), float(experts)
