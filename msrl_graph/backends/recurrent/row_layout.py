"""Recurrent layers over a prefix tree: rows for the scan, nodes for the rest.

A node's state is a function of the tokens of its prefix, as its attention is. So the projections of a mixer compute
node by node, and their outputs are laid out by row. Convolution and scan compute row by row, from a state of zero.
Padding needs no mask, because it is at the end of the rows. Before the last projection, one place of each node is
picked from the rows.

Invariant: the computation is the forward method of transformers. Only inputs and outputs of its projections change.
"""

from __future__ import annotations

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
    """The layout of one mixer's tensors in a forward pass.

    - `tree`, `states`: the tree of the pass and the hidden states of its nodes; None outside of a pass, and in a pass
      over padded rows.
    """

    def __init__(self, mixer: Any, output: str) -> None:
        self.tree: Tree | None = None
        self.states: torch.Tensor | None = None
        self._original = mixer.forward
        for name, child in mixer.named_children():
            if name.startswith(INPUT) and hasattr(child, "weight"):  # fused projections are hooked part by part
                # Hooks of tensor parallelism see nodes: they come after the first hook and before the last.
                child.register_forward_pre_hook(self._take_states, prepend=True)
                child.register_forward_hook(self._lay_out_rows)
        getattr(mixer, output).register_forward_pre_hook(self._pick_nodes, prepend=True)

    def forward(self, hidden_states: torch.Tensor, *args: Any, prefixes: Tree | None = None, **options: Any) -> Any:
        if prefixes is None:
            return self._original(hidden_states, *args, **options)
        self.tree = prefixes
        self.states = hidden_states
        try:
            # The method needs only the shape of its input: it reads it by the projections alone.
            shape = (*prefixes.rows.shape, hidden_states.shape[-1])
            return self._original(hidden_states.new_zeros(()).expand(shape), *args, **options)
        finally:  # a layer that recomputes its activations leaves by an exception
            self.tree = self.states = None

    def _take_states(self, _projection: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return args if self.states is None else (self.states,)

    def _lay_out_rows(self, _projection: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Copy outputs of nodes into all rows of the tree: [rows, width, size]."""
        if self.tree is None:
            return output
        rows = self.tree.rows
        return output[0].index_select(0, rows.view(-1)).view(*rows.shape, -1)

    def _pick_nodes(self, _projection: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return args if self.tree is None else (args[0].flatten(0, 1).index_select(0, self.tree.place)[None],)
