"""The spec of an engine: what the compiler knows about it.

Invariant: importing this module does not import torch. A spec only names the function that builds the engine. The
function's module is imported when an engine is built (engine_protocols.py says what it returns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ..hardware.adaptors import Adaptor
from ..hardware.device_kinds import DeviceKind, Where
from ..hardware.environment_variables import Setting
from ..hardware.stacks import Release
from ..hardware.version_pairs import VersionPair
from ..ir.options import EngineOptions
from ..ir.statements import STATEMENTS
from ..model.features import PLAIN
from ..sharding.layout import Layout, Side
from .expert_placement import NONE, ExpertPlacement

if TYPE_CHECKING:
    from ..ir.plan import Placement, Plan
    from ..model.architecture import Model
    from .devices import Devices
    from .engine_protocols import Weights

BYTES = {"f32": 4, "bf16": 2}


# One call of an engine, in this order: a forward pass over prompts; over one more token of each sequence; over rows; a
# forward and backward pass; an optimizer step.
Act = Literal["prefill", "decode", "infer", "update", "step"]


@dataclass(frozen=True)
class OperatorCalls:
    """The number of operators that Python calls in one call of an engine.

    The number is `layer` for each layer of the model, plus `sequence` for each sequence, plus `rest`. Nested operators
    do not count. Python's other work counts as the number of operators that need the same time."""

    layer: float
    rest: float
    sequence: float = 0.0


@dataclass(frozen=True)
class Situation:
    """The facts that an engine's lints and settings can depend on.

    The facts are about one node: its verb, its layout, the kind of its devices, the number of its devices on each host
    (`per_host`), and the engines of other nodes on the same devices."""

    verb: str
    layout: Layout
    device: DeviceKind
    per_host: int
    neighbour_engines: frozenset[str]

    @classmethod
    def from_plan(cls, plan: Plan, placement: Placement) -> Situation:
        neighbours = (
            other for other in plan.placements if other.pool == placement.pool and other.node != placement.node
        )
        return cls(
            plan.graph.node(placement.node).verb,
            placement.layout,
            plan.cluster.device.kind,
            placement.each or plan.cluster.devices_per_node,
            frozenset(other.engine.name for other in neighbours),
        )


@dataclass(frozen=True)
class Lint:
    """A warning about a combination of options; `help` says what to use instead."""

    message: str
    help: str


# When optimizer states are on the device: always; while their update computes; or one part after another during a step.
Residency = Literal["always", "phase", "parts"]
EVERY = ("python",)  # options of all engines: they configure the engine's processes
# Memory at each moment (instant) of a verb, by the moment's name: the bytes of each item.
Moments = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Capabilities:
    """What an engine can compute.

    - `axes`: the axes of a layout that may be larger than 1. `zero`: the stages of ZeRO.
    - `features`: the features of models (model/features.py) that the engine can run. `planned_features`: further
      features that its formulas of memory and time cover. A plan can use both, and a run rejects the latter. The
      compiler rejects all other features, before it calls any formula.
    - `options`: the engine's own options (`EngineOptions`, ir/options.py). `EVERY`: the options that every engine has.
    - `off_host`: axes and features of models that a plan for host cores can use, but a run on host cores cannot.
    - `supported_attributes`: the supported node attributes (None: all). A run rejects others. `opt_in`: the supported
      attributes among those that few engines know (`Attribute.opt_in`). `routes`: whether the engine returns the routes
      of tokens, and a trainer also replays them (`MicroBatch`, engine_protocols.py).
    - `settings`: environment variables for the engine's processes. `lints`: returns warnings about combinations of
      options that are known to fail or to be slow.
    - `recomputes`: the parts of layers that a list of the option `recompute` may have. An engine without any knows only
      the words `none` and `full`.
    - `chosen`: where the planner can choose this engine if a program names no engine ("host": host cores, "device").
    """

    axes: tuple[str, ...]
    zero: tuple[int, ...] = (0, 1)
    features: frozenset[str] = PLAIN
    planned_features: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()
    off_host: tuple[str, ...] = ()
    supported_attributes: tuple[str, ...] | None = None
    opt_in: tuple[str, ...] = ()
    routes: bool = False
    settings: Callable[[Situation], Iterable[Setting]] = lambda situation: ()
    lints: Callable[[Situation], Iterable[Lint]] = lambda situation: ()
    recomputes: tuple[str, ...] = ()
    chosen: tuple[Where, ...] = ()

    def list_unplanned(self, model: Model) -> list[str]:
        """Return the features of a model that the engine cannot plan, in words."""
        return model.list_lacking(self.features | self.planned_features)

    def supports(self, verb: str, name: str) -> bool:
        """Return whether the engine supports an attribute of the nodes of a verb."""
        if STATEMENTS[verb].declared()[name].opt_in:
            return name in self.opt_in
        return self.supported_attributes is None or name in self.supported_attributes


@dataclass(frozen=True)
class EnginePackages:
    """The packages that an engine needs, and what is known about them.

    - `needs`: the required packages.
    - `aliases`: for a package in `needs`, other distributions that contain it.
    - `adaptors`: the adaptors of these packages, by the name of the device kind.
    - `pairs`: compatible versions. `releases`: what releases of the packages need, the newest release last.
    """

    needs: tuple[str, ...] = ("torch", "transformers")
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adaptors: Mapping[str, tuple[Adaptor, ...]] = field(default_factory=dict)
    pairs: tuple[VersionPair, ...] = ()
    releases: tuple[Release, ...] = ()

    def on(self, kind: DeviceKind) -> tuple[str, ...]:
        """Return the packages that must be installed on hosts with such devices."""
        return kind.packages(self.needs, self.adaptors.get(kind.name, ()))

    def names(self, package: str) -> tuple[str, ...]:
        """Return the names under which a package may be installed."""
        return (package, *self.aliases.get(package, ()))


@dataclass(frozen=True)
class WeightSharding:
    """How an engine shards weights, beyond what the layout says.

    - `divided_from`: the lowest ZeRO stage that keeps weights sharded over dp between passes (4: no stage).
    - `vocabulary_multiple`: each rank's part of the vocabulary is padded to a multiple of this number (1: no padding).
      With `pads_whole`, the whole vocabulary is padded to such a multiple instead.
    - `replicates_kv_heads`: whether tp may be larger than the number of key-value heads.
    - `spread`: the rule by which experts, or shards of experts, are placed on ranks.
    - `packs_experts`: whether `Generator.filled` converts the new weights of experts in place to another format.
    """

    divided_from: int = 4
    vocabulary_multiple: int = 1
    pads_whole: bool = False
    replicates_kv_heads: bool = False
    spread: ExpertPlacement = NONE
    packs_experts: bool = False


@dataclass(frozen=True)
class MemoryModel:
    """The memory that an engine needs.

    - `peaks`: returns, for a verb and a Workload (ir/workload.py), the bytes at each moment; weights and optimizer
      states do not count. None: general formulas are used. In these formulas, tp also shards the inputs of norms if
      `divides_sequence` is set (sequence parallelism, arXiv:2205.05198).
    - `paged`: for an engine that preempts sequences when its KV cache is full, returns the bytes of a cache for so many
      sequences of so many tokens: `paged(work, sequences, tokens)`. None: the engine only generates sequences for which
      the cache has room until they end.
    - `stored`: returns, for a Workload, the bytes that all layers keep for the backward pass. `building`: the memory
      that a new generator holds in addition to its weights, and releases with them.
    - `groups`: the number of process groups that send device tensors, in addition to the groups of the mesh's axes.
      With `own_groups`, the engine does not use the groups of the mesh's axes.
    """

    peaks: Callable[..., Moments] | None = None
    paged: Callable[..., float] | None = None
    stored: Callable[..., int] | None = None
    building: Callable[..., dict[str, int]] | None = None
    divides_sequence: bool = False
    groups: Callable[[Layout], int] = lambda layout: layout.ep > 1
    own_groups: bool = False


@dataclass(frozen=True)
class TimeModel:
    """The facts about an engine that decide how long it computes.

    - `calls`: returns the operator counts of an eager torch engine; None if kernels are fused everywhere.
    - `fused`: the places ("host", "device") where kernels are fused, so that `calls` does not apply.
    - `continuous`: whether a sequence that ends is replaced by the next sequence immediately.
    - `shares_beginnings`: the places ("host", "device") where common prefixes of a batch's rows are computed once, and
      a row's last token, which predicts nothing, is not computed.
    - `block`: tokens per block of the KV cache. Rows with a common prefix share only whole blocks and recompute the
      rest of the prefix (0: they share the whole prefix). A KV cache of blocks is allocated as a whole.
    - `cache_passes`: how often a decoding step reads or writes the KV cache.
    - `logits_at_once`: the bytes of logits that a trainer keeps for a backward pass; if there are more, it computes all
      of them again. 0: it keeps all.
    - `adapter_calls`: for an engine with the feature `lora`, returns how many operators a layer calls in addition if so
      many of its projections have an adapter.
    """

    calls: Callable[[Act, Layout], OperatorCalls] | None = None
    fused: tuple[Where, ...] = ()
    continuous: bool = False
    shares_beginnings: tuple[Where, ...] = ()
    block: int = 0
    cache_passes: int = 1
    logits_at_once: int = 0
    adapter_calls: Callable[[Act, int], float] = lambda act, projections: 0.0


@dataclass(frozen=True)
class EngineSpec:
    """All that the compiler knows about an engine, without loading the engine.

    `build` is the function `module:name` that `build_engine` calls with (weights, placement, devices). The function
    returns a Trainer, or a Generator for the verb `generate`. "" if this version cannot run the engine.
    """

    name: str
    verbs: tuple[str, ...]
    capabilities: Capabilities
    packages: EnginePackages = EnginePackages()
    build: str = ""
    sharding: WeightSharding = WeightSharding()
    memory: MemoryModel = MemoryModel()
    time: TimeModel = TimeModel()

    def eager(self, where: Where) -> Callable[[Act, Layout], OperatorCalls] | None:
        """Return the function `calls`, or None if kernels are fused at the place `where`."""
        return None if where in self.time.fused else self.time.calls

    def list_plan_only(self, where: Where) -> tuple[str, ...]:
        """Return the axes and features that a plan can use on `where`, but a run cannot."""
        return self.capabilities.off_host if where == "host" else ()

    def list_missing_features(self, model: Model, where: Where) -> list[str]:
        """Return the features of a model that the engine cannot run on `where`."""
        can_run = self.capabilities.features.difference(self.list_plan_only(where))
        return [feature for feature in model.features if feature not in can_run]

    def divides_weights(self, layout: Layout) -> bool:
        """Return whether the weights are sharded over dp between passes."""
        return layout.dp > 1 and layout.zero >= self.sharding.divided_from

    def count_copies(self, layout: Layout) -> int:
        """Return how many tp ranks compute the same norms and residual sums of a token."""
        return 1 if self.memory.divides_sequence else layout.tp

    def needs_equal_calls(self, layout: Layout) -> bool:
        """Return whether all ranks of a dp group must make the same forward calls.

        Equal calls are needed if the collectives of a forward pass span the dp group."""
        return self.divides_weights(layout) or (layout.dp > 1 and layout.ep * layout.etp > layout.tp * layout.cp)

    def side(self, layout: Layout, first: int = 0, each: int = 0) -> Side:
        """Return the Side: how the engine shards weights, and on which devices."""
        return Side(layout, self.divides_weights(layout), self.multiple(layout), first, each)

    def multiple(self, layout: Layout) -> int:
        """Return the number by which a rank's padded part of the vocabulary is divisible."""
        multiple = self.sharding.vocabulary_multiple
        return max(1, multiple // layout.tp) if self.sharding.pads_whole else multiple

    def build_engine(self, weights: Weights, placement: Placement, devices: Devices) -> Any:
        """Build the engine on this rank; return a Trainer or a Generator."""
        module, _, name = self.build.partition(":")
        return getattr(import_module(module), name)(weights, placement, devices)


def offloads(placement: Placement, item: str) -> bool:
    """Return whether `item` is in host memory while other nodes compute.

    `item` is "optimizer" or "weights": the optimizer states or the weights of the placed node."""
    return placement.engine.options.get("offload") in (item, "all", "phase")


def optimizer_residency(placement: Placement) -> Residency:
    """Return when the optimizer states of a placed update are on the device."""
    if not offloads(placement, "optimizer"):
        return "always"
    return "phase" if placement.engine.options["offload"] == "phase" else "parts"


def gradient_type(placement: Placement) -> str:
    """Return the type in which an update sums gradients."""
    return str(placement.engine.options.get("gradients") or EngineOptions.gradients)


def is_compiled(placement: Placement) -> bool:
    """Return whether a placement's engine compiles its layers."""
    return placement.engine.options.get("compile") == "layers"


def can_compile(model: Model, layout: Layout) -> bool:
    """Return whether torch can compile the layers: it cannot with tp or experts."""
    return layout.tp == 1 and not model.experts
