"""Recomputation of parts of Megatron's layers in the backward pass.

Whole layers are recomputed by Megatron itself (layer_config.py). Its own recomputation of parts differs: of attention,
it recomputes only the core.

Invariant: a recomputed part computes the micro-batch of its forward pass, also after passes of other micro-batches. So
whatever reads the tree of a layer's micro-batch reads it again before the part is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ...model.layers import ExpertMlp
from ..recompute import checkpoint

if TYPE_CHECKING:
    from ...model.layers import Layer
    from ..prefix_tree import Tree
    from .chunk_spec import ChunkSpec

# The norms inside of attention.
NORMS_OF_ATTENTION = ("q_layernorm", "k_layernorm", "kv_layernorm")


def add_reader(layer: Any, read: Callable[[Tree], None]) -> None:
    """Make a layer call `read` with the tree of its micro-batch.

    The layer may be recomputed after passes of other micro-batches.
    """
    if not hasattr(layer, "tree_readers"):
        layer.tree_readers = []
        layer.register_forward_pre_hook(_read_tree, with_kwargs=True)
    layer.tree_readers.append(read)


def _read_tree(layer: Any, _args: Any, options: dict[str, Any]) -> None:
    for read in layer.tree_readers:
        read(options["packed_seq_params"].tree)


def install(chunk: Any, spec: ChunkSpec, parts: tuple[str, ...]) -> None:
    """Make the trained layers of a chunk recompute `parts`.

    The call must come after all other changes of the forward methods of parts of layers.
    """
    model = spec.model
    for layer, number in zip(chunk.decoder.layers, spec.layers, strict=True):
        if number < model.first_trained or not parts:
            continue
        add_reader(layer, partial(setattr, layer, "tree"))
        for part in _list_parts(layer, model.layer_kinds[model.kind_of_layer[number]], parts):
            part.forward = partial(_recompute, layer, part.forward)


def _list_parts(layer: Any, kind: Layer, parts: tuple[str, ...]) -> Iterator[Any]:
    """Yield the modules of a layer that are recomputed."""
    attention = layer.self_attention
    if "norms" in parts:
        yield from (layer.input_layernorm, layer.pre_mlp_layernorm)
        if "attention" not in parts:
            norms = (getattr(attention, name, None) for name in NORMS_OF_ATTENTION)
            yield from (norm for norm in norms if norm is not None and hasattr(norm, "weight"))
    if "attention" in parts:
        yield attention
    if ("moe" if isinstance(kind.mlp, ExpertMlp) else "mlp") in parts:
        yield layer.mlp


def drop_router_weights(experts: Any, *_: Any) -> None:
    """Release the weights that a router computed for the tokens.

    Megatron's token dispatcher would keep these weights until the layer's next pass. The autograd graph of the weights
    would keep a recomputed layer's input, and the input's gradient, for the same time.
    """
    experts.token_dispatcher.probs = None


def _recompute(layer: Any, forward: Any, *args: Any, **options: Any) -> Any:
    tree = layer.tree

    def read_and_compute(*args: Any, **options: Any) -> Any:
        for read in layer.tree_readers:
            read(tree)
        try:
            return forward(*args, **options)
        finally:  # a second pass leaves by an exception, and calls no hooks
            if hasattr(layer.mlp, "token_dispatcher"):
                drop_router_weights(layer.mlp)

    return checkpoint(read_and_compute, *args, **options)
