"""An engine's spec, and the two protocols of engines that the runtime calls.

Invariant: torch-free. All that the rest of the package knows of an engine is here. A spec names the function that
builds its engine; it is imported only to build one, so reading specs loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from ..hardware.device_kinds import DeviceKind, Where
from ..hardware.environment_variables import Setting
from ..sharding.layout import Box, Layout, Side
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


# One call of an engine: a forward pass over prompts, over one more token of each sequence, or over rows, a forward
# and backward pass, or an optimizer step.
Act = Literal["prefill", "decode", "infer", "update", "step"]


@dataclass(frozen=True)
class OperatorCalls:
    """The number of operators that Python calls, without nested ones.

    `layer` counts for each of the model's layers, `rest` for everything else, `sequence` for each sequence. Other
    Python work counts as the number of operators that take as long.
    """

    layer: float
    rest: float
    sequence: float = 0.0


@dataclass(frozen=True)
class Situation:
    """What an engine's lints and settings may depend on.

    It is a node's layout on devices of a kind, `per_host` of them, and the engines of the nodes that share the
    devices.
    """

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
    """A combination that runs but is known to be bad; `help` says what to do."""

    message: str
    help: str


EVERY = ("python",)  # options of all engines: they configure the engine's processes
Moments = dict[str, dict[str, int]]  # by name, what lives at one instant of a phase: bytes by item


@dataclass(frozen=True)
class EngineSpec:
    """What the compiler knows of an engine, without loading it.

    - `build`: the function `module:name` that `built` calls with (weights, placement, devices). It returns a Trainer,
      or a Generator for the verb `generate`. "": the engine can only be planned for.

    Support:
    - `axes`: the mesh axes that may be larger than 1. `families`: the model architectures.
    - `options`: its `EngineOptions` (ir/options.py) besides `EVERY`.
    - `off_host`: axes and families that cannot run on host cores, only be planned for.
    - `supported_attributes`: the node attributes that it supports (None: all). A run rejects the others.
    - `needs`: the packages. `settings`: environment variables for its processes.
    - `chosen`: devices for which a plan may choose it if a program names no engine.
    - `lints`: combinations that it knows to fail or to be slow.

    Weights:
    - `divided_from`: the ZeRO stage from which weights at rest are sharded over dp (4: never).
    - `vocabulary_multiple`: a rank's part of the vocabulary is padded to a multiple of it (1: no padding), or the whole
      vocabulary if it `pads_whole`.
    - `spread`: which ranks have which experts, or parts of them.
    - `packs_experts`: `filled` converts the written experts to another form, in place.

    Memory:
    - `peaks`: from a verb and a Workload (ir/workload.py), moment by moment, what is on a device besides weights and
      optimizer states at rest. Without it general formulas are used, in which tp also shards the inputs of norms if it
      `divides_sequence` (sequence parallelism, arXiv:2205.05198).
    - `stored`: from a Workload, what layers keep for the backward pass, in total.
    - `building`: from a Workload, what a generator holds besides its weights when it is built, and later releases with
      them.
    - `groups`: process groups that send its device tensors, besides those of the mesh's axes, or instead of them if it
      has `own_groups`.

    Speed:
    - `calls`: operator counts of an eager torch engine. None if kernels are fused, as on devices of the kinds `fused`.
    - `continuous`: a sequence that ends leaves its place to the next at once.
    - `shares_beginnings`: on these devices common prefixes of a batch's rows are computed once, and a row's last token,
      which predicts nothing, is not computed.
    - `block`: rows that diverge share whole cache blocks of this many tokens and recompute the rest (0: they share
      everything). A cache of blocks is allocated as a whole.
    - `cache_passes`: how often a decoding step reads or writes the cache.
    - `sums`: all-reduces per layer of tensor parallelism, in a forward and in a backward pass.
    """

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
    families: tuple[str, ...] = ("llama", "qwen2")
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
        """Return the operator counts on such devices; None if kernels are fused."""
        return None if where in self.fused else self.calls

    def list_plan_only(self, where: Where) -> tuple[str, ...]:
        """Return the axes and families that can only be planned for on such devices."""
        return self.off_host if where == "host" else ()

    def divides_weights(self, layout: Layout) -> bool:
        """Return whether the weights at rest are sharded over dp."""
        return layout.dp > 1 and layout.zero >= self.divided_from

    def needs_equal_calls(self, layout: Layout) -> bool:
        """Return whether forward collectives span dp groups, which then make equal calls."""
        return self.divides_weights(layout) or (layout.dp > 1 and layout.ep * layout.etp > layout.tp * layout.cp)

    def side(self, layout: Layout, first: int = 0, each: int = 0) -> Side:
        """Return how weights are sharded under a layout, from device `first` on."""
        return Side(layout, self.divides_weights(layout), self.multiple(layout), first, each)

    def multiple(self, layout: Layout) -> int:
        """Return the multiple to which a rank's part of the vocabulary is padded."""
        return max(1, self.vocabulary_multiple // layout.tp) if self.pads_whole else self.vocabulary_multiple

    def build_engine(self, weights: Weights, placement: Placement, devices: Devices) -> Any:
        """Build the engine on this rank."""
        module, _, name = self.build.partition(":")
        return getattr(import_module(module), name)(weights, placement, devices)


def offloads(placement: Placement, item: str) -> bool:
    """Return whether `optimizer` or `weights` are in host memory while others compute."""
    return placement.engine.options.get("offload") in (item, "all")


def is_compiled(placement: Placement) -> bool:
    """Return whether a placement's engine compiles its layers."""
    return placement.engine.options.get("compile") == "layers"


def can_compile(model: Model, layout: Layout) -> bool:
    """Return whether torch's compiler supports a model: not with tp or experts."""
    return layout.tp == 1 and not model.experts


@dataclass(frozen=True)
class Weights:
    """What an engine is built to hold.

    - `model`: with weights in the type that the plan gives them.
    - `node`: the node that the weights are for; the first update for a worker that is updated. The engine may read the
      node's attributes: `Generate.of(weights.node)`. A trainer may serve several nodes; each call names its own
      (`ForwardRequest.node`).
    - `optimizer`: the rules of its steps; None if nothing is updated.
    - `work`: what the node computes at once, at its columns' bounds: the engine can count memory as the plan does.
    """

    model: Model
    node: Node
    optimizer: OptimizerSpec | None = None
    work: Workload | None = None


@dataclass(frozen=True)
class Shard:
    """A piece of a weight on a rank: all that resharding knows of an engine."""

    name: str
    box: Box
    tensor: Tensor


# The input of a trainer: sequences of tokens, as tensors by name, in host memory.
# - `ids`: all tokens, concatenated. `offsets`: where each sequence begins, and the end.
# - For each requested token, sequence by sequence: its sequence (`row`), a `position`, and the `token`. The position is
#   the one *before* the token, whose state predicts it; for a reward model it is the token's own, whose state has seen
#   it. If a sequence is scored as a whole, its last position is requested, and `token` has no meaning.
# - `given` [tokens, k]: other tokens whose log-probabilities are requested there.
# - `temperature` [tokens, 1]: if tokens have different temperatures.
MicroBatch: TypeAlias = "TensorDict"


@dataclass(frozen=True)
class ForwardRequest:
    """What a forward pass must return for each requested token.

    It always returns the log-probability of the token, and those of `given` tokens in the micro-batch. On request it
    also returns the `entropy` of the token's distribution and its `best` likeliest tokens. Everything is at one
    `temperature`, unless the micro-batch has its own. `node` is the requesting update, whose attributes the engine
    may read: `Update.of(request.node)`.
    """

    temperature: float = 1.0
    entropy: bool = False
    best: int = 0
    node: Node | None = None


class Outputs(NamedTuple):
    """The results of a forward pass, in float32.

    A policy returns all that was requested, a scoring model only `values`. Shapes are [tokens] or [tokens, k]; all
    are differentiable except the k best.
    """

    logp: Tensor | None = None
    values: Tensor | None = None  # score at each requested position
    entropy: Tensor | None = None  # nats; always set for an update, differentiable if requested
    given: Tensor | None = None
    best: Tensor | None = None  # log-probabilities, the likeliest first
    ids: Tensor | None = None  # token ids of the best


@dataclass(frozen=True)
class Sampling:
    """How a generator draws tokens.

    `max_tokens` and `temperature` are one value for all, or one for each response; temperature 0 is greedy. A
    response ends with a token of `ends`, or when its text contains a string of `stop`; both stay part of it. Its text
    is what is drawn, after the last `joined` tokens of the prompt.
    """

    samples: int
    max_tokens: int | NDArray[np.int64]
    temperature: float | NDArray[np.float32]
    top_p: float
    top_k: int
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    joined: int | NDArray[np.int64] = 0

    def select(self, responses: Any) -> Sampling:
        """Select the sampling of some responses, by their places."""
        values = {"max_tokens": self.max_tokens, "temperature": self.temperature, "joined": self.joined}
        selected = {name: value[responses] for name, value in values.items() if not isinstance(value, float | int)}
        return replace(self, **selected) if selected else self


class Response(NamedTuple):
    """A response, or a part of one.

    It has the place among the requested responses, the tokens, and their log-probabilities at the sampling
    temperature over the whole vocabulary (before top_k and top_p). `ended`: the response ends with these tokens.
    """

    place: int
    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    ended: bool = True


def collect_responses(responses: Iterable[Response]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Return tokens and log-probabilities of all responses, by place."""
    ordered = sorted(responses, key=lambda response: response.place)
    return [response.tokens for response in ordered], [response.logps for response in ordered]


Loss = Callable[[Outputs, int], "Tensor"]


class Trainer(Protocol):
    """The training half of an engine, for a policy or a scoring model (Model.scoring).

    Collectives span all ranks of a model's replica, and dp if weights or experts are sharded over it: these ranks
    make the same calls, with the same number of micro-batches.
    The engine decides when each micro-batch runs forward or backward: the stages of a pipeline run different ones at
    a time. If a model's layers are on several ranks, outputs are on the ranks with the last layers.
    """

    def shards(self) -> list[Shard]:
        """Return the weights at rest on this rank."""

    def score(self, micro_batches: Sequence[MicroBatch], request: ForwardRequest) -> list[Outputs]:
        """Run forward passes without a graph; return nothing without the last layers."""

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, request: ForwardRequest) -> None:
        """Add the gradient of this rank's part of the loss.

        The parts of all micro-batches and dp ranks add up to the mini-batch's loss. `loss` is called once for each
        micro-batch, with its outputs and its number, on the ranks that have the last layers, in the same order on all
        of them: it may contain a collective over dp. A graph is freed when its micro-batch is done. Exceptions of
        `loss` propagate.
        """

    def step(
        self,
        lr: float,
        clip_grad: float,
        sound: bool = True,
        optimizer: OptimizerSpec | None = None,
        node: Node | None = None,
    ) -> float:
        """Make an optimizer step; return the gradient's norm before clipping.

        The norm is the same on all ranks. Gradients are released. If the norm is not finite, weights and states do
        not change; one rank with `sound = False` makes it so on all. `optimizer` has the options of this step, for
        the rules that the engine was built with. `node` is the update of the step.
        """

    def moments(self) -> dict[str, list[Shard]]:
        """Return the optimizer's states by kind, in the boxes of their shards.

        A collective. Empty before the first step.
        """

    def restore(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Load the states that `moments` returned, after `steps` steps.

        They come by kind and tensor, in this rank's boxes. The weights are already set.
        """


class Generator(Protocol):
    """The generation half of an engine.

    It holds no weights between `release` and `allocate`, nor when it was just built. The exception is a device on
    which no process group can be created during sleep: the caller releases the weights when all groups exist.
    """

    def allocate(self) -> list[Shard]:
        """Allocate memory for the weights, which resharding fills."""

    def filled(self) -> None:
        """Drop or recompute what came from the old weights; the shards hold new ones."""

    def release(self) -> None:
        """Release weights and cache."""

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        keys: NDArray[np.uint64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
        stretch: int = 0,
    ) -> Iterator[Response]:
        """Generate `samples` responses to each prompt; yield each when it ends.

        All ranks of the group yield the same ones in the same order. What is not requested any more is not drawn.
        `keys` has one key for each response: the key and the step decide what is drawn (noise.py). The end token is
        part of a response.
        If responses have `begun`, with that many tokens, there is a prompt for each row that ends with them. They
        count in `max_tokens`, which is larger, and in the steps. Stop strings are looked for in those that `sampling`
        has `joined`.
        With a `stretch` each response comes in parts of that many tokens. When all unfinished responses have yielded
        one, the next part is drawn on request.
        """
