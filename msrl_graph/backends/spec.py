"""What an engine is: the spec that the compiler reads, how one is built, and the two protocols that the runtime calls.

Invariant: torch-free; all that the rest of the package knows of an engine is here. A spec names the function that
builds its engine, which is looked up where one is built, so that whoever only reads specs loads nothing.
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


# What an engine does at once: a forward pass over prompts, over one more token of each sequence, over rows, the same
# with its backward pass, an optimizer step.
Act = Literal["prefill", "decode", "infer", "update", "step"]


@dataclass(frozen=True)
class OperatorCalls:
    """How many operators Python calls, those that another one calls left out: `layer` for each of the model's layers,
    `rest` besides, and `sequence` for each sequence. What else Python does counts as so many operators as take as
    long."""

    layer: float
    rest: float
    sequence: float = 0.0


@dataclass(frozen=True)
class Situation:
    """What an engine may know to fail or to crawl: a node's layout on devices of a kind, `per_host` of them, and the
    engines of the nodes that share the devices."""

    verb: str
    layout: Layout
    device: DeviceKind
    per_host: int
    beside: frozenset[str]

    @classmethod
    def of(cls, plan: Plan, placement: Placement) -> Situation:
        alike = (p for p in plan.placements if p.pool == placement.pool and p.node != placement.node)
        return cls(
            plan.graph.node(placement.node).verb,
            placement.layout,
            plan.cluster.device.kind,
            placement.each or plan.cluster.devices_per_node,
            frozenset(p.engine.name for p in alike),
        )


@dataclass(frozen=True)
class Lint:
    """A combination that runs, but is known to be bad. `help` says what to do."""

    message: str
    help: str


EVERY = ("python",)  # options of all engines: they are not the engine's, but its processes'
Moments = dict[str, dict[str, int]]  # by name, what lives at one instant of a phase: bytes by item


@dataclass(frozen=True)
class EngineSpec:
    """What the compiler knows of an engine, without loading it.

    - How it is made: `build` names a function as `module:name`, which `built` calls with (weights, placement, devices);
      it gives a Trainer, or a Generator where the verb is `generate`. "" where there is none yet: it can be planned.
    - What it can do: `axes`: the mesh axes that may be larger than 1; `families`: the model architectures;
      `options`: those of `EngineOptions` (ir/options.py) that it has beside `EVERY`; `off_host`: which axes and
      families do not run where devices are a host's cores, and can be planned for only; `honours`: the attributes of
      its nodes that it keeps to (None: all but those that each engine must name), `heeds`: those of these that it
      names; a run refuses the others; `needs`: the packages; `chosen`: what it is meant for, where a plan may choose it
      if a program names none; `lints`: what it knows to fail or to crawl; `settings`: the environment variables that it
      wants of its processes.
    - How weights lie: `divided_from`: the ZeRO stage from which weights at rest are divided over dp (4: never);
      `vocabulary_multiple`: to a multiple of this a rank's part of the vocabulary is padded (1: it is not), or the
      whole vocabulary, where it `pads_whole`; `spread`: which ranks have which experts, or parts of them;
      `packs_experts`: `filled` brings what was written of experts into another form, in its place.
    - What it holds: `peaks` takes a verb and a Work (ir/workload.py) and gives, moment by moment, what is on a device
      beside weights and optimizer states at rest. Without it general formulas stand in, in which tp divides what norms
      see too where it `divides_sequence` (sequence parallelism, arXiv:2205.05198). `stored`: of a Work, what layers
      keep for the backward pass, in all. `building`: of a Work, what a generator has beside its weights as it is built,
      and then gives back with them. `groups`: how many process groups it has tensors of its device sent in,
      beside those of the mesh's axes, or where they are `own_groups` in place of these.
    - How long it takes: `calls` counts the operators of an eager torch engine, and is None where kernels are fused, as
      they are on devices of the kinds `fused`; `continuous`: a sequence that ends leaves its place to the next at once;
      `shares_beginnings`: on such devices rows of a batch that begin alike are computed once, and a row's last token,
      which predicts nothing, not at all; `block`: what parts shares whole blocks of so many tokens of the cache and
      computes anew what is in none (0: it has all), and that cache is there as a whole; `cache_passes`: how often a
      step of decoding reads or writes the cache; `sums`: all-reduces a layer of tensor parallelism in a forward
      and in a backward pass.
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
    honours: tuple[str, ...] | None = None
    heeds: tuple[str, ...] = ()
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
        """What counts its operators on such devices; None where kernels are fused."""
        return None if where in self.fused else self.calls

    def planned(self, where: Where) -> tuple[str, ...]:
        """Which axes and families can be planned for only on such devices."""
        return self.off_host if where == "host" else ()

    def divided(self, layout: Layout) -> bool:
        """Whether the weights at rest are divided over dp."""
        return layout.dp > 1 and layout.zero >= self.divided_from

    def in_step(self, layout: Layout) -> bool:
        """Whether a collective of a forward pass spans data-parallel groups, which then make the same calls."""
        return self.divided(layout) or (layout.dp > 1 and layout.ep * layout.etp > layout.tp * layout.cp)

    def side(self, layout: Layout, first: int = 0, each: int = 0) -> Side:
        """How weights lie under a layout, from device `first` on."""
        return Side(layout, self.divided(layout), self.multiple(layout), first, each)

    def multiple(self, layout: Layout) -> int:
        """To a multiple of this a rank's part of the vocabulary is padded."""
        return max(1, self.vocabulary_multiple // layout.tp) if self.pads_whole else self.vocabulary_multiple

    def built(self, weights: Weights, placement: Placement, devices: Devices) -> Any:
        """The engine, on this rank."""
        module, _, name = self.build.partition(":")
        return getattr(import_module(module), name)(weights, placement, devices)


def offloads(placement: Placement, what: str) -> bool:
    """Whether a placement's engine has the `optimizer` of an update, or the `weights` of a node without, in host memory
    while others compute."""
    return placement.engine.options.get("offload") in (what, "all")


def compiled(placement: Placement) -> bool:
    """Whether a placement's engine has its layers compiled."""
    return placement.engine.options.get("compile") == "layers"


def compiles(model: Model, layout: Layout) -> bool:
    """Whether torch's compiler takes a model's layers: it fails on those that tp divides, and on experts."""
    return layout.tp == 1 and not model.experts


@dataclass(frozen=True)
class Weights:
    """What an engine is built to hold: the weights of a `model`, in the type that the plan gives them, and by what
    rules they step; None where nothing is updated.

    `work` is what the node computes at once, at its columns' bounds: as the plan counts memory, so may an engine.
    `node` is the one that they are for, of a worker that is updated its first update. What it says besides is for the
    engine to read: `Generate.of(weights.node)`. A trainer may have several nodes, and is told with each call whose it
    is (`Asked.node`).
    """

    model: Model
    node: Node
    optimizer: OptimizerSpec | None = None
    work: Workload | None = None


@dataclass(frozen=True)
class Shard:
    """A piece of a weight that a rank holds: all that resharding knows of an engine."""

    name: str
    box: Box
    tensor: Tensor


# What a trainer is handed: sequences of tokens, as tensors by name, in the host's memory. `ids` are all tokens end to
# end, `offsets` where each sequence begins, and the end. For each token that is asked for, all sequences one after
# another, there is its sequence (`row`), a `position`, and the `token`. The position is the one *before* the token
# (whose state predicts it); for a reward model it is the token's own (whose state has seen it). Where a sequence is
# scored as a whole, its last position is asked for, and `token` means nothing. Where log-probabilities of other tokens
# are wanted there too, these are `given` [tokens, k]; where tokens differ in it, each has its `temperature`
# [tokens, 1].
MicroBatch: TypeAlias = "TensorDict"


@dataclass(frozen=True)
class ForwardRequest:
    """What forward passes are to give of each token that is asked for, beside its log-probability and those of the
    tokens that its micro-batch gives: the `entropy` of the distribution that it is drawn from, and the `best` likeliest
    tokens there. All are at a `temperature`, unless the micro-batch has its own. `node` is the one that asks: an update
    whose attributes the engine may read, `Update.of(asked.node)`."""

    temperature: float = 1.0
    entropy: bool = False
    best: int = 0
    node: Node | None = None


class Outputs(NamedTuple):
    """What a forward pass gives, in float32: a policy all that it was asked for, a scoring model `values` alone.
    [tokens], or [tokens, k]; differentiable, but for the k best."""

    logp: Tensor | None = None
    values: Tensor | None = None  # the score at each position that is asked for
    entropy: Tensor | None = None  # nats; of an update always, differentiable where it was asked for
    given: Tensor | None = None
    best: Tensor | None = None  # log-probabilities, the likeliest first
    ids: Tensor | None = None  # of the best


@dataclass(frozen=True)
class Sampling:
    """How a generator draws: `max_tokens` and `temperature`, one for all or one a response; greedy where the latter is
    0. A response ends with a token of `ends`, or when its text holds a string of `stop`; both stay part of it. Its text
    is that of what is drawn, and of so many of the tokens before as are `joined` to it."""

    samples: int
    max_tokens: int | NDArray[np.int64]
    temperature: float | NDArray[np.float32]
    top_p: float
    top_k: int
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    joined: int | NDArray[np.int64] = 0

    def of(self, responses: Any) -> Sampling:
        """How some of the responses are drawn, by their places."""
        each = {"max_tokens": self.max_tokens, "temperature": self.temperature, "joined": self.joined}
        some = {name: value[responses] for name, value in each.items() if not isinstance(value, float | int)}
        return replace(self, **some) if some else self


class Response(NamedTuple):
    """A response, or a stretch of one: its place among those that were asked for, its tokens, their log-probabilities
    at the sampling temperature, over the whole vocabulary (top_k and top_p aside), and whether it ends with these."""

    place: int
    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    ended: bool = True


def collected(responses: Iterable[Response]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Tokens and log-probabilities of all responses, by place."""
    found = sorted(responses, key=lambda r: r.place)
    return [r.tokens for r in found], [r.logps for r in found]


Loss = Callable[[Outputs, int], "Tensor"]


class Trainer(Protocol):
    """The training half of an engine, of a policy or of a scoring model (Model.scoring). Collectives span all ranks of
    a model's replica, and dp where weights or experts are divided over it: these ranks make the same calls, with as
    many micro-batches.

    Which micro-batch is passed forward or backward when, is the engine's own: a pipeline's stages each run another one.
    Where a model's layers are on several ranks, outputs are on those that have the last ones."""

    def shards(self) -> list[Shard]:
        """The weights at rest on this rank."""

    def score(self, micro_batches: Sequence[MicroBatch], asked: ForwardRequest) -> list[Outputs]:
        """What forward passes give, apart from any graph; nothing where the last layers are not."""

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, asked: ForwardRequest) -> None:
        """Adds the gradient of this rank's part of the loss (the parts of all micro-batches and of all dp ranks add up
        to the mini-batch's). `loss` is called once a micro-batch, with what its forward pass gave and its number, on
        the ranks that have the last layers, in the same order on all of them: it may hold a collective over dp. A graph
        is gone when its micro-batch is through. What `loss` raises goes up."""

    def step(
        self,
        lr: float,
        clip_grad: float,
        sound: bool = True,
        optimizer: OptimizerSpec | None = None,
        node: Node | None = None,
    ) -> float:
        """An optimizer step; the gradient's norm before clipping, the same on all ranks. Gradients are released. Where
        the norm is not finite, as it is everywhere when one rank calls its part not sound, weights and optimizer states
        stay as they are. `optimizer` has the options of this step, of the rules that the engine was made with; `node`
        is the update whose step it is."""

    def moments(self) -> dict[str, list[Shard]]:
        """What the optimizer keeps beside the weights, by kind, in the boxes of `shards`, of those that it keeps it of;
        empty before the first step. A collective."""

    def restore(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Takes over what `moments` gave, by kind and tensor, in this rank's boxes, after so many steps. The weights
        are set already."""


class Generator(Protocol):
    """The generation half of an engine. Between `release` and `allocate` it holds no weights, and none as it is built,
    but on devices beside whose sleep no group can be made: there it is told to release them when all are."""

    def allocate(self) -> list[Shard]:
        """Takes memory for the weights, for resharding to fill."""

    def filled(self) -> None:
        """The shards hold other weights than before: what was kept of the old ones, or is made of them, is made
        anew."""

    def release(self) -> None:
        """Gives back weights and cache."""

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        keys: NDArray[np.uint64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
        stretch: int = 0,
    ) -> Iterator[Response]:
        """`samples` responses to each prompt, each as it ends: all ranks of the group give the same ones in the same
        order, and what is not asked for any more is not drawn. `keys` has one for each
        response: it and the step decide what is drawn (noise.py). The end token is part of a response. Where responses
        have `begun`, with so many tokens, there is a prompt for each row that ends with these: they count in
        `max_tokens`, which is more, and in the steps; stop strings are looked for in those that `sampling` has
        `joined`. With a `stretch` each response comes in parts of so many tokens: when all that have not ended have
        given one, the next is drawn if it is asked for."""
