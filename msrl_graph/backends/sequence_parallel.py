"""Tensor parallelism that also shards tokens (arXiv:2205.05198, section 4.2.2).

Each tp rank has all heads' or columns' share of the linear layers, and an equal part of the tokens (the nodes of a
prefix tree) for everything between them: residual sums, norms, routers and routed experts.

- Projections that are sharded by columns read the hidden states of all tokens. The ranks gather them once for all
  projections of a mixer or MLP. For the backward pass a rank saves only its own part, and gathers the others again.
- Projections that are sharded by rows compute partial sums for all tokens. A reduce-scatter adds them up, and leaves
  each rank its own part of the tokens.
- Projections of which each rank has a copy, such as those to latents, compute a rank's own tokens. Their outputs are
  gathered.

Invariant: a weight that tp ranks have copies of has a partial sum of its gradient on each rank (`is_copied`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..model.layers import RecurrentMixer
from . import hf_modules
from .adapters import EXCHANGE, TokenExchange
from .recurrent import parameters
from .recurrent.parameters import read_locally

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..model.architecture import Model

# Linear layers of attention and feed-forward that tp shards by columns, and by rows.
COLUMNS = (
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"),
    *(f"in_proj_{part}" for part in ("qkvz", "ba", "dt", *"qkvzbaxc")),
)
ROWS = ("o_proj", "out_proj", "down_proj")
# Those that read latents, which each rank has for all tokens.
FROM_LATENTS = ("q_b_proj", "kv_b_proj")
TO_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class TokenGroup:
    """The tp ranks that share the tokens of a micro-batch, in order.

    Tensors are [..., tokens, size]; dimensions before the tokens have one element.
    """

    group: ProcessGroup

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' tokens; the backward pass adds up the ranks' gradients."""
        gathered: torch.Tensor = _exchanges().gather(own, self.group)
        return gathered

    def gather_copies(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' tokens, where each rank computes the whole gradient."""
        gathered: torch.Tensor = _exchanges().gather_copies(own, self.group)
        return gathered

    def scatter(self, partial_sums: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' partial sums; return those of this rank's tokens."""
        own: torch.Tensor = _exchanges().scatter(partial_sums, self.group)
        return own

    def take_own(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor whose first dimension is the tokens."""
        return of_tokens.chunk(self.group.size())[self.group.rank()]

    def gather_routes(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' routes, [tokens, layers, k]."""
        # Gloo supports no 16-bit integers.
        return _gather(own.int().flatten(1), self.group).view(-1, *own.shape[1:]).to(own.dtype)


class LayerInput:
    """The hidden states that a mixer or an MLP gets, of this rank's tokens.

    The projections read them here, not from their arguments: a mixer sees only the shape of all tokens' states. Its
    argument has no numbers, so a mixer that would read it has a wrong result that is seen.
    """

    def __init__(self, tokens: TokenGroup, readers: int) -> None:
        self.tokens = tokens
        self._readers = readers  # projections that read the states of all tokens
        self._own: torch.Tensor | None = None
        self._whole: torch.Tensor | None = None
        self._gradient: _InputGradient | None = None
        self._left = 0

    @property
    def own(self) -> torch.Tensor:
        assert self._own is not None
        return self._own

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward method that takes hidden states of this rank's tokens."""

        def forward_own(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
            *one, count, size = hidden_states.shape
            shape = (*one, count * self.tokens.group.size(), size)
            with self._hold(hidden_states):
                return forward(hidden_states.new_full((), float("nan")).expand(shape), *args, **options)

        return forward_own

    @contextmanager
    def _hold(self, states: torch.Tensor) -> Iterator[None]:
        self._own = states
        self._gradient = _InputGradient(self.tokens.group)
        self._left = self._readers
        try:
            yield
        finally:  # a layer that recomputes its activations leaves by an exception
            self._own = self._whole = self._gradient = None

    def multiply(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a projection of all tokens."""
        if self._whole is None:
            self._whole = self.tokens.gather(self.own)
        whole = self._whole
        self._left -= 1
        if not self._left:
            self._whole = None  # attention needs the memory
        output: torch.Tensor = _exchanges().multiply(whole, self.own.detach(), weight, bias, self._gradient)
        return output


class _InputGradient:
    """The gradient of a gathered input that several projections read.

    In the backward pass, the projections come one after the other. The first gathers the input again, and the last
    returns the sum of the input's gradients.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._readers = 0
        self._trained_readers = 0
        self._whole: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add_reader(self, is_trained: bool) -> None:
        self._readers += 1
        self._trained_readers += is_trained

    def gather_again(self, own: torch.Tensor) -> torch.Tensor:
        whole = _gather(own, self._group) if self._whole is None else self._whole
        self._trained_readers -= 1
        self._whole = whole if self._trained_readers else None
        return whole

    def add(self, slope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Add the gradient of one projection; return the sum after the last one."""
        import torch

        self._total = torch.mm(slope, weight) if self._total is None else self._total.addmm_(slope, weight)
        self._readers -= 1
        if self._readers:
            return None
        total = self._total
        self._total = None
        return total


def shard_layers(module: Any, model: Model, mesh: DeviceMesh) -> TokenGroup:
    """Shard the linear layers of a transformers model over the ranks of `mesh`.

    The module is on the meta device. `install` must follow when all other changes of the forward methods of mixers and
    MLPs are done.
    """
    tokens = TokenGroup(mesh.get_group())
    for mixer, part in hf_modules.list_mixers(module, model):
        copied = [*TO_LATENTS]
        if isinstance(mixer, RecurrentMixer):
            copied += mixer.copied
            _shard_recurrent(mixer, part, mesh)
        _shard_linears(part, tokens, mesh, copied)
        if hasattr(part, "sinks"):
            _shard_parameters(part, ["sinks"], 0, mesh)
    for part in hf_modules.list_shared_mlps(module):
        _shard_linears(part, tokens, mesh)
    embedding = module.model.embed_tokens
    _shard_parameters(embedding, ["weight"], 0, mesh)
    _shard_embedding(embedding, tokens)
    if not model.scores:  # one number per token: each rank computes it
        _shard_parameters(module.lm_head, ["weight"], 0, mesh)
    return tokens


def install(module: Any, model: Model) -> None:
    """Make mixers and MLPs of a sharded model take a rank's own tokens."""
    for part in (*(part for _, part in hf_modules.list_mixers(module, model)), *hf_modules.list_shared_mlps(module)):
        if (source := getattr(part, "layer_input", None)) is not None:
            part.forward = source.wrap(part.forward)


def _shard_recurrent(mixer: RecurrentMixer, part: Any, mesh: DeviceMesh) -> None:
    """Shard the parameters of a recurrent mixer that are not those of linear layers."""
    for name, child in part.named_children():
        if name not in mixer.copied and name.startswith("conv"):
            _shard_parameters(child, [leaf for leaf, _ in child.named_parameters()], 0, mesh)
    _shard_parameters(part, mixer.by_head, 0, mesh)
    parameters.make_local(part, mixer.by_head)
    if mixer.norm_by_head:
        norm = getattr(part, mixer.norm)
        _shard_parameters(norm, ["weight"], 0, mesh)
        parameters.make_local(norm, ["weight"])


def _shard_linears(part: Any, tokens: TokenGroup, mesh: DeviceMesh, copied: Sequence[str] = ()) -> None:
    """Shard the linear layers of a mixer or an MLP."""
    children = dict(part.named_children())
    columns = [name for name in children if name in COLUMNS and name not in copied]
    source = LayerInput(tokens, len([name for name in columns if name not in FROM_LATENTS]))
    for name in columns:
        linear = children[name]
        _shard_parameters(linear, [leaf for leaf, _ in linear.named_parameters()], 0, mesh)
        if name in FROM_LATENTS:
            linear.forward = partial(_multiply, linear)
        else:
            linear.forward = partial(_multiply_input, linear, source)
            setattr(linear, EXCHANGE, TokenExchange(lambda _: source.own, tokens.gather, tokens.take_own))
    for name in [name for name in children if name in ROWS]:
        linear = children[name]
        _shard_parameters(linear, ["weight"], 1, mesh)
        linear.forward = partial(_multiply_and_scatter, linear, tokens)
        setattr(linear, EXCHANGE, TokenExchange(send=tokens.scatter))
    to_gather = [children[name] for name in copied if name in children and hasattr(children[name], "in_features")]
    for linear in to_gather:
        setattr(linear, EXCHANGE, TokenExchange(select=tokens.take_own))
        linear.register_forward_pre_hook(lambda _module, _args: (source.own,))
        linear.register_forward_hook(lambda _module, _args, output: tokens.gather(output))
    if columns or to_gather:
        part.layer_input = source


def _shard_parameters(part: Any, names: Sequence[str], dim: int, mesh: DeviceMesh) -> None:
    """Make parameters of a module DTensors that are sharded along a dimension."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn import Parameter

    for name in names:
        setattr(part, name, Parameter(distribute_tensor(getattr(part, name), mesh, [Shard(dim)])))


def _shard_embedding(embedding: Any, tokens: TokenGroup) -> None:
    """Make an embedding look up the ids of its part of the vocabulary.

    Its output is that of this rank's tokens.
    """
    parameters.make_local(embedding, ["weight"])
    rank = tokens.group.rank()
    forward = embedding.forward
    padding = embedding.padding_idx

    def embed(ids: torch.Tensor) -> torch.Tensor:
        size = len(read_locally(embedding, "weight"))
        first = rank * size
        # The id whose vector gets no gradient.
        embedding.padding_idx = padding - first if padding is not None and 0 <= padding - first < size else None
        others = (ids < first) | (ids >= first + size)
        states: torch.Tensor = forward((ids - first).masked_fill_(others, 0))
        return tokens.scatter(states.masked_fill_(others[..., None], 0))

    embedding.forward = embed


def _multiply(linear: Any, states: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import linear as multiply

    return multiply(states, read_locally(linear, "weight"), read_locally(linear, "bias"))


def _multiply_input(linear: Any, source: LayerInput, _: torch.Tensor) -> torch.Tensor:
    return source.multiply(read_locally(linear, "weight"), read_locally(linear, "bias"))


def _multiply_and_scatter(linear: Any, tokens: TokenGroup, states: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import linear as multiply

    output = tokens.scatter(multiply(states, read_locally(linear, "weight")))
    return output if linear.bias is None else output + linear.bias


def _gather(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    from torch import distributed as dist

    whole = own.new_empty(*own.shape[:-2], own.shape[-2] * group.size(), own.shape[-1])
    dist.all_gather_into_tensor(whole.flatten(0, -2), own.flatten(0, -2).contiguous(), group=group)
    return whole


def _scatter(partial_sums: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    from torch import distributed as dist

    *one, count, size = partial_sums.shape
    own = partial_sums.new_empty(*one, count // group.size(), size)
    dist.reduce_scatter_tensor(own.flatten(0, -2), partial_sums.flatten(0, -2).contiguous(), group=group)
    return own


@dataclass(frozen=True)
class _Exchanges:
    """Differentiable functions."""

    gather: Any
    gather_copies: Any
    scatter: Any
    multiply: Any


@cache
def _exchanges() -> _Exchanges:
    import torch

    class GatherTokens(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
            ctx.group = group
            return _gather(own, group)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return _scatter(gradients[0], ctx.group), None

    class GatherTokenCopies(GatherTokens):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradients[0].chunk(ctx.group.size(), -2)[ctx.group.rank()], None

    class ScatterTokens(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, partial_sums: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
            ctx.group = group
            return _scatter(partial_sums, group)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return _gather(gradients[0], ctx.group), None

    class MultiplyTokens(torch.autograd.Function):
        """A linear layer that saves only this rank's part of its input."""

        @staticmethod
        def forward(
            ctx: Any,
            whole: torch.Tensor,
            own: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            input_gradient: _InputGradient,
        ) -> torch.Tensor:
            is_trained = ctx.needs_input_grad[2]
            ctx.save_for_backward(own if is_trained else None, weight)
            ctx.input_gradient = input_gradient
            input_gradient.add_reader(is_trained)
            output = whole.new_empty(*whole.shape[:-1], len(weight))  # no view: an adapter adds to it in place
            rows = output.flatten(0, -2)
            if bias is None:
                torch.mm(whole.flatten(0, -2), weight.t(), out=rows)
            else:
                torch.addmm(bias, whole.flatten(0, -2), weight.t(), out=rows)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            own, weight = ctx.saved_tensors
            of_whole, _, of_weight, of_bias, _ = ctx.needs_input_grad
            slope = gradients[0].flatten(0, -2)
            # The weight's gradient is first: the gathered input is then freed.
            weight_gradient = slope.t() @ ctx.input_gradient.gather_again(own).flatten(0, -2) if of_weight else None
            total = ctx.input_gradient.add(slope, weight) if of_whole else None
            input_gradient = None if total is None else total.view(*gradients[0].shape[:-1], -1)
            return input_gradient, None, weight_gradient, slope.sum(0) if of_bias else None, None

    return _Exchanges(GatherTokens.apply, GatherTokenCopies.apply, ScatterTokens.apply, MultiplyTokens.apply)
