"""Recurrent layers over a prefix tree: rows for the scan, nodes for the rest.

A node's state is a function of the tokens of its prefix, as its attention is. So the projections of a mixer compute
node by node, and their outputs are laid out by row. Convolution and scan compute row by row, from a state of zero, one
block of rows after the other (row_blocks.py). Padding needs no mask, because it is at the end of the rows. Before the
last projection, one place of each node is picked from the rows.

Invariant: the computation is the forward method of transformers. Only inputs and outputs of its projections change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import hf_modules

if TYPE_CHECKING:
    import torch

    from ...model.architecture import Model
    from ..prefix_tree import Tree

INPUT = "in_proj"  # how the names of the projections of hidden states begin


def install(module: Any, model: Model, compiled: bool = False) -> None:
    """Make the recurrent layers of a transformers model accept a prefix tree.

    The call must come after tensor parallelism is applied to the model. With `compiled`, the layers will be compiled:
    a graph would have a fixed number of chunks, so the mixers compute outside of it.
    """
    import torch

    for mixer, part in hf_modules.list_recurrent(module, model):
        forward = RowLayout(part, mixer.output).forward
        part.forward = torch.compiler.disable(forward) if compiled else forward  # type: ignore[no-untyped-call]


class RowLayout:
    """The layout of one mixer's tensors.

    A mixer computes its projections of all nodes, then convolution and scan of each block of rows, and then its last
    projection of all nodes. In the forward method of transformers, which computes a block, stand-ins take the place of
    the projections.
    """

    def __init__(self, mixer: Any, output: str) -> None:
        self._mixer = mixer
        self._output = output
        self._original = mixer.forward

    def forward(self, hidden_states: torch.Tensor, *args: Any, prefixes: Tree | None = None, **options: Any) -> Any:
        import torch

        if prefixes is None:
            return self._original(hidden_states, *args, **options)
        children = self._mixer._modules
        # Fused projections are computed part by part.
        names = [name for name, child in children.items() if name.startswith(INPUT) and hasattr(child, "weight")]
        projections = {name: children[name] for name in (*names, self._output)}
        scanned: list[torch.Tensor] = []
        children.update({name: _RowProjection(projections[name], hidden_states, prefixes.rows) for name in names})
        children[self._output] = _OutputCollector(scanned)
        try:
            for rows in prefixes.rows:
                # The method needs only the shape of its input: it reads it by the projections alone.
                shape = (*rows.shape, hidden_states.shape[-1])
                self._original(hidden_states.new_zeros(()).expand(shape), *args, **options)
        finally:  # a layer that recomputes its activations leaves by an exception
            children.update(projections)
        outputs = scanned[0] if len(scanned) == 1 else torch.cat(scanned)
        scanned.clear()
        return projections[self._output](outputs.index_select(0, prefixes.place)[None])


class _RowProjection:
    """A projection's stand-in for the blocks of a tree.

    Each call returns the projection's outputs, laid out in the rows of the next block.
    """

    def __init__(self, project: Any, states: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        self._project = project
        self._states = states
        self._blocks = [*blocks]
        self._outputs: torch.Tensor | None = None

    def __call__(self, _states: torch.Tensor) -> torch.Tensor:
        outputs = self._project(self._states)[0] if self._outputs is None else self._outputs
        rows = self._blocks.pop(0)
        self._outputs = outputs if self._blocks else None
        by_row: torch.Tensor = outputs.index_select(0, rows.view(-1))
        return by_row.view(*rows.shape, -1)


class _OutputCollector:
    """The last projection's stand-in: it collects inputs [tokens, size]."""

    def __init__(self, collected: list[torch.Tensor]) -> None:
        self._collected = collected

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        self._collected.append(states.flatten(0, 1))
        return states
