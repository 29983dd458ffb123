"""Engines as the runtime builds and calls them, on one rank or on ranks of a mesh, without a plan."""

import ctypes
import gc
from itertools import product

import psutil
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from msrl_graph.backends import ENGINES
from msrl_graph.backends.devices import Devices, TorchDevice
from msrl_graph.backends.engine_protocols import Weights
from msrl_graph.ir.graph import Node
from msrl_graph.ir.plan import EngineChoice, Placement
from msrl_graph.sharding.layout import Layout

ALONE = Layout()
HERE = TorchDevice()


def built(name, model, layout, rank=0, mesh=None, optimizer=None, work=None, device=HERE, per_host=0, **options):
    placement = Placement("state", "devices", layout, 0, EngineChoice(name, options), "")
    return ENGINES[name].build_engine(
        Weights(model, Node("node", "worker", ""), optimizer, work), placement, Devices(device, rank, mesh, per_host)
    )


def trainer(model, layout=ALONE, rank=0, mesh=None, optimizer=None, recompute="none"):
    return built("fsdp", model, layout, rank, mesh, optimizer, recompute=recompute)


def generator(model, layout=ALONE, rank=0, mesh=None, micro_batch=0, device=HERE):
    return built("hf", model, layout, rank, mesh, device=device, micro_batch=micro_batch)


def loaded(model, folder):
    """A generator with the weights of a model's folder, on one thread."""
    torch.set_num_threads(1)
    engine = generator(model)
    weights = load_file(folder / "model.safetensors")
    for piece in engine.allocate():
        piece.tensor.copy_(weights[piece.name])
    return engine


def mesh(layout, first=0, device=HERE):
    """Of the ranks from `first` on, with the axes that the runtime's has."""
    axes = [a for a in ("pp", "dp", "cp", "tp") if a in ("dp", "tp") or getattr(layout, a) > 1]
    sizes = [getattr(layout, a) for a in axes]
    ranks = [first + layout.rank(**dict(zip(axes, at, strict=True))) for at in product(*map(range, sizes))]
    return DeviceMesh(device.kind.torch, torch.tensor(ranks).view(sizes), mesh_dim_names=tuple(axes))


def train(engine, packed, loss, asked):
    """The gradient of `loss` of what one micro-batch gives."""
    engine.train([packed], lambda made, _: loss(made), asked)


def resident_without_free():
    """Resident bytes of this process with its free memory given back: what is allocated next adds to them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss
