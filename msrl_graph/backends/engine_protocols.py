"""The protocols of trainers and generators, with their inputs and outputs.

Invariant: importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ..sharding.tensors import Box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tensordict import TensorDict
    from torch import Tensor

    from ..ir.graph import Node
    from ..ir.optimizer_spec import OptimizerSpec
    from ..ir.workload import Workload
    from ..model.architecture import Model


T = TypeVar("T")


def fill_fields(kind: type[T], attributes: object, **values: Any) -> T:
    """Make a dataclass from `values` and from attributes, by their names.

    So an attribute that engines read is a field of a request, and no code passes it on.
    """
    named = {field.name for field in fields(kind) if hasattr(attributes, field.name)}  # type: ignore[arg-type]
    return kind(**{name: getattr(attributes, name) for name in named} | values)


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


# The input of one forward pass of a trainer: sequences of tokens, as tensors by name, in host memory. It exists while
# the engine computes it.
# - `ids`: all tokens, concatenated. `offsets`: where each sequence begins, and the end.
# - For each requested token, sequence by sequence: its sequence (`row`), a `position`, and the `token`. For a policy,
#   `position` is the position before the token, whose state predicts the token. For a reward model, it is the token's
#   own position. If a sequence is scored as a whole, its last position is requested, and `token` has no meaning.
# - `given` [tokens, k]: other tokens whose log-probabilities are requested at the same positions.
# - `temperature` [tokens, 1]: if tokens have different temperatures.
# - `routes` [number of ids, layers, k]: the experts to which the model's routers must send each token of `ids`, in each
#   layer with experts; negative: the router chooses. The router computes the weights of the experts in any case.
MicroBatch: TypeAlias = "TensorDict"


@dataclass(frozen=True)
class ForwardRequest:
    """The outputs that a forward pass must return for each requested token.

    A forward pass always returns the token's log-probability. If the micro-batch has a column `given`, the pass returns
    the log-probabilities of the token ids in this column as well. With `entropy`, the pass also returns the entropy of
    the token's distribution. `best` is the number of likeliest tokens to return. With `routes`, the pass returns the
    routes of all ids. `temperature` applies to all tokens, unless the micro-batch has temperatures. `node` is the
    update that requests the pass. The update's attributes are `UpdateAttributes.of(request.node)`. Without `adapter`,
    an engine with the feature `lora` leaves the adapter out. `dropout` is a key of random numbers: with it, an engine
    with the feature `lora_dropout` sets inputs of the adapter to 0 (kernels/keyed_dropout.py)."""

    temperature: float = 1.0
    entropy: bool = False
    best: int = 0
    routes: bool = False
    node: Node | None = None
    adapter: bool = True
    dropout: int | None = None


class Outputs(NamedTuple):
    """The results of a forward pass, in float32.

    A policy returns all outputs that the ForwardRequest names. A scoring model returns only `values`, one score per
    token. Shapes are [tokens] or [tokens, k], for the requested tokens. All tensors except `best`, `ids` and `routes`
    are differentiable."""

    logp: Tensor | None = None
    values: Tensor | None = None  # score at each requested position
    entropy: Tensor | None = None  # nats; always set for an update, differentiable if requested
    given: Tensor | None = None
    best: Tensor | None = None  # log-probabilities, the likeliest first
    ids: Tensor | None = None  # token ids of the best
    routes: Tensor | None = None  # as in MicroBatch, for all its ids; negative where nothing was computed


@dataclass(frozen=True)
class Sampling:
    """The parameters by which a generator draws tokens.

    `max_tokens` and `temperature` are one value for all responses, or one value per response. Temperature 0 is greedy.
    No token is drawn whose probability is below `min_p` times the likeliest token's.
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
    min_p: float = 0.0

    def select(self, responses: Any) -> Sampling:
        """Return the parameters for the responses with the indices `responses`."""
        values = {"max_tokens": self.max_tokens, "temperature": self.temperature, "joined": self.joined}
        selected = {name: value[responses] for name, value in values.items() if not isinstance(value, float | int)}
        return replace(self, **selected) if selected else self


@dataclass(frozen=True)
class GenerateRequest:
    """The responses that a generator draws.

    - `prompts`: the tokens that responses continue. Each prompt has the same number of responses.
    - `keys`: one noise key for each response: the key and the step (the number of the token in the response) decide
      what is drawn (noise.py).
    - `begun` resumes responses: it has the number of tokens that each response already has. `prompts` then has one
      prompt for each response, and the prompt ends with these tokens. They count as steps and towards `max_tokens`,
      which is larger than `begun`. Stop strings are also searched for in the prompt's last `sampling.joined` tokens.
    - `routes`: whether responses must have their routes.
    - `stretch`: if not 0, each response is yielded in parts of `stretch` tokens. After one part of each unfinished
      response has been yielded, the next parts are drawn only if the caller continues to iterate."""

    prompts: list[NDArray[np.int32]]
    keys: NDArray[np.uint64]
    sampling: Sampling
    begun: int | NDArray[np.int64] = 0
    stretch: int = 0
    routes: bool = False

    @property
    def samples_per_prompt(self) -> int:
        """The number of responses to each prompt."""
        return len(self.keys) // len(self.prompts)

    @property
    def response_prompts(self) -> list[NDArray[np.int32]]:
        """For each response, its prompt."""
        return [prompt for prompt in self.prompts for _ in range(self.samples_per_prompt)]

    @property
    def room(self) -> NDArray[np.int64]:
        """For each response, the largest number of tokens that may be drawn."""
        import numpy as np

        return np.broadcast_to(np.asarray(self.sampling.max_tokens - self.begun), len(self.keys))

    def select(self, responses: NDArray[np.int64]) -> GenerateRequest:
        """Return the request for some responses, each with a prompt of its own."""
        prompts = self.response_prompts
        begun = self.begun if isinstance(self.begun, int) else self.begun[responses]
        return replace(
            self,
            prompts=[prompts[i] for i in responses],
            keys=self.keys[responses],
            sampling=self.sampling.select(responses),
            begun=begun,
        )


@dataclass(frozen=True)
class StepRequest:
    """An optimizer step that a trainer makes.

    `sound = False` on one rank makes the gradient's norm NaN on all ranks. `optimizer` has this step's options for the
    rules that the engine was built with; None: the same options. `node` is the update that makes the step. Its
    attributes are `UpdateAttributes.of(request.node)`."""

    lr: float
    clip_grad: float
    sound: bool = True
    optimizer: OptimizerSpec | None = None
    node: Node | None = None


class Response(NamedTuple):
    """A response, or a part of a response.

    It exists from when an engine has drawn it until its columns are written.

    - `place`: the index of the response among all responses of the call of `generate`.
    - `logps`: log-probabilities at the sampling temperature over the whole vocabulary, before top_k, top_p and min_p.
    - `ended`: whether the response ends with these tokens.
    - `routes` [tokens, layers, k]: the experts that the routers chose for each token of the prompt and of the response,
      without the last token, which is not computed. None if the request does not ask for them."""

    place: int
    tokens: NDArray[np.int32]
    logps: NDArray[np.float32]
    ended: bool = True
    routes: NDArray[np.int16] | None = None


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

    def step(self, request: StepRequest) -> float:
        """Make an optimizer step; return the gradient's norm before clipping.

        The norm is the same on all ranks. Gradients are released. If the norm is not finite, weights and optimizer
        states do not change."""

    def fetch_states(self) -> None:
        """Start to copy the optimizer states to the device, before an update begins.

        The runtime calls this method and `release_states` only with the engine option `offload = phase`."""

    def release_states(self) -> None:
        """Copy the optimizer states to host memory until the next update begins."""

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
    generator is built, and the caller calls `release` when all groups exist.

    An engine that preempts sequences (`MemoryModel.paged`, spec.py) has the attribute `preempted`: how often it did, in
    all its calls."""

    def allocate(self) -> list[Shard]:
        """Allocate memory for the weights, which resharding then fills."""

    def filled(self) -> None:
        """Prepare to generate with new weights, which the caller wrote to the shards.

        After this call, the caller reads the shards once more, to compare them with the update's. So an engine that
        copies them may only free them at the next `generate`.

        Everything that was computed from the old weights is dropped or recomputed."""

    def release(self) -> None:
        """Release the memory of the weights and of the KV cache."""

    def generate(self, request: GenerateRequest) -> Iterator[Response]:
        """Generate the requested responses; yield each one at its end, or in parts.

        All ranks of one copy of the model yield the same responses in the same order. A response includes its end
        token. If the caller stops iterating, no more tokens are drawn."""
