"""Context parallelism: the nodes of a micro-batch's tree (prefix_tree.py) divided over ranks that all see the same
rows.

A node's depth modulo `cp` is its rank (striped attention, arXiv:2311.09431). So ranks have about as many nodes each,
and as long a part of each row, wherever prompts end and whatever rows share, which stretches of depths would not give;
and every block of a ring is the same triangle of work. All layers but attention work on a rank's own nodes. Attention
is Ulysses' (arXiv:2309.14509), where an all-to-all gives each rank all nodes for a part of the heads, or a ring
(arXiv:2310.01889), where keys and values go from rank to rank and what the blocks give is joined by its log-sum-exp.

Invariant: figures are those of one rank, up to rounding, and the same on all ranks: what is computed of a token is
gathered before a loss sees it. Of a weight's gradient each rank has a part; the parts add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any

from . import ring_attention
from .prefix_tree import Tree
from .spec import MicroBatch, Outputs

if TYPE_CHECKING:
    import torch

    from ..sharding.layout import Layout
    from .devices import Devices


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that trees are divided over, of which this is the `rank`-th of `size`."""

    size: int = 1
    rank: int = 0
    group: Any = None
    ulysses: bool = False

    @staticmethod
    def of(layout: Layout, devices: Devices) -> ContextGroup:
        if layout.cp == 1:
            return ContextGroup()
        mesh = devices.axis("cp")
        return ContextGroup(layout.cp, mesh.get_local_rank(), mesh.get_group(), layout.cp_kind == "ulysses")

    def share(self, tree: Tree, micro_batch: MicroBatch, multiple: int = 1) -> tuple[Tree, MicroBatch]:
        """What this rank computes: its nodes, padded to a multiple and to as many as each rank has; and of the tokens
        that are asked for those that follow them."""
        import torch
        from tensordict import TensorDict

        of, (count, width) = tree.depth % self.size, tree.rows.shape
        local = torch.zeros_like(of)  # where among its rank's nodes each one is
        for rank in range(self.size):
            local[of == rank] = torch.arange(int((of == rank).sum()))
        nodes = -(-(int(local.max()) + 1) // multiple) * multiple

        def padded(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, nodes - len(x)))

        if self.size == 1:
            longer: Any = {n: padded(getattr(tree, n)) for n in ("ids", "depth", "place")}
            return replace(tree, **longer), micro_batch
        own = of == self.rank
        tokens = torch.nonzero(of[tree.before] == self.rank).flatten()
        ids = padded(tree.ids[own])
        depth = padded(tree.depth[own])
        before = local[tree.before[tokens]]
        part: ContextShard
        if self.ulysses:
            at = of * nodes + local
            place = tree.place.new_zeros(self.size * nodes).index_copy(0, at, tree.place)
            part = _Exchanged(ids, depth, at[tree.rows], place, before, tokens, len(tree.before), self)
        else:
            long = -(-width // self.size)
            rows = torch.nn.functional.pad(local[tree.rows], (0, long * self.size - width))
            rows = rows.view(count, long, self.size)[:, :, self.rank].contiguous()
            place = padded((tree.place // width * long + tree.depth // self.size)[own])
            part = _Ring(ids, depth, rows, place, before, tokens, len(tree.before), self)
        known = TensorDict({k: v[tokens] for k, v in micro_batch.items() if k in ("token", "given", "temperature")})
        return part, known

    def gathered(self, made: Outputs, tree: Tree) -> Outputs:
        """What all ranks' outputs are, in the order of the tokens."""
        if not isinstance(tree, ContextShard):
            return made
        return Outputs(*(None if x is None else _gather()(x, tree) for x in made))

    def passed_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends a tensor to the next rank; when it is called, what the one before sent is there."""
        import torch
        from torch import distributed as dist

        found, (on, back) = torch.empty_like(tensor), ((self.rank + step) % self.size for step in (1, -1))
        ends = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=on),
            dist.P2POp(dist.irecv, found, group=self.group, group_peer=back),
        ]
        works = dist.batch_isend_irecv(ends)

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            del ends[:]  # what is sent lives until then
            return found

        return wait


@dataclass(frozen=True)
class ContextShard(Tree):
    """A rank's part of a tree: of all `asked` tokens it has `tokens`, which `before` is of."""

    tokens: torch.Tensor
    asked: int
    context: ContextGroup


@dataclass(frozen=True)
class _Exchanged(ContextShard):
    """`rows` and `place` are of all nodes, rank after rank."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        import torch

        exchange = _exchange()
        size = self.context.size
        nodes = query.shape[1]
        # Each rank gets whole key-value heads, some of them several ranks.
        times = size // gcd(size, len(key))
        pair = (x.repeat_interleave(times, 0) if times > 1 else x for x in (key, value))
        by_rank = [x.view(size, -1, *x.shape[1:]) for x in (query, *pair)]
        parts = torch.split(exchange(torch.cat(by_rank, 1), self.context.group), [x.shape[1] for x in by_rank], 1)
        q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in parts)
        del parts  # what came is needed no more
        out = super().attend(q, k, v, scaling, window)
        home: torch.Tensor = exchange(out.view(size, nodes, *out.shape[1:]), self.context.group)
        return home.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Ring(ContextShard):
    """`rows` and `place` are of this rank's own nodes; those of a row have every `size`-th depth."""

    def product(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        return ring_attention.attention(q, k, v, self.context, scaling, window)


@cache
def _gather() -> Any:
    import torch
    from torch import distributed as dist

    class Gather(torch.autograd.Function):
        """Of each rank's tokens those of all. The gradient of these each rank has already: it computes the same
        loss."""

        @staticmethod
        def forward(context: Any, own: torch.Tensor, part: ContextShard) -> torch.Tensor:
            context.save_for_backward(part.tokens)
            every = own.new_zeros(part.asked, *own.shape[1:]).index_copy(0, part.tokens, own)
            dist.all_reduce(every, group=part.context.group)
            return every

        @staticmethod
        def backward(context: Any, *slopes: torch.Tensor) -> Any:
            (tokens,) = context.saved_tensors
            return slopes[0].index_select(0, tokens), None

    return Gather.apply


@cache
def _exchange() -> Any:
    import torch
    from torch import distributed as dist

    class Exchange(torch.autograd.Function):
        """Of what each rank has for each what all have for this one, [ranks, ...]."""

        @staticmethod
        def forward(context: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
            context.group = group
            found = torch.empty_like(parts, memory_format=torch.contiguous_format)
            dist.all_to_all_single(found, parts.contiguous(), group=group)
            return found

        @staticmethod
        def backward(context: Any, *slopes: torch.Tensor) -> Any:
            return _exchange()(slopes[0], context.group), None

    return Exchange.apply
