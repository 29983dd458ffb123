"""Modules of transformers models by the names that msrl_graph uses.

Invariant: after `unify_names`, the body of a model has `embed_tokens`, `layers` and `norm`. A layer has `self_attn` or
another module of a mixer, and `mlp`; experts are in `mlp.experts`, their router is `mlp.gate` or `mlp.router`, and
shared experts are in `mlp`. A module that was renamed has still its old name for the forward methods of transformers,
but no parameter has a second name.
"""

from __future__ import annotations

from typing import Any

from ..model.mlps import LINEAR_OUTPUT, SHARED_MLP

BLOCK_SPARSE = "block_sparse_moe"


def unify_names(module: Any) -> None:
    """Give the modules of a causal model the names that msrl_graph uses."""
    body = module.model
    _rename(body, "embeddings", "embed_tokens")
    _rename(body, "norm_f", "norm")
    for layer in body.layers:
        if (mixer := getattr(layer, "mixer", None)) is not None:
            _rename(layer, "mixer", _find_kind(mixer))
        if (shared := getattr(layer, SHARED_MLP, None)) is not None:
            _rename(shared, LINEAR_OUTPUT, "down_proj")
            if getattr(layer, BLOCK_SPARSE, None) is None:
                _rename(layer, SHARED_MLP, "mlp")
                continue
            _rename(layer, BLOCK_SPARSE, "mlp")
            _rename(layer.mlp, "router", "gate")
            layer.mlp.shared_experts = shared
            _keep_alias(layer, SHARED_MLP)


def _find_kind(mixer: Any) -> str:
    """Return what a layer's only part is: Mamba-2, attention or an MLP."""
    return "mamba" if hasattr(mixer, "A_log") else "self_attn" if hasattr(mixer, "q_proj") else "mlp"


def _rename(owner: Any, old: str, new: str) -> None:
    if old in owner._modules:
        setattr(owner, new, getattr(owner, old))
        _keep_alias(owner, old)


def _keep_alias(owner: Any, name: str) -> None:
    """Make a module an attribute of its owner that is not registered."""
    owner.__dict__[name] = owner._modules.pop(name)
