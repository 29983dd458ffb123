"""Recomputation of parts of a transformers model's layers in the backward pass.

Invariant: a recomputed part does in the backward pass what it did in the forward pass, operator by operator. So outputs
and gradients have the same bits whatever is recomputed. Between the two passes, a part keeps only its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..ir.workload import Recomputation
from ..model.layers import ExpertMlp
from . import hf_modules

if TYPE_CHECKING:
    import torch

    from ..model.architecture import Model
    from ..model.layers import Layer
    from .kernels import Kernels

# The norms inside of attention: those of heads, and those of latents.
NORMS_OF_ATTENTION = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
# The names that families give an MLP's activation function.
ACTIVATIONS = ("act_fn", "activation_fn", "activation")


def install_in_mlps(module: Any, model: Model, recomputation: Recomputation, kernels: Kernels) -> None:
    """Make MLPs of trained layers recompute their activation functions if asked.

    The forward methods of MLPs are replaced. So the call must come before all changes of them.
    """
    if "activation" in recomputation.parts:
        for number in range(model.first_trained, model.layers):
            kind = model.layer_kinds[model.kind_of_layer[number]]
            if kind.has_mlp and _name_mlp(kind) not in recomputation.parts:
                _recompute_activation(module.model.layers[number], kind, model, kernels)


def install(module: Any, model: Model, recomputation: Recomputation) -> None:
    """Make the trained layers of a transformers model recompute activations.

    The call must come after all other changes of the forward methods of parts of layers.
    """
    first = model.first_trained
    whole = recomputation.find_whole_layers(first, model.layers)
    for number in range(first, model.layers):
        layer = module.model.layers[number]
        kind = model.layer_kinds[model.kind_of_layer[number]]
        for part in [layer] if number in whole else _list_parts(layer, kind, recomputation.parts):
            part.forward = partial(checkpoint, part.forward)


def checkpoint(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a forward method so that its backward pass calls it again.

    Of tensors, only `hidden_states` may be an option.
    """
    import torch
    from torch.utils.checkpoint import checkpoint as save_inputs_only

    if not torch.is_grad_enabled():
        return forward(*args, **options)
    if "hidden_states" in options:  # as an argument it can be offloaded
        args = (options.pop("hidden_states"), *args)
    return save_inputs_only(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def _list_parts(layer: Any, kind: Layer, parts: tuple[str, ...]) -> Iterator[Any]:
    """Yield the modules of a layer that are recomputed as a whole."""
    mixer = getattr(layer, kind.mixer.module) if kind.has_mixer else None
    if "norms" in parts:
        for name in (*kind.norms.before, *kind.norms.after):
            yield getattr(layer, name)
        if "attention" not in parts:
            yield from (getattr(mixer, name) for name in NORMS_OF_ATTENTION if hasattr(mixer, name))
    if "attention" in parts and mixer is not None:
        yield mixer
    if kind.has_mlp and _name_mlp(kind) in parts:
        yield layer.mlp


def _name_mlp(kind: Layer) -> str:
    return "moe" if isinstance(kind.mlp, ExpertMlp) else "mlp"


def _recompute_activation(layer: Any, kind: Layer, model: Model, kernels: Kernels) -> None:
    """Make the MLP of a layer keep only the outputs of its projections gate and up."""
    if isinstance(kind.mlp, ExpertMlp):
        layer.mlp.experts.recomputes_activation = True
    mlp = hf_modules.get_shared_mlp(layer)
    if hasattr(mlp, "down_proj"):
        joins = any(name in model.fused for name, _ in mlp.named_children())
        mlp.forward = partial(_apply_mlp, mlp, kernels, joins)


def _apply_mlp(mlp: Any, kernels: Kernels, joins: bool, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute an MLP of transformers, with or without a gate.

    `joins`: whether its forward method reads gate and up from one tensor. The last bits of an activation depend on the
    strides of its input.
    """
    import torch

    from .kernels.modules import is_silu

    activation = next(getattr(mlp, name) for name in ACTIVATIONS if hasattr(mlp, name))

    def finish(*projected: torch.Tensor) -> torch.Tensor:
        if len(projected) == 1:
            inner = activation(*projected)
        elif kernels.swiglu is not None and is_silu(activation):
            inner = kernels.swiglu(torch.cat(projected, dim=-1))
        else:
            gate, up = torch.cat(projected, dim=-1).chunk(2, dim=-1) if joins else projected
            inner = activation(gate) * up
        output: torch.Tensor = mlp.down_proj(inner)
        return output

    names = ("gate_proj", "up_proj") if hasattr(mlp, "gate_proj") else ("up_proj",)
    output: torch.Tensor = checkpoint(finish, *(getattr(mlp, name)(hidden_states) for name in names))
    return output
