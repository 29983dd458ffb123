"""Context parallelism: the distinct prefixes of a micro-batch, sharded over ranks.

prefix_tree.py builds a tree of them: each distinct prefix of a row is one node. All ranks of the context-parallel
group get the same rows. A node belongs to the rank whose index is the node's depth modulo `cp` (striped attention,
arXiv:2311.09431). So all ranks have about the same number of nodes and an equally long part of each row, regardless of
where prompts end and which prefixes the rows share. Contiguous ranges of depths would not balance the ranks. With ring
attention, each rank computes attention scores of its own queries with the keys of every rank. Striped nodes make each
of these score matrices a triangle, so all pairs of ranks have about the same amount of work.

All layers except attention work on a rank's own nodes. Attention is one of two kinds:

- Ulysses (arXiv:2309.14509): an all-to-all sends each rank the queries, keys and values of all nodes, for the rank's
  share of the heads.
- Ring (arXiv:2310.01889): keys and values are passed from rank to rank. A rank computes one attention result for the
  keys and values of each rank, and merges these results by the log-sum-exp of the scores.

A requested token is a token whose outputs (for example its log-probability) the micro-batch asks for.

Invariant: results equal the results of a computation on one rank, up to rounding. All ranks have the same results,
because the outputs of all requested tokens are gathered before the loss is computed. Each rank computes a part of a
weight's gradient; the sum of the parts is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any

from . import ring_attention
from .engine_protocols import MicroBatch, Outputs
from .prefix_tree import Tree
from .routes import UNKNOWN

if TYPE_CHECKING:
    import torch

    from ..sharding.layout import Layout
    from .devices import Devices
    from .kernels import ScoreRule


@dataclass(frozen=True)
class ContextGroup:
    """The `size` ranks that shard a micro-batch's tree; this rank is the `rank`-th.

    If `ulysses` is true, attention is Ulysses attention, otherwise ring attention.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    ulysses: bool = False

    @staticmethod
    def from_layout(layout: Layout, devices: Devices) -> ContextGroup:
        if layout.cp == 1:
            return ContextGroup()
        mesh = devices.axis("cp")
        return ContextGroup(layout.cp, mesh.get_local_rank(), mesh.get_group(), layout.cp_kind == "ulysses")

    def share(self, tree: Tree, micro_batch: MicroBatch, multiple: int = 1) -> tuple[Tree, MicroBatch]:
        """Return this rank's part of a tree and of the tree's micro-batch.

        All ranks get the same number of nodes: the nodes are padded to a multiple of `multiple`. A requested token is a
        token whose outputs the micro-batch asks for. The returned micro-batch has only the requested tokens of this
        rank. A token's outputs are computed from the hidden state of one node (`Tree.before`). The rank that has this
        node gets the requested token.
        """
        import torch
        from tensordict import TensorDict

        owner = tree.depth % self.size
        local = torch.zeros_like(owner)  # index of each node among its rank's nodes
        for rank in range(self.size):
            local[owner == rank] = torch.arange(int((owner == rank).sum()))
        nodes = -(-(int(local.max()) + 1) // multiple) * multiple

        def pad_nodes(tensor: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, nodes - len(tensor)))

        def pad_routes(routes: torch.Tensor | None) -> torch.Tensor | None:
            return None if routes is None else torch.cat([routes, routes[:1].expand(nodes - len(routes), -1, -1)])

        packed = tree.packed
        if self.size == 1:
            longer: Any = {name: pad_nodes(getattr(tree, name)) for name in ("ids", "depth", "place")}
            longer["keys"] = None if tree.keys is None else pad_nodes(tree.keys)
            longer["routes"] = pad_routes(tree.routes)
            longer["packed"] = None if packed is None else replace(packed, place=pad_nodes(packed.place))
            return replace(tree, **longer), micro_batch
        own = owner == self.rank
        tokens = torch.nonzero(owner[tree.before] == self.rank).flatten()
        ids = pad_nodes(tree.ids[own])
        depth = pad_nodes(tree.depth[own])
        before = local[tree.before[tokens]]
        part: ContextShard
        if self.ulysses:
            position = owner * nodes + local

            def exchange_place(place: torch.Tensor) -> torch.Tensor:
                return place.new_zeros(self.size * nodes).index_copy(0, position, place)

            rows = tuple(position[block] for block in tree.rows)
            part = _Exchanged(ids, depth, rows, exchange_place(tree.place), before, tokens, len(tree.before), self)
            if packed is not None:
                own_packed = replace(packed, nodes=position[packed.nodes], place=exchange_place(packed.place))
                part = replace(part, packed=own_packed)
        else:
            rows, place = self._share_rows(tree, local)
            part = _Ring(ids, depth, rows, pad_nodes(place[own]), before, tokens, len(tree.before), self)
        if tree.routes is not None:
            part = replace(part, routes=pad_routes(tree.routes[own]))
        if tree.keys is not None:
            part = replace(part, keys=pad_nodes(tree.keys[own]))
        known = TensorDict(
            {
                column: values[tokens]
                for column, values in micro_batch.items()
                if column in ("token", "given", "temperature")
            }
        )
        return part, known

    def _share_rows(self, tree: Tree, local: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return this rank's part of each block of rows, and a place for each node.

        The place of a node is that in the parts of the node's rank. `local` is the index of each node among the nodes
        of its rank.
        """
        import torch

        parts = []
        place = torch.empty_like(tree.place)
        begin = own_begin = 0  # of the block, in the places of all blocks and of this rank's parts
        for block in tree.rows:
            count, width = block.shape
            own_width = -(-width // self.size)
            padded = torch.nn.functional.pad(local[block], (0, own_width * self.size - width))
            parts.append(padded.view(count, own_width, self.size)[:, :, self.rank].contiguous())
            inside = (tree.place >= begin) & (tree.place < begin + block.numel())
            row = (tree.place[inside] - begin) // width
            place[inside] = own_begin + row * own_width + tree.depth[inside] // self.size
            begin += block.numel()
            own_begin += parts[-1].numel()
        return tuple(parts), place

    def gather_outputs(self, outputs: Outputs, tree: Tree) -> Outputs:
        """Gather the outputs of all ranks, in the order of the requested tokens.

        Requested tokens are the tokens for which the micro-batch asks for outputs. `tree` is this rank's part of the
        tree.
        """
        if not isinstance(tree, ContextShard):
            return outputs
        return Outputs(*(None if tensor is None else _gather()(tensor, tree) for tensor in outputs))

    def gather_routes(self, routes: torch.Tensor, tree: Tree) -> torch.Tensor:
        """Return the routes of all ids of a micro-batch.

        `routes` are those of this rank's nodes. `tree` is the whole tree. Ids that are not computed have negative
        routes.
        """
        import torch

        node_of_id = tree.node_of_id
        assert node_of_id is not None
        owned = torch.nonzero(tree.depth % self.size == self.rank).flatten().to(routes.device)
        # All-reduces of gloo support no 16-bit integers.
        by_node = torch.zeros(len(tree.ids), *routes.shape[1:], dtype=torch.int32, device=routes.device)
        by_node[owned] = routes[: len(owned)].int()
        if self.size > 1:
            torch.distributed.all_reduce(by_node, group=self.group)
        computed = (node_of_id >= 0).to(routes.device)[:, None, None]
        return by_node[node_of_id.clamp(min=0).to(routes.device)].where(computed, UNKNOWN).to(routes.dtype)

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a tensor to the ring's next rank, and start to receive a tensor.

        Return a function that waits for the previous rank's tensor and returns that tensor.
        """
        import torch
        from torch import distributed as dist

        received = torch.empty_like(tensor)
        next_rank, previous_rank = ((self.rank + step) % self.size for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=next_rank),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous_rank),
        ]
        requests = dist.batch_isend_irecv(operations)

        def wait() -> torch.Tensor:
            for request in requests:
                request.wait()
            del operations[:]  # the sent tensor must live until here
            return received

        return wait


@dataclass(frozen=True)
class ContextShard(Tree):
    """A rank's part of a tree.

    - `asked`: the number of tokens whose outputs the whole micro-batch asks for.
    - `tokens`: the indices, among the `asked` tokens, of the tokens whose outputs this rank computes.
    - `before`: one node for each token of `tokens`. The token's outputs are computed from the node's hidden state.
    """

    tokens: torch.Tensor
    asked: int
    context: ContextGroup


@dataclass(frozen=True)
class _Exchanged(ContextShard):
    """A rank's part of a tree, for Ulysses attention.

    `rows`, `place` and `packed` (see `Tree`) refer to the nodes of all ranks, concatenated in the order of the ranks.
    """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        import torch

        exchange = _exchange()
        size = self.context.size
        nodes = query.shape[1]
        # Each rank gets whole key-value heads, some of which several ranks need.
        repeats = size // gcd(size, len(key))
        pair = (tensor.repeat_interleave(repeats, 0) if repeats > 1 else tensor for tensor in (key, value))
        by_rank = [tensor.view(size, -1, *tensor.shape[1:]) for tensor in (query, *pair)]
        parts = torch.split(
            exchange(torch.cat(by_rank, 1), self.context.group), [tensor.shape[1] for tensor in by_rank], 1
        )
        q, k, v = (tensor.transpose(0, 1).flatten(1, 2) for tensor in parts)
        del parts  # frees the received tensors
        if sinks is not None:
            sinks = sinks.view(size, -1)[self.context.rank]
        out = super().attend(q, k, v, rule, sinks)
        result: torch.Tensor = exchange(out.view(size, nodes, *out.shape[1:]), self.context.group)
        return result.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Ring(ContextShard):
    """A rank's part of a tree, for ring attention.

    `rows` and `place` (see `Tree`) refer only to this rank's own nodes. So `rows` has only every n-th node of each row,
    where n is the number of ranks. All ranks have as many blocks, of the same shapes. There are no packed rows.
    """

    def product(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: ScoreRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return ring_attention.attention(q, k, v, self.context, rule, sinks)


@cache
def _gather() -> Any:
    import torch
    from torch import distributed as dist

    class Gather(torch.autograd.Function):
        """An all-reduce that assembles the outputs of all tokens from the ranks' outputs.

        The backward pass needs no communication: each rank already has the gradient for all tokens, because each rank
        computes the same loss.
        """

        @staticmethod
        def forward(context: Any, own: torch.Tensor, part: ContextShard) -> torch.Tensor:
            context.save_for_backward(part.tokens)
            all_outputs = own.new_zeros(part.asked, *own.shape[1:]).index_copy(0, part.tokens, own)
            dist.all_reduce(all_outputs, group=part.context.group)
            return all_outputs

        @staticmethod
        def backward(context: Any, *grad_outputs: torch.Tensor) -> Any:
            (tokens,) = context.saved_tensors
            return grad_outputs[0].index_select(0, tokens), None

    return Gather.apply


@cache
def _exchange() -> Any:
    import torch
    from torch import distributed as dist

    class Exchange(torch.autograd.Function):
        """An all-to-all of a tensor [ranks, ...]: the i-th slice is sent to the i-th rank."""

        @staticmethod
        def forward(context: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
            context.group = group
            received = torch.empty_like(parts, memory_format=torch.contiguous_format)
            dist.all_to_all_single(received, parts.contiguous(), group=group)
            return received

        @staticmethod
        def backward(context: Any, *grad_outputs: torch.Tensor) -> Any:
            return _exchange()(grad_outputs[0], context.group), None

    return Exchange.apply
