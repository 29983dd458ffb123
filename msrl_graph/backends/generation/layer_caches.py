"""The places of a batch in the caches of a model's layers.

A layer has keys and values, or the states of a recurrent layer. A place is an index in the batch dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def select_places(cache: Any, places: torch.Tensor) -> None:
    """Keep only the sequences at `places` in a cache of transformers, in this order.

    A sequence whose place occurs more than once is copied.
    """
    for layer in cache.layers:
        if _is_recurrent(layer):
            for states in (layer.conv_states, layer.recurrent_states):
                for index, state in states.items():
                    if state is not None:
                        states[index] = state.index_select(0, places)
        else:
            layer.batch_select_indices(places)


def join_places(mine: Any, new: Any, tokens: int, width: int) -> None:
    """Append the sequences of one cache to those of another, and empty it.

    Only the last `tokens` tokens of `mine` are kept. The sequences get `width` tokens. States have no tokens.
    """
    import torch

    for layer, new_layer in zip(mine.layers, new.layers, strict=True):
        # The new layer is emptied at once, so that the whole cache is never held twice.
        if _is_recurrent(layer):
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name)
                new_states = getattr(new_layer, name)
                for index, state in states.items():
                    if state is not None:
                        states[index] = torch.cat([state, new_states[index]])
                        new_states[index] = None
            continue
        if layer.keys is None:  # a layer of only an MLP
            continue
        # A layer with a window may have fewer tokens than the mask: the last ones.
        layer.keys = stack_padded(layer.keys[:, :, -tokens:], new_layer.keys, 2)
        layer.values = stack_padded(layer.values[:, :, -tokens:], new_layer.values, 2)
        new_layer.keys = new_layer.values = None
        if layer.is_sliding:
            layer.cumulative_length = width


def stack_padded(mine: torch.Tensor, new: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate two batches along the first dimension.

    If the batches differ in the size of dimension `dim`, the smaller batch is padded with zeros at the beginning of
    `dim`.
    """
    import torch

    width = max(mine.shape[dim], new.shape[dim])

    def pad(tensor: torch.Tensor) -> list[torch.Tensor]:
        shape = list(tensor.shape)
        shape[dim] = width - shape[dim]
        return [torch.cat([tensor.new_zeros(shape), tensor], dim)] if shape[dim] else [tensor]

    return torch.cat(pad(mine) + pad(new))


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")
