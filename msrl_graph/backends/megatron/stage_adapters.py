"""LoRA adapters (backends/adapters.py) in Megatron's linear layers.

A layer of Megatron may have the weights of several projections, such as q, k and v. Each of them has an adapter of its
own, whose product is added to its own columns of the layer's output.

Invariant: an adapter's product is sharded as the output that it is added to. A layer sharded by columns multiplies
its own part of the tokens by A, gathers these small products from all tp ranks, and multiplies them by its own rows of
B. A layer sharded by rows sums the small products over tp, and keeps those of its own part of the tokens. Experts add
partial products, which Megatron sums with the experts' partial results. So every matrix that tp or etp ranks have
copies of has a partial sum of its gradient on each rank (`is_copied`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...model.lora import DOWN, UP, list_adapted
from ..adapters import DISABLED
from ..kernels.keyed_dropout import InputDropout, TokenKeys
from . import weight_names
from .chunk_spec import ChunkSpec
from .stage_recompute import add_reader

if TYPE_CHECKING:
    import torch

    from ...sharding.tensors import Box
    from ..prefix_tree import Tree

Exchange = Callable[["torch.Tensor"], "torch.Tensor"]


def install(chunk: Any, spec: ChunkSpec, boxes: dict[str, Box]) -> None:
    """Add the adapters of a model to the layers of a chunk.

    Their parameters have no values yet. `boxes` has this rank's box of each weight, by name.
    """
    model = spec.model
    if model.lora is None:
        return
    adapted = {weight.name for weight, _, _ in list_adapted(model)}
    sizes = {name: [stop - start for start, stop in box] for name, box in boxes.items()}
    tokens = TokenKeys()

    def read_keys(tree: Tree) -> None:
        tokens.keys = tree.keys

    for layer, number in zip(chunk.decoder.layers, spec.layers, strict=True):
        add_reader(layer, read_keys)
        modules = dict(layer.named_modules())
        linears = [
            (modules[theirs], [f"model.layers.{number}.{own}" for own in ours], *_find_exchange(modules[theirs], spec))
            for theirs, ours in weight_names.list_names(model).items()
            if theirs in modules
        ]
        for expert in layer.mlp.experts.local_experts if number in model.expert_layers else ():
            for theirs, ours in weight_names.EXPERTS.items():
                names = [f"model.layers.{number}.mlp.experts.*.{own}" for own in ours]
                linears.append((getattr(expert, theirs), names, _keep, _keep))
        for linear, names, exchange, select in linears:
            if adapted.isdisjoint(f"{name}.weight" for name in names):
                continue
            parts = []
            start = 0
            for name in names:
                if f"{name}.weight" in adapted:
                    projection = _make_matrices([sizes[name + matrix][-2:] for matrix in (DOWN, UP)], linear.weight)
                    linear.add_module(name.rpartition(".")[2], projection)
                    inputs = boxes[name + DOWN][-1]
                    parts.append(
                        (projection, start, InputDropout(model.lora, f"{name}.weight", inputs, tokens, select))
                    )
                start += sizes[f"{name}.weight"][-2]
            setattr(linear, DISABLED, False)
            linear.forward = partial(_forward, linear, linear.forward, parts, model.lora.scale, exchange)


def list_matrices(theirs: str, ours: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of the matrices of a layer's adapters.

    Each pair has Megatron's name and this package's name.
    """
    return [(f"{theirs}.{own.rpartition('.')[2]}{matrix}", own + matrix) for own in ours for matrix in (DOWN, UP)]


def _make_matrices(sizes: Sequence[Sequence[int]], weight: torch.Tensor) -> Any:
    """Return a module with the matrices of one adapter."""
    import torch

    projection = torch.nn.Module()
    for name, size in zip((DOWN, UP), sizes, strict=True):
        matrix = torch.nn.Module()
        matrix.weight = torch.nn.Parameter(torch.empty(*size, dtype=weight.dtype, device=weight.device))
        projection.add_module(name.split(".")[1], matrix)
    return projection


def _keep(small: torch.Tensor) -> torch.Tensor:
    return small


def _find_exchange(linear: Any, spec: ChunkSpec) -> tuple[Exchange, Exchange]:
    """Return what tp ranks do with the products of A before they multiply them by B.

    The second result selects, from the keys of all tokens, those of the tokens that are the layer's input.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    tp = spec.groups.tp
    if not spec.config.sequence_parallel:
        return _keep, _keep
    if isinstance(linear, RowParallelLinear):
        return partial(mappings.reduce_scatter_to_sequence_parallel_region, group=tp), _keep

    def select(keys: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = keys.chunk(tp.size())[tp.rank()]
        return own

    if isinstance(linear, ColumnParallelLinear):
        return partial(mappings.gather_from_sequence_parallel_region, group=tp), select
    return _keep, select  # a projection to latents, which each rank has


def _forward(
    linear: Any,
    forward: Any,
    parts: Sequence[tuple[Any, int, InputDropout]],
    scale: float,
    exchange: Exchange,
    x: Any,
) -> Any:
    import torch

    result = forward(x)
    if getattr(linear, DISABLED):
        return result
    output, bias = result
    products = [dropout.multiply(x, projection.lora_A.weight) for projection, _, dropout in parts]
    small = exchange(torch.cat(products, -1) if len(products) > 1 else products[0])
    if output._is_view():  # of what another function of Megatron returned: autograd forbids changes in place
        output = output.clone()
    starts = [start for _, start, _ in parts]
    ups = [projection.lora_B.weight for projection, _, _ in parts]
    return _make_sum()(output, small, scale, starts, *ups), bias


@cache
def _make_sum() -> Any:
    """Return a differentiable function that adds products to a tensor in place.

    Each product is added to a range of the tensor's columns. Torch's own operators would copy the whole gradient of the
    tensor for each range.
    """
    import torch

    class AddProducts(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, output: torch.Tensor, small: torch.Tensor, scale: float, starts: list[int], *ups: torch.Tensor
        ) -> torch.Tensor:
            ctx.save_for_backward(small, *ups)
            ctx.scale = scale
            ctx.starts = starts
            ctx.mark_dirty(output)
            ranks = [up.shape[1] for up in ups]
            columns = output.flatten(0, -2)
            for start, up, part in zip(starts, ups, torch.split(small.flatten(0, -2), ranks, 1), strict=True):
                columns.narrow(1, start, len(up)).addmm_(part, up.t(), alpha=scale)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            small, *ups = ctx.saved_tensors
            ranks = [up.shape[1] for up in ups]
            columns = gradient.flatten(0, -2)
            own = [columns.narrow(1, start, len(up)) for start, up in zip(ctx.starts, ups, strict=True)]
            pairs = [*zip(own, ups, torch.split(small.flatten(0, -2), ranks, 1), strict=True)]
            of_ups = [(part.t() @ inner).mul_(ctx.scale) for part, _, inner in pairs]
            of_small = torch.cat([part @ up for part, up, _ in pairs], 1).mul_(ctx.scale)
            return gradient, of_small.view(small.shape), None, None, *of_ups

    return AddProducts.apply
