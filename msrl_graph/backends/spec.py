"""The spec of an engine, and the protocols of trainers and generators.

Invariant: importing this module does not import torch. All that other code knows about an engine is in its EngineSpec.
A spec only names the function that builds the engine. The function's module is imported when an engine is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from ..hardware.device_kinds import DeviceKind, Where
from ..hardware.environment_variables import Setting
from ..model.features import PLAIN
from ..sharding.layout import Layout, Side
from ..sharding.tensors import Box
from .expert_placement import NONE, ExpertPlacement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tensordict import TensorDict
    from torch import Tensor

    from ..ir.graph import Node
    from ..ir.optimizer_spec import OptimizerSpec
    from ..ir.plan import Placement, Plan
    from ..ir.workload import Workload
    from ..model.architecture import Model
    from .devices import Devices

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


EVERY = ("python",)  # options of all engines: they configure the engine's processes
# Memory at each moment (instant) of a verb, by the moment's name: the bytes of each item.
Moments = dict[str, dict[str, int]]


@dataclass(frozen=True)
class EngineSpec:
    """All that the compiler knows about an engine, without loading the engine.

    - `build`: the function `module:name` that `build_engine` calls with (weights, placement, devices). The function
      returns a Trainer, or a Generator for the verb `generate`. "" if this version cannot run the engine.

    Support:
    - `axes`: the axes of a layout that may be larger than 1. `features`: the features of models (model/features.py).
    - `options`: the engine's own options (`EngineOptions`, ir/options.py). `EVERY`: the options that every engine has.
    - `off_host`: axes and features of models that a plan for host cores can use, but a run on host cores cannot.
    - `supported_attributes`: the supported node attributes (None: all). A run rejects other attributes.
    - `needs`: the required packages. `settings`: environment variables for the engine's processes. `lints`: returns
      warnings about combinations of options that are known to fail or to be slow.
    - `chosen`: where the planner can choose this engine if a program names no engine ("host": host cores, "device").

    Weights:
    - `divided_from`: the lowest ZeRO stage that keeps weights sharded over dp between passes (4: no stage).
    - `vocabulary_multiple`: each rank's part of the vocabulary is padded to a multiple of this number (1: no padding).
      With `pads_whole`, the whole vocabulary is padded to such a multiple instead.
    - `spread`: the rule by which experts, or shards of experts, are placed on ranks.
    - `packs_experts`: whether `Generator.filled` converts the new weights of experts in place to another format.

    Memory:
    - `peaks`: returns, for a verb and a Workload (ir/workload.py), the bytes at each moment; weights and optimizer
      states do not count. None: general formulas are used. In these formulas, tp also shards the inputs of norms if
      `divides_sequence` is set (sequence parallelism, arXiv:2205.05198).
    - `stored`: returns, for a Workload, the bytes that all layers keep for the backward pass. `building`: the memory
      that a new generator holds in addition to its weights, and releases with them.
    - `groups`: the number of process groups that send device tensors, in addition to the groups of the mesh's axes.
      With `own_groups`, the engine does not use the groups of the mesh's axes.

    Speed:
    - `calls`: returns the operator counts of an eager torch engine; None if kernels are fused everywhere.
    - `fused`: the places ("host", "device") where kernels are fused, so that `calls` does not apply.
    - `continuous`: whether a sequence that ends is replaced by the next sequence immediately.
    - `shares_beginnings`: the places ("host", "device") where common prefixes of a batch's rows are computed once, and
      a row's last token, which predicts nothing, is not computed.
    - `block`: tokens per block of the KV cache. Rows with a common prefix share only whole blocks and recompute the
      rest of the prefix (0: they share the whole prefix). A KV cache of blocks is allocated as a whole.
    - `cache_passes`: how often a decoding step reads or writes the KV cache.
    - `sums`: the number of tensor-parallel all-reduces per layer: (in a forward pass, in a backward pass)."""

    name: str
    verbs: tuple[str, ...]
    axes: tuple[str, ...]
    build: str = ""
    options: tuple[str, ...] = ()
    zero: tuple[int, ...] = (0, 1)
    divided_from: int = 4
    vocabulary_multiple: int = 1
    pads_whole: bool = False
    replicates_kv_heads: bool = False
    spread: ExpertPlacement = NONE
    packs_experts: bool = False
    features: frozenset[str] = PLAIN
    off_host: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch", "transformers")
    supported_attributes: tuple[str, ...] | None = None
    chosen: tuple[Where, ...] = ()
    continuous: bool = False
    own_groups: bool = False
    groups: Callable[[Layout], int] = lambda layout: layout.ep > 1
    lints: Callable[[Situation], Iterable[Lint]] = lambda situation: ()
    settings: Callable[[Situation], Iterable[Setting]] = lambda situation: ()
    calls: Callable[[Act, Layout], OperatorCalls] | None = None
    fused: tuple[Where, ...] = ()
    block: int = 0
    shares_beginnings: tuple[Where, ...] = ()
    cache_passes: int = 1
    sums: tuple[int, int] = (2, 2)
    peaks: Callable[..., Moments] | None = None
    stored: Callable[..., int] | None = None
    building: Callable[..., dict[str, int]] | None = None
    divides_sequence: bool = False

    def eager(self, where: Where) -> Callable[[Act, Layout], OperatorCalls] | None:
        """Return the function `calls`, or None if kernels are fused at the place `where`."""
        return None if where in self.fused else self.calls

    def list_plan_only(self, where: Where) -> tuple[str, ...]:
        """Return the axes and features that a plan can use on `where`, but a run cannot."""
        return self.off_host if where == "host" else ()

    def divides_weights(self, layout: Layout) -> bool:
        """Return whether the weights are sharded over dp between passes."""
        return layout.dp > 1 and layout.zero >= self.divided_from

    def needs_equal_calls(self, layout: Layout) -> bool:
        """Return whether all ranks of a dp group must make the same forward calls.

        Equal calls are needed if the collectives of a forward pass span the dp group."""
        return self.divides_weights(layout) or (layout.dp > 1 and layout.ep * layout.etp > layout.tp * layout.cp)

    def side(self, layout: Layout, first: int = 0, each: int = 0) -> Side:
        """Return the Side: how the engine shards weights, and on which devices."""
        return Side(layout, self.divides_weights(layout), self.multiple(layout), first, each)

    def multiple(self, layout: Layout) -> int:
        """Return the number by which a rank's padded part of the vocabulary is divisible."""
        return max(1, self.vocabulary_multiple // layout.tp) if self.pads_whole else self.vocabulary_multiple

    def build_engine(self, weights: Weights, placement: Placement, devices: Devices) -> Any:
        """Build the engine on this rank; return a Trainer or a Generator."""
        module, _, name = self.build.partition(":")
        return getattr(import_module(module), name)(weights, placement, devices)


def offloads(placement: Placement, item: str) -> bool:
    """Return whether `item` is in host memory while other nodes compute.

    `item` is "optimizer" or "weights": the optimizer states or the weights of the placed node."""
    return placement.engine.options.get("offload") in (item, "all")


def is_compiled(placement: Placement) -> bool:
    """Return whether a placement's engine compiles its layers."""
    return placement.engine.options.get("compile") == "layers"


def can_compile(model: Model, layout: Layout) -> bool:
    """Return whether torch can compile the layers: it cannot with tp or experts."""
    return layout.tp == 1 and not model.experts


@dataclass(frozen=True)
class Weights:
    """The weights that an engine is built to hold.

    - `model`: the model. Its `dtype` is the dtype that the plan chose for the weights.
    - `node`: the node that the engine is built for; for a trained worker, the worker's first update. The engine may
      read the node's attributes: `GenerateAttributes.of(weights.node)`. A trainer may compute several nodes: each call
      names its node (`ForwardRequest.node`).
    - `optimizer`: the update rules; None if nothing is updated.
    - `work`: the node's workload on one rank, with every column at its maximum length. With the workload, an engine can
      count memory as the plan does."""

    model: Model
    node: Node
    optimizer: OptimizerSpec | None = None
    work: Workload | None = None


@dataclass(frozen=True)
class Shard:
    """The part of a weight that a rank holds, in the form that resharding reads.

    `box`: one index range [start, stop) per dimension of the weight."""

    name: str
    box: Box
    tensor: Tensor


# The input of a trainer: sequences of tokens, as tensors by name, in host memory.
# - `ids`: all tokens, concatenated. `offsets`: where each sequence begins, and the end.
# - For each requested token, sequence by sequence: its sequence (`row`), a `position`, and the `token`. For a policy,
#   `position` is the position before the token, whose state predicts the token. For a reward model, it is the token's
#   own position. If a sequence is scored as a whole, its last position is requested, and `token` has no meaning.
# - `given` [tokens, k]: other tokens whose log-probabilities are requested at the same positions.
# - `temperature` [tokens, 1]: if tokens have different temperatures.
MicroBatch: TypeAlias = "TensorDict"


@dataclass(frozen=True)
class ForwardRequest:
    """The outputs that a forward pass must return for each requested token.

    A forward pass always returns the token's log-probability. If the micro-batch has a column `given`, the pass returns
    the log-probabilities of the token ids in this column as well. With `entropy`, the pass also returns the entropy of
    the token's distribution. `best` is the number of likeliest tokens to return. `temperature` applies to all tokens,
    unless the micro-batch has temperatures. `node` is the update that requests the pass. The update's attributes are
    `UpdateAttributes.of(request.node)`."""

    temperature: float = 1.0
    entropy: bool = False
    best: int = 0
    node: Node | None = None


class Outputs(NamedTuple):
    """The results of a forward pass, in float32.

    A policy returns all outputs that the ForwardRequest names. A scoring model returns only `values`, one score per
    token. Shapes are [tokens] or [tokens, k]. All tensors except `best` and `ids` are differentiable."""

    logp: Tensor | None = None
    values: Tensor | None = None  # score at each requested position
    entropy: Tensor | None = None  # nats; always set for an update, differentiable if requested
    given: Tensor | None = None
    best: Tensor | None = None  # log-probabilities, the likeliest first
    ids: Tensor | None = None  # token ids of the best


@dataclass(frozen=True)
class Sampling:
    """The parameters by which a generator draws tokens.

    `max_tokens` and `temperature` are one value for all responses, or one value per response. Temperature 0 is greedy.
    A response ends with a token of `ends`, or when its text contains a string of `stop`. The token or string is part of
    the response. The search for `stop` also covers the last `joined` tokens of the prompt."""

    samples: int
    max_tokens: int | NDArray[np.int64]
    temperature: float | NDArray[np.float32]
    top_p: float
    top_k: int
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    joined: int | NDArray[np.int64] = 0

    def select(self, responses: Any) -> Sampling:
        """Return the parameters for the responses with the indices `responses`."""
        values = {"max_tokens": self.max_tokens, "temperature": self.temperature, "joined": self.joined}
        selected = {name: value[responses] for name, value in values.items() if not isinstance(value, float | int)}
        return replace(self, **selected) if selected else self


class Response(NamedTuple):
    """A response, or a part of a response.

    - `place`: the index of the response among all responses of the call of `generate`.
    - `logps`: log-probabilities at the sampling temperature over the whole vocabulary, before top_k and top_p.
    - `ended`: whether the response ends with these tokens."""

    place: int
    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    ended: bool = True


def collect_responses(responses: Iterable[Response]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Return the tokens and the log-probabilities of responses, ordered by `place`."""
    ordered = sorted(responses, key=lambda response: response.place)
    return [response.tokens for response in ordered], [response.logps for response in ordered]


Loss = Callable[[Outputs, int], "Tensor"]


class Trainer(Protocol):
    """The training protocol of an engine, for a policy or a scoring model.

    Collectives span all ranks of one copy of the model. If weights or experts are sharded over dp, the collectives also
    span dp. The ranks of a collective make the same calls, with the same number of micro-batches.

    The engine decides when each micro-batch runs forward or backward, because the stages of a pipeline run different
    micro-batches at the same time. With several pipeline stages, only the ranks of the last stage have outputs."""

    def shards(self) -> list[Shard]:
        """Return the shards of weights that this rank holds between passes."""

    def score(self, micro_batches: Sequence[MicroBatch], request: ForwardRequest) -> list[Outputs]:
        """Run forward passes without autograd; return the outputs of each micro-batch.

        On ranks without the last layers, return an empty list."""

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, request: ForwardRequest) -> None:
        """Add the gradient of this rank's part of the loss to the gradient sums.

        The mini-batch's loss is the sum of the parts over all micro-batches and dp ranks. The ranks that have the last
        layers call `loss` once for each micro-batch, with the micro-batch's outputs and number. All these ranks make
        the calls in the same order, so `loss` may contain a collective over dp. A micro-batch's autograd graph is freed
        when the micro-batch is done. Exceptions of `loss` propagate."""

    def step(
        self,
        lr: float,
        clip_grad: float,
        sound: bool = True,
        optimizer: OptimizerSpec | None = None,
        node: Node | None = None,
    ) -> float:
        """Make an optimizer step; return the gradient's norm before clipping.

        The norm is the same on all ranks. Gradients are released. If the norm is not finite, weights and optimizer
        states do not change. `sound = False` on one rank makes the norm NaN on all ranks. `optimizer` has this step's
        options for the rules that the engine was built with. `node` is the update that makes the step."""

    def moments(self) -> dict[str, list[Shard]]:
        """Return the optimizer states by kind. A state has the same box as its weight.

        The call is a collective. The result is empty before the first step."""

    def restore(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Load the optimizer states of a checkpoint that was written after `steps` steps.

        The keys of `moments` are the kinds of states. The inner keys are the names of weights. The tensors are this
        rank's boxes. The weights are already loaded."""


class Generator(Protocol):
    """The generation protocol of an engine.

    Weights have memory only between `allocate` and `release`. Exception: on some devices no process group can be
    created while an engine sleeps (has released its memory). On these devices the weights have memory after the
    generator is built, and the caller calls `release` when all groups exist."""

    def allocate(self) -> list[Shard]:
        """Allocate memory for the weights, which resharding then fills."""

    def filled(self) -> None:
        """Prepare to generate with new weights, which the caller wrote to the shards.

        Everything that was computed from the old weights is dropped or recomputed."""

    def release(self) -> None:
        """Release the memory of the weights and of the KV cache."""

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        keys: NDArray[np.uint64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
        stretch: int = 0,
    ) -> Iterator[Response]:
        """Generate `sampling.samples` responses per prompt; yield each one at its end.

        All ranks of one copy of the model yield the same responses in the same order. A response includes its end
        token. If the caller stops iterating, no more tokens are drawn. `keys` has one noise key per response: the key
        and the step (the number of the token in the response) decide what is drawn (noise.py).

        `begun` resumes responses: it has the number of tokens that each response already has. `prompts` then has one
        prompt per response, and the prompt ends with these tokens. They count as steps and towards `max_tokens`, which
        is larger than `begun`. Stop strings are also searched for in the prompt's last `sampling.joined` tokens.

        With a `stretch`, each response is yielded in parts of `stretch` tokens. After one part of each unfinished
        response has been yielded, the next parts are drawn only if the caller continues to iterate."""
