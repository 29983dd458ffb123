"""LoRA adapters in the linear layers of a transformers model (model/lora.py).

Invariant: an adapted layer adds the product of its adapter to its output, in its forward method. Under tensor
parallelism, the matrices of an adapter are sharded as in the model's tensors, and the product as the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..model import peft_folder
from ..model.architecture import HEAD
from ..model.lora import UP, list_adapted
from ..noise import RandomStream
from ..sharding.layout import slices
from . import weight_reader
from .devices import get_local_tensor
from .kernels.keyed_dropout import InputDropout, TokenKeys
from .recurrent.parameters import read_locally

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ..model.architecture import Model
    from ..sharding.tensors import Box, Tensor
    from .engine_protocols import Shard


# The attribute of a layer with an adapter that says whether the adapter is left out.
DISABLED = "adapter_disabled"
# The attribute of a layer that has its TokenExchange.
EXCHANGE = "token_exchange"


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class TokenExchange:
    """What tp ranks do with the tokens of an adapter (sequence_parallel.py).

    - `read`: returns the input of A, for the input of the layer.
    - `send`: returns the input of B, for the product of A.
    - `select`: returns the keys of the tokens in the input of A, for the keys of all tokens.
    """

    read: Callable[[torch.Tensor], torch.Tensor] = _keep
    send: Callable[[torch.Tensor], torch.Tensor] = _keep
    select: Callable[[torch.Tensor], torch.Tensor] = _keep


def install(module: Any, model: Model, mesh: DeviceMesh | None = None) -> TokenKeys:
    """Add the adapters of a model to its linear layers.

    Returns the keys of tokens that their dropout reads; the engine sets them. The module is on the meta device. `mesh`
    has the ranks of tensor parallelism over which the layers were sharded. Adapters of experts are in the modules of
    experts (experts.py).
    """
    import torch

    tokens = TokenKeys()
    if model.lora is None:
        return tokens
    tensors = {tensor.name: tensor for tensor in model.weights}
    for weight, *names in list_adapted(model):
        if weight.experts:
            continue
        linear = module.get_submodule(weight.name.removesuffix(".weight"))
        matrices = []
        for name in names:
            owner, leaf, _ = name.rsplit(".", 2)
            part = module.get_submodule(owner)
            if not hasattr(part, leaf):  # fused projections have one A
                matrix = torch.nn.Module()
                matrix.weight = _make_parameter(tensors[name], linear.weight, mesh)
                part.add_module(leaf, matrix)
            matrices.append(getattr(part, leaf))
        setattr(linear, DISABLED, False)
        size = get_local_tensor(matrices[0].weight).shape[1]
        first = mesh.get_local_rank() * size if mesh is not None and tensors[names[0]].tp_dim == 1 else 0
        in_files = names[0].rsplit(".", 2)[0]  # projections that are one in the files have the same mask
        exchange = getattr(linear, EXCHANGE, TokenExchange())
        dropout = InputDropout(model.lora, f"{in_files}.weight", (first, first + size), tokens, exchange.select)
        linear.forward = partial(_forward, linear, matrices, linear.forward, model.lora.scale, dropout, exchange)
    return tokens


def _make_parameter(tensor: Tensor, weight: Any, mesh: DeviceMesh | None) -> torch.nn.Parameter:
    """Make a matrix of an adapter, without memory.

    It is a DTensor if tp shards it.
    """
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    matrix = torch.empty(tensor.shape, dtype=weight.dtype, device=weight.device)
    if mesh is not None and tensor.tp_dim >= 0:
        matrix = distribute_tensor(matrix, mesh, [Shard(tensor.tp_dim)])
    return torch.nn.Parameter(matrix)


def _forward(
    linear: Any,
    matrices: Sequence[Any],
    forward: Any,
    scale: float,
    dropout: InputDropout,
    exchange: TokenExchange,
    x: torch.Tensor,
) -> torch.Tensor:
    output: torch.Tensor = forward(x)
    if getattr(linear, DISABLED):
        return output
    down, up = (read_locally(matrix, "weight") for matrix in matrices)
    small = exchange.send(dropout.multiply(exchange.read(x), down)) * scale
    # In place: the sum needs no more memory than the output, and is rounded once.
    output.flatten(0, -2).addmm_(small.flatten(0, -2), up.t())
    return output


@contextmanager
def disable(module: Any, disabled: bool = True) -> Iterator[None]:
    """Context in which a model computes without its adapters, if `disabled`."""
    parts = [part for part in module.modules() if hasattr(part, DISABLED)] if disabled else []
    for part in parts:
        setattr(part, DISABLED, True)
    try:
        yield
    finally:
        for part in parts:
            setattr(part, DISABLED, False)


def fill(model: Model, shards: Sequence[Shard]) -> list[Shard]:
    """Give the adapters among shards their first values; return the other shards.

    The values are those in the adapter's folder, also of a score head that the folder has. Without a folder, B is 0, so
    the model computes what it computes without its adapter. The elements of A are drawn uniformly from -1 / sqrt(in) to
    1 / sqrt(in), as in PEFT. They depend on the seed and on the name of the matrix, not on the layout.
    """
    import torch

    if model.lora is None:
        return [*shards]
    if model.lora.folder:
        return _read_folder(model, shards)
    tensors = {tensor.name: tensor for tensor in model.tensors if tensor.role == "adapter"}
    others = []
    for shard in shards:
        if (tensor := tensors.get(shard.name)) is None:
            others.append(shard)
            continue
        with torch.no_grad():
            if tensor.name.endswith(UP):
                shard.tensor.zero_()
                continue
            for name, index, box in tensor.in_files(shard.box):
                size = tensor.shape[-2:]
                draws = RandomStream(model.lora.seed, "adapter", name).generator().uniform(-1, 1, size)
                part = shard.tensor[index] if index else shard.tensor
                part.copy_(torch.from_numpy(draws / math.sqrt(size[1]))[slices(box)])
    return others


def _read_folder(model: Model, shards: Sequence[Shard]) -> list[Shard]:
    """Copy the values in an adapter's folder into shards.

    Returns the shards that the folder has no values for.
    """
    import torch

    assert model.lora is not None
    weights = peft_folder.read_weights(model.lora.folder)
    tensors = {tensor.name: tensor for tensor in model.tensors if tensor.role == "adapter" or tensor.name == HEAD}
    if HEAD not in weights:
        tensors.pop(HEAD, None)
    wanted: dict[str, list[tuple[torch.Tensor, Box]]] = {}
    others = []
    for shard in shards:
        if (tensor := tensors.get(shard.name)) is None:
            others.append(shard)
            continue
        for name, index, box in tensor.in_files(shard.box):
            wanted.setdefault(name, []).append((shard.tensor[index] if index else shard.tensor, box))
    if missing := wanted.keys() - weights.keys():
        raise FileNotFoundError(f"{model.lora.folder} has no values for {min(missing)} ({len(missing)} missing)")
    with torch.no_grad():
        weight_reader.copy_boxes(weights, wanted)
    return others


def merge_adapter(model: Model, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add the products of a model's adapter to its weights, in place.

    `tensors` has weights and the matrices of the adapter, by name: whole tensors or a rank's shards of them. Weights
    that are not in `tensors`, or are empty, are left out. A product is computed and added in float32: in bfloat16,
    small changes would be lost twice.
    """
    import torch

    assert model.lora is not None
    with torch.no_grad():
        for weight, down, up in list_adapted(model):
            if (target := tensors.get(weight.name)) is not None and target.numel():
                product = tensors[up].float() @ tensors[down].float()
                target.copy_(target.float() + model.lora.scale * product)
