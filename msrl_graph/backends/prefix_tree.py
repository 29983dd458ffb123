"""Rows that begin alike are computed once: what the rows of a micro-batch share is a tree, and a model sees its nodes.

A token's state is a function of the tokens up to it, so each distinct beginning of a row is one node: a prompt is one
path however many responses it has, and padding is no node at all. Only attention looks at whole rows; all other layers
work node by node.

Invariant: log-probabilities and gradients are those of the padded rows, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from .kernels import torch_native

if TYPE_CHECKING:
    import numpy as np
    import torch
    from tensordict import TensorDict

    from .kernels import Attention

ATTENTION = "msrl_prefixes"


@dataclass(frozen=True)
class Tree:
    """`ids` and `depth` of each node; `rows` [distinct rows, width] the nodes of a row, padded at the right; `place`
    where in `rows`, laid end to end, a node stands; `before` the node that each response token follows. What a rank
    has of a tree whose nodes are divided is one too (context_parallel.py). `attention` computes it."""

    ids: torch.Tensor
    depth: torch.Tensor
    rows: torch.Tensor
    place: torch.Tensor
    before: torch.Tensor
    attention: Attention = field(default=torch_native.attention, kw_only=True)

    def to(self, device: torch.device) -> Self:
        import torch

        every = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}
        there: Any = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **there)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention over whole rows; takes [heads, nodes, size], gives [nodes, heads, size]. Padding comes after
        all that is asked for, so that causality alone keeps it out."""
        q, k, v = map(self._laid, (query, key, value))
        out = self.product(q, k, v, scaling, window)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.place)

    def _laid(self, x: torch.Tensor) -> torch.Tensor:
        """By row, [rows, heads, width, size]."""
        laid = x.transpose(0, 1).index_select(0, self.rows.view(-1))
        return laid.view(*self.rows.shape, *laid.shape[1:]).transpose(1, 2)

    def product(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Attention over what is laid by row."""
        return self.attention(q, k, v, scaling, window)


def tree(packed: TensorDict) -> Tree:
    import numpy as np
    import torch

    ids, offsets, row, position = (packed[name].numpy() for name in ("ids", "offsets", "row", "position"))
    # Of a row only what comes before a response token is needed; where nothing is asked for, one node keeps collectives
    # going.
    count = 0
    lengths = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(lengths, row, position + 1)
    lengths[0] = max(lengths[0], 1)
    nodes = np.zeros((len(lengths), int(lengths.max())), np.int64)
    parent = np.zeros(len(lengths), np.int64)
    tokens: list[np.ndarray] = []
    base = int(ids.max()) + 1
    for column in range(nodes.shape[1]):
        live = np.flatnonzero(lengths > column)
        distinct, which = np.unique(parent[live] * base + ids[offsets[live] + column], return_inverse=True)
        parent[live] = nodes[live, column] = count + which
        tokens.append(distinct % base)
        count += len(distinct)
    _, chosen = np.unique(parent, return_index=True)  # `parent` is now the last node of each row
    rows = nodes[chosen]
    inside = np.arange(nodes.shape[1]) < lengths[chosen, None]
    place = np.zeros(count, np.int64)
    place[rows[inside]] = np.flatnonzero(inside)
    depth = np.repeat(np.arange(len(tokens)), [len(t) for t in tokens])
    return Tree(*map(torch.from_numpy, (np.concatenate(tokens), depth, rows, place, nodes[row, position])))


def prepare(module: Any) -> None:
    """Lets a transformers model take a tree in place of rows."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    module.config._attn_implementation = ATTENTION


def states(module: Any, found: Tree) -> torch.Tensor:
    """The last hidden state of each node, [nodes, hidden], of a model that is prepared."""
    hidden: torch.Tensor = module(
        input_ids=found.ids[None], position_ids=found.depth[None], use_cache=False, prefixes=found
    ).last_hidden_state
    return hidden[0]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    prefixes: Tree,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers asks for it: takes [1, heads, nodes, size], gives [1, nodes, heads, size]. Where values have
    another size than keys, as in latent attention, the smaller are padded with zeros, which add nothing to a score:
    kernels, and what sends keys and values together, take one size."""
    import torch

    size = max(query.shape[-1], value.shape[-1])

    def padded(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))

    q, k, v = (padded(x[0]) for x in (query, key, value))
    return prefixes.attend(q, k, v, scaling, sliding_window)[None, ..., : value.shape[-1]], None
