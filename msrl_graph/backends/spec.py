"""What an engine is: the spec that the compiler reads, and the two small protocols that the runtime calls.

Invariant: torch-free; the runtime half of an engine stands in the same file of `backends` as its spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ..sharding.layout import Box, Layout, Side

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ..ir.stepping import Optimizer

BYTES = {"f32": 4, "bf16": 2}


# What an engine does at once: a forward pass over prompts, over one more token of each sequence, over rows, the same with its backward
# pass, an optimizer step.
Act = Literal["prefill", "decode", "infer", "update", "step"]


@dataclass(frozen=True)
class Calls:
    """How many operators Python calls, those that another one calls left out: `layer` for each of the model's layers, `rest` besides."""

    layer: float
    rest: float


@dataclass(frozen=True)
class Situation:
    """What an engine may know to fail or to crawl: a state's layout on devices of a kind, `per_host` of them, the micro-batches of an
    optimizer step, and the engines of the states that share the devices."""

    verb: str
    layout: Layout
    backend: str
    per_host: int
    micro_batches: int
    beside: frozenset[str]


@dataclass(frozen=True)
class Lint:
    """A combination that is known to be bad; one that is not `fatal` runs, but not well. `help` says what to do."""

    message: str
    help: str
    fatal: bool = False


Moments = dict[str, dict[str, int]]  # by name, what lives at one instant of a phase: bytes by item


@dataclass(frozen=True)
class EngineSpec:
    """`axes` are the mesh axes that may be larger than 1, `options` the attributes with their types ("int", "share" of 1, or the
    words that may stand there), `divided_from` the ZeRO stage from which weights at rest are divided over dp (4: never),
    `vocabulary_multiple` that to which a rank's part of the vocabulary is padded (1: it is not), `families` the architectures,
    `runs` the kinds of devices on which a run of this version may use it; on others it can be planned.
    `peaks` takes a verb and a Work (work.py) and gives the moments of what the engine holds beside weights and optimizer states at
    rest; without it general formulas stand in, in which a gradient takes `gradient_bytes` (0: as much as a weight), and tp divides what
    norms see too where it `divides_sequence` (sequence parallelism, arXiv:2205.05198). `continuous`: a sequence that ends leaves its
    place to the next, and is handed on at once.

    What seconds follow from: `calls` counts operators where the engine is eager torch, and is None where its kernels are fused;
    `shares_beginnings`: rows of a batch that begin alike are computed once, and a row's last token, which predicts nothing, not at all;
    `cache_passes`: how often a step of decoding reads or writes the cache; `sums`: all-reduces a layer of tensor parallelism in a forward
    and in a backward pass."""

    name: str
    verbs: tuple[str, ...]
    axes: tuple[str, ...]
    options: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    zero: tuple[int, ...] = (0, 1)
    divided_from: int = 4
    vocabulary_multiple: int = 1
    replicates_kv_heads: bool = False
    families: tuple[str, ...] = ("llama", "qwen2")
    runs: tuple[str, ...] = ("cpu",)
    continuous: bool = False
    lints: Callable[[Situation], Iterable[Lint]] = lambda situation: ()
    calls: Callable[[Act, Layout], Calls] | None = None
    shares_beginnings: bool = False
    cache_passes: int = 1
    sums: tuple[int, int] = (2, 2)
    peaks: Callable[..., Moments] | None = None
    gradient_bytes: int = 0
    divides_sequence: bool = False

    def divided(self, layout: Layout) -> bool:
        """Whether the weights at rest are divided over dp."""
        return layout.dp > 1 and layout.zero >= self.divided_from

    def side(self, layout: Layout, first: int = 0, each: int = 0) -> Side:
        """How weights lie under a layout, from device `first` on."""
        return Side(layout, self.divided(layout), self.vocabulary_multiple, first, each)


@dataclass(frozen=True)
class Shard:
    """A piece of a weight that a rank holds: all that resharding knows of an engine."""

    name: str
    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class Packed:
    """Sequences of tokens as a trainer takes them: `ids` [sequences, width] padded at the right, and for each token that is asked for, all
    sequences one after another, its sequence (`row`), the position *before* it (whose state predicts it), and the token. Where a sequence
    is scored as a whole, its last position is asked for, and `token` means nothing."""

    ids: Tensor
    row: Tensor
    position: Tensor
    token: Tensor


@dataclass(frozen=True)
class Asked:
    """What a forward pass is to give of each token that is asked for, beside its log-probability: the `entropy` of the distribution that it
    is drawn from, the `best` likeliest tokens there, and the log-probabilities of the tokens `given` [tokens, k]. All are at a
    `temperature`, one for all or [tokens, 1]."""

    temperature: float | Tensor = 1.0
    entropy: bool = False
    best: int = 0
    given: Tensor | None = None


class Outputs(NamedTuple):
    """What a forward pass gives, in float32: a policy all that it was asked for, a scoring model `values` alone. [tokens], or [tokens, k];
    differentiable, but for the k best."""

    logp: Tensor | None = None
    values: Tensor | None = None  # the score of the state before each token, or of a whole sequence
    entropy: Tensor | None = None  # nats; of an update always, differentiable where it was asked for
    given: Tensor | None = None
    best: Tensor | None = None  # log-probabilities, the likeliest first
    ids: Tensor | None = None  # of the best


@dataclass(frozen=True)
class Sampling:
    """How a generator draws: `seed` and `iteration` key the noise; `temperature`, one for all or one a response, is greedy where it is 0.
    A response ends with a token of `ends`, or when its text holds a string of `stop`; both stay part of it."""

    samples: int
    max_tokens: int
    temperature: float | NDArray[np.float32]
    top_p: float
    top_k: int
    seed: int
    iteration: int
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def of(self, responses: Any) -> Sampling:
        """How some of the responses are drawn, by their places."""
        one = isinstance(self.temperature, float | int)
        return self if one else replace(self, temperature=self.temperature[responses])  # type: ignore[index]


class Trainer(Protocol):
    """The training half of an engine, of a policy or of a scoring model (Model.scoring). Collectives span tp, and dp where weights are
    divided: all ranks make the same calls."""

    def shards(self) -> list[Shard]:
        """The weights at rest on this rank."""

    def forward(self, packed: Packed, asked: Asked) -> Outputs:
        """One pass over the sequences; nothing is differentiable where torch.no_grad() is in force."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's part of the loss (the parts of all dp ranks add up to the mini-batch's)."""

    def step(self, lr: float, clip_grad: float, sound: bool = True, optimizer: Optimizer | None = None) -> float:
        """An optimizer step; the gradient's norm before clipping, the same on all ranks. Gradients are released. Where the norm is not
        finite, as it is everywhere when one rank calls its part not sound, weights and optimizer states stay as they are. `optimizer`
        has the options of this step, of the rules that the engine was made with."""

    def moments(self) -> dict[str, list[Shard]]:
        """What the optimizer keeps beside the weights, by kind, in the boxes of `shards`, of those that it keeps it of; empty before the
        first step. A collective."""

    def restore(self, moments: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Takes over what `moments` gave, by kind and tensor, in this rank's boxes, after so many steps. The weights are set already."""


class Generator(Protocol):
    """The generation half of an engine. Between `release` and `allocate` it holds no weights."""

    def allocate(self) -> list[Shard]:
        """Takes memory for the weights, for resharding to fill."""

    def release(self) -> None:
        """Gives back weights and cache."""

    def generate(
        self, prompts: list[NDArray[np.int32]], rows: NDArray[np.int64], sampling: Sampling, begun: NDArray[np.int64] | None = None
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        """`samples` responses to each prompt, in order, and the log-probability of each of their tokens at the sampling temperature, over
        the whole vocabulary (top_k and top_p aside). `rows` numbers them (it keys the noise). The end token is part of a response.
        Where responses have `begun`, with so many tokens, there is a prompt for each row that ends with these: they count in `max_tokens`,
        which is more, and in the steps of the noise; stop strings are looked for in what is drawn alone."""
