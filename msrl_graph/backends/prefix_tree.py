"""Prefix trees: a model computes each distinct prefix of a micro-batch only once.

A token's hidden state is a function of the tokens up to that token, and of the routes of these tokens if a micro-batch
has routes (routes.py). So the rows of a micro-batch form one tree, in
which each distinct prefix of a row is one node, and a model computes one hidden state per node. A prompt is one path of
the tree, regardless of the number of its responses. Padding has no nodes. Only attention uses whole rows; all other
layers compute node by node.

Invariant: log-probabilities and gradients equal the values that a model computes from padded rows, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from .. import noise
from .kernels import ScoreRule, torch_native

if TYPE_CHECKING:
    import numpy as np
    import torch
    from tensordict import TensorDict

    from .kernels import Attention

ATTENTION = "msrl_prefixes"
DIGEST = 0x9E3779B97F4A7C15  # an odd number, 2^64 divided by the golden ratio


@dataclass(frozen=True)
class Tree:
    """The nodes of a micro-batch's prefix tree, one per distinct prefix of a row.

    - `ids`, `depth`: each node's token id, and each node's depth: the position of the token in the row.
    - `rows` [distinct rows, width]: the nodes of each row, padded at the right.
    - `place`: for each node, an index at which the node occurs in the flattened `rows`.
    - `before`: one node for each token whose outputs the micro-batch asks for. The token's outputs are computed from
      the node's hidden state.
    - `attention`: the function that computes attention.
    - `routes` [nodes, layers, k]: the routes to replay (`MicroBatch`), if there are any.
    - `node_of_id`: for each id of the micro-batch, its node; -1 if it is not computed.
    - `keys`: 32 random bits for each node, if an adapter's dropout needs them (kernels/keyed_dropout.py).

    With context parallelism, a rank's part of a tree is also a Tree (context_parallel.py).
    """

    ids: torch.Tensor
    depth: torch.Tensor
    rows: torch.Tensor
    place: torch.Tensor
    before: torch.Tensor
    attention: Attention = field(default=torch_native.attention, kw_only=True)
    routes: torch.Tensor | None = field(default=None, kw_only=True)
    node_of_id: torch.Tensor | None = field(default=None, kw_only=True)
    keys: torch.Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> Self:
        import torch

        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        moved: Any = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention: each node attends to itself and to its ancestors.

        Inputs are [heads, nodes, size], the result is [nodes, heads, size]. Attention is computed row by row. Padding
        needs no mask, because it is at the end of the rows, and causal attention uses no later positions.
        """
        q, k, v = map(self._lay_out_rows, (query, key, value))
        out = self.product(q, k, v, rule, sinks)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.place)

    def _lay_out_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Copy the nodes' states into all rows of the tree: [rows, heads, width, size]."""
        by_row = states.transpose(0, 1).index_select(0, self.rows.view(-1))
        return by_row.view(*self.rows.shape, *by_row.shape[1:]).transpose(1, 2)

    def product(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention on tensors that are laid out by row.

        The shape of the tensors is [rows, heads, width, size].
        """
        return self.attention(q, k, v, rule, sinks)


def build_tree(packed: TensorDict, key: int | None = None) -> Tree:
    """Build the prefix tree of a micro-batch (`MicroBatch` in engine_protocols.py).

    With a `key` of random numbers, each node has random bits. They depend on the key and on the tokens of its prefix.
    """
    import numpy as np
    import torch

    ids, offsets, row, position = (packed[name].numpy() for name in ("ids", "offsets", "row", "position"))
    # Only the part of a row before its last response token is needed. If nothing is requested, the tree has one node,
    # so that the rank still joins collectives.
    count = 0
    lengths = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(lengths, row, position + 1)
    lengths[0] = max(lengths[0], 1)
    nodes = np.zeros((len(lengths), int(lengths.max())), np.int64)
    parent = np.zeros(len(lengths), np.int64)
    tokens: list[np.ndarray] = []
    routes = packed.get("routes", None)
    if routes is not None:  # a prefix with other routes is another prefix
        digests, first, route = np.unique(_digest(routes), return_index=True, return_inverse=True)
        ids = ids * len(digests) + route
    base = int(ids.max()) + 1
    columns_keys = [np.full(1, key or 0, np.uint64)]
    before = 0  # the first node of the column before
    for column in range(nodes.shape[1]):
        live = np.flatnonzero(lengths > column)
        distinct, index = np.unique(parent[live] * base + ids[offsets[live] + column], return_inverse=True)
        parent[live] = nodes[live, column] = count + index
        tokens.append(distinct % base)
        if key is not None:
            content = tokens[-1] if routes is None else tokens[-1] // len(digests)
            columns_keys.append(noise.extend(columns_keys[-1][distinct // base - before], content))
        before = count if column else 0
        count += len(distinct)
    _, chosen = np.unique(parent, return_index=True)  # `parent` is now the last node of each row
    rows = nodes[chosen]
    inside = np.arange(nodes.shape[1]) < lengths[chosen, None]
    place = np.zeros(count, np.int64)
    place[rows[inside]] = np.flatnonzero(inside)
    depth = np.repeat(np.arange(len(tokens)), [len(column_tokens) for column_tokens in tokens])
    content = np.concatenate(tokens)
    node_routes = None
    if routes is not None:
        content, index = np.divmod(content, len(digests))
        node_routes = routes[torch.from_numpy(first[index])]
    of_row = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    column_of_id = np.arange(len(of_row)) - offsets[of_row]
    is_computed = column_of_id < lengths[of_row]
    node_of_id = np.where(is_computed, nodes[of_row, np.where(is_computed, column_of_id, 0)], -1)
    parts = map(torch.from_numpy, (content, depth, rows, place, nodes[row, position]))
    keys = None
    if key is not None:
        bits = (np.concatenate(columns_keys[1:]) >> np.uint64(32)).astype(np.uint32)
        keys = torch.from_numpy(bits.view(np.int32))
    return Tree(*parts, routes=node_routes, node_of_id=torch.from_numpy(node_of_id), keys=keys)


def _digest(routes: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a 64-bit digest of the routes of each token.

    The digest is a polynomial of the indices, modulo 2^64: sorting whole routes would take longer than a forward pass.
    """
    import numpy as np

    digests = np.zeros(len(routes), np.uint64)
    for column in routes.flatten(1).numpy().T:
        digests = digests * np.uint64(DIGEST) + column.astype(np.uint64)
    return digests


def prepare(module: Any) -> None:
    """Make a transformers model accept a prefix tree instead of padded rows."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    module.config._attn_implementation = ATTENTION


def compute_states(module: Any, tree: Tree) -> torch.Tensor:
    """Return the last layer's hidden state for each node, [nodes, hidden].

    `module` is a transformers model that was changed by `prepare`.
    """
    hidden: torch.Tensor = module(
        input_ids=tree.ids[None], position_ids=tree.depth[None], use_cache=False, prefixes=tree
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over the tree `prefixes`, with the signature of transformers.

    Inputs are [1, heads, nodes, size], the result is [1, nodes, heads, size].

    In latent attention, the size of a value differs from the size of a key. The smaller tensors are then padded with
    zeros, which do not change a score. The padding is needed because attention kernels require equal sizes. Exchanges
    that send keys and values together also require equal sizes.
    """
    import torch
    from torch.distributed.tensor import DTensor

    size = max(query.shape[-1], value.shape[-1])

    def pad_size(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape[-1] == size else torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))

    q, k, v = (pad_size(tensor[0]) for tensor in (query, key, value))
    sinks = s_aux.to_local() if isinstance(s_aux, DTensor) else s_aux  # with tp, those of this rank's heads
    return prefixes.attend(q, k, v, ScoreRule(scaling, sliding_window, softcap), sinks)[
        None, ..., : value.shape[-1]
    ], None
