"""Prefix trees: a model computes each distinct prefix of a micro-batch only once.

A token's hidden state is a function of the tokens up to that token, and of the routes of these tokens if a micro-batch
has routes (routes.py). So the rows of a micro-batch form one tree, in which each distinct prefix of a row is one node,
and a model computes one hidden state per node. A prompt is one path of the tree, regardless of the number of its
responses. Padding has no nodes. Only attention (and the scan of recurrent layers) uses whole rows; all other layers
compute node by node.

Invariant: log-probabilities and gradients equal the values that a model computes from padded rows, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from .. import noise
from .kernels import ScoreRule, torch_native
from .row_blocks import divide_rows

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from tensordict import TensorDict

    from .kernels import Attention, Kernels, PackedAttention

ATTENTION = "msrl_prefixes"
UNCOMPILED = "msrl_prefixes_uncompiled"
DIGEST = 0x9E3779B97F4A7C15  # an odd number, 2^64 divided by the golden ratio
TOKENS_AT_ONCE = 1024  # of which digests are computed, so that temporary arrays stay in a core's cache


@dataclass(frozen=True)
class PackedRows:
    """The rows of a tree without padding, one after the other.

    - `nodes`: the nodes of all rows.
    - `place`: for each node of the tree, an index at which it occurs in `nodes`.
    - `begins` (int32): the index of each row's first node, and after these the number of nodes of all rows.
    - `ends`: the index after each row's last node, on the host.
    - `longest`: the number of nodes of the longest row.
    """

    nodes: torch.Tensor
    place: torch.Tensor
    begins: torch.Tensor
    ends: tuple[int, ...]
    longest: int

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedRows:
        tensors = {name: getattr(self, name) for name in ("nodes", "place", "begins")}
        moved: Any = {name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class Tree:
    """The nodes of a micro-batch's prefix tree, one per distinct prefix of a row.

    - `ids`, `depth`: each node's token id, and each node's depth: the position of the token in the row.
    - `rows`: the nodes of each row, in blocks [rows, width] that are padded at the right (row_blocks.py). A row that
      begins another row is not among them.
    - `place`: for each node, an index at which the node occurs in the flattened blocks, one block after the other.
    - `before`: one node for each token whose outputs the micro-batch asks for. The token's outputs are computed from
      the node's hidden state.
    - `packed`: the rows without padding, for `packed_attention`.
    - `attention`: the function that computes attention of a block.
    - `packed_attention`: the device's attention of rows without padding, if it has one.
    - `routes` [nodes, layers, k]: the routes to replay (`MicroBatch`), if there are any.
    - `node_of_id`: for each id of the micro-batch, its node; -1 if it is not computed.
    - `keys`: 32 random bits for each node, if an adapter's dropout needs them (kernels/keyed_dropout.py).

    With context parallelism, a rank's part of a tree is also a Tree (context_parallel.py).
    """

    ids: torch.Tensor
    depth: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    place: torch.Tensor
    before: torch.Tensor
    packed: PackedRows | None = field(default=None, kw_only=True)
    attention: Attention = field(default=torch_native.attention, kw_only=True)
    packed_attention: PackedAttention | None = field(default=None, kw_only=True)
    routes: torch.Tensor | None = field(default=None, kw_only=True)
    node_of_id: torch.Tensor | None = field(default=None, kw_only=True)
    keys: torch.Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> Self:
        import torch

        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor | PackedRows)}
        moved: Any = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        moved["rows"] = tuple(block.to(device, non_blocking=True) for block in self.rows)
        return replace(self, **moved)

    def with_kernels(self, kernels: Kernels) -> Self:
        """Return the tree with a device's functions for attention.

        The result has only the rows that these functions need.
        """
        packed = None if kernels.packed_attention is None else self.packed
        return replace(
            self, packed=packed, attention=kernels.attention, packed_attention=kernels.packed_attention, node_of_id=None
        )

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
        import torch

        by_node = [states.transpose(0, 1) for states in (query, key, value)]
        packed = self.packed
        if packed is not None and self.packed_attention is not None:
            compute = self.packed_attention(by_node[0], packed, rule, sinks)
            if compute is not None:
                q, k, v = (states.index_select(0, packed.nodes) for states in by_node)
                return compute(q, k, v).index_select(0, packed.place)
        outs = []
        for rows in self.rows:
            q, k, v = (_lay_out(states, rows) for states in by_node)
            outs.append(self.product(q, k, v, rule, sinks).transpose(1, 2).flatten(0, 1))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).index_select(0, self.place)

    def product(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention on tensors of a block, which are laid out by row.

        The shape of the tensors is [rows, heads, width, size].
        """
        return self.attention(q, k, v, rule, sinks)


def _lay_out(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy the nodes' states [nodes, heads, size] into the rows of a block.

    The result is [rows, heads, width, size].
    """
    by_row = states.index_select(0, rows.view(-1))
    return by_row.view(*rows.shape, *by_row.shape[1:]).transpose(1, 2)


def build_tree(packed: TensorDict, key: int | None = None) -> Tree:
    """Build the prefix tree of a micro-batch (`MicroBatch` in engine_protocols.py).

    With a `key` of random numbers, each node has random bits. They depend on the key and on the tokens of its prefix.
    Nodes are sorted by depth, and nodes of the same depth by their prefixes.
    """
    import numpy as np
    import torch

    ids, offsets, row, position = (packed[name].numpy() for name in ("ids", "offsets", "row", "position"))
    routes = packed.get("routes", None)
    # Only the part of a row before its last response token is needed. If nothing is requested, the tree has one node,
    # so that the rank still joins collectives.
    needed = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(needed, row, position + 1)
    needed[0] = max(needed[0], 1)
    found = _sort_rows(ids if routes is None else _with_routes(ids, routes), offsets[:-1], needed)
    # Of each depth, the sorted rows' tokens: where a row's prefix differs from that of the row before, a node begins.
    by_depth = np.argsort(found.depth.astype(np.uint16) if needed.max() < 1 << 16 else found.depth, kind="stable")
    begins_node = (found.depth >= np.repeat(found.shared, found.lengths))[by_depth]
    nodes = np.empty(len(by_depth), np.int64)
    nodes[by_depth] = np.cumsum(begins_node) - 1
    first = by_depth[begins_node]
    source = found.source[first]
    row_begin = np.zeros(len(needed), np.int64)
    row_begin[found.order] = found.begins
    node_of_id = np.full(len(ids), -1)
    node_of_id[found.source] = nodes
    keys = None
    if key is not None:
        bits = noise.prefix_keys(key, ids[found.source], found.lengths)[first]
        keys = torch.from_numpy((bits >> np.uint64(32)).astype(np.uint32).view(np.int32))
    rows, place, packed_rows = _lay_out_rows(found, nodes, len(first))
    return Tree(
        torch.from_numpy(ids[source]),
        torch.from_numpy(found.depth[first]),
        rows,
        place,
        torch.from_numpy(nodes[row_begin[row] + position]),
        packed=packed_rows,
        routes=None if routes is None else torch.from_numpy(routes.numpy()[source]),
        node_of_id=torch.from_numpy(node_of_id),
        keys=keys,
    )


class _SortedRows(NamedTuple):
    """The needed parts of rows that have any, in lexicographic order.

    - `order`, `lengths`: the index of each row in the micro-batch, and its tokens.
    - `shared`: the number of tokens with which a row begins like the row before.
    - `begins`: the index of each row's first token, of the tokens of all rows, one row after the other.
    - `depth`, `source`: of these tokens, their positions in their rows and their indices in the micro-batch's ids.
    """

    order: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    begins: NDArray[np.int64]
    depth: NDArray[np.int64]
    source: NDArray[np.int64]


def _sort_rows(ids: NDArray[np.int64], offsets: NDArray[np.int64], needed: NDArray[np.int64]) -> _SortedRows:
    """Sort the first `needed` tokens of each row."""
    import numpy as np

    # Bytes compare as integers do if the highest come first.
    kind = np.dtype(">u4" if ids.max() < 1 << 32 else ">u8")
    text = ids.astype(kind).tobytes()
    spans = zip((offsets * kind.itemsize).tolist(), ((offsets + needed) * kind.itemsize).tolist(), strict=True)
    texts = [text[start:stop] for start, stop in spans]
    order = np.array(sorted(np.flatnonzero(needed).tolist(), key=texts.__getitem__), np.int64)
    lengths = needed[order]
    begins = np.cumsum(lengths) - lengths
    depth = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    source = depth + np.repeat(offsets[order], lengths)
    tokens = ids[source]
    # Each token is compared with that at the same depth of the row before, if there is one.
    length_before = np.append(0, lengths[:-1])
    is_shared = depth < np.repeat(length_before, lengths)
    compared = np.flatnonzero(is_shared)
    is_shared[compared] = (
        tokens[compared] == tokens[(np.arange(len(depth)) - np.repeat(length_before, lengths))[compared]]
    )
    shared = np.minimum.reduceat(np.where(is_shared, len(depth), depth), begins)
    return _SortedRows(order, lengths, np.minimum(shared, lengths), begins, depth, source)


def _lay_out_rows(
    found: _SortedRows, nodes: NDArray[np.int64], count: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, PackedRows]:
    """Lay out the rows by length, in blocks and without padding.

    `nodes` are those of the sorted rows' tokens. The result is a tree's `rows`, `place` and `packed`. The tree has
    `count` nodes.
    """
    import numpy as np
    import torch

    chosen = np.flatnonzero(np.append(found.shared[1:] < found.lengths[:-1], True))
    chosen = chosen[np.argsort(found.lengths[chosen], kind="stable")]
    lengths = found.lengths[chosen]
    ends = np.cumsum(lengths)
    begins = ends - lengths
    by_row = nodes[np.arange(ends[-1]) + np.repeat(found.begins[chosen] - begins, lengths)]
    blocks: list[torch.Tensor] = []
    positions: list[NDArray[np.int64]] = []
    before = 0  # tokens of the blocks before
    for part in divide_rows(lengths):
        width = lengths[part.stop - 1]
        inside = np.arange(width) < lengths[part, None]
        block = np.zeros(inside.shape, np.int64)
        block[inside] = by_row[begins[part.start] : ends[part.stop - 1]]
        blocks.append(torch.from_numpy(block))
        positions.append(before + np.flatnonzero(inside))
        before += block.size
    places = np.empty((2, count), np.int64)
    places[0, by_row] = np.concatenate(positions)
    places[1, by_row] = np.arange(len(by_row))
    place, packed_place = torch.from_numpy(places)
    all_begins = torch.from_numpy(np.append(begins, ends[-1]).astype(np.int32))
    packed = PackedRows(torch.from_numpy(by_row), packed_place, all_begins, tuple(ends.tolist()), int(lengths[-1]))
    return tuple(blocks), place, packed


def _with_routes(ids: NDArray[np.int64], routes: torch.Tensor) -> NDArray[np.int64]:
    """Return integers that are equal for tokens with equal ids and routes.

    A prefix with other routes is another prefix. Routes are compared by digests of 64 bits: sorting whole routes would
    take longer than a forward pass. Routes with equal digests are then compared with each other.
    """
    import numpy as np

    content = np.ascontiguousarray(routes.flatten(1).numpy()).view(np.uint8)
    if content.shape[1] % 8:
        content = np.pad(content, ((0, 0), (0, -content.shape[1] % 8)))
    words = content.view(np.uint64)
    factors = np.uint64(DIGEST) ** np.arange(1, 2 * words.shape[1] + 1, dtype=np.uint64)
    digests = np.empty(len(words), np.uint64)
    for start in range(0, len(words), TOKENS_AT_ONCE):
        part = words[start : start + TOKENS_AT_ONCE]
        # The product of a word loses its high bits, so that its high half needs another factor.
        digests[start : start + TOKENS_AT_ONCE] = part @ factors[::2] + (part >> np.uint64(32)) @ factors[1::2]
    _, first, index = np.unique(digests, return_index=True, return_inverse=True)
    equal = np.flatnonzero(first[index] != np.arange(len(index)))
    if not np.array_equal(words[equal], words[first[index[equal]]]):
        _, first, index = np.unique(words, axis=0, return_index=True, return_inverse=True)
    return ids * len(first) + index


def prepare(module: Any, compiled: bool = False) -> None:
    """Make a transformers model accept a prefix tree instead of padded rows.

    With `compiled`, the layers will be compiled: a graph would have a fixed number of blocks, so attention is computed
    outside of it.
    """
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    if compiled:
        AttentionInterface.register(UNCOMPILED, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    module.config._attn_implementation = UNCOMPILED if compiled else ATTENTION


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
