"""Routes (backends/routes.py) in Megatron's routers: recorded or replayed.

Invariant: a router replays the routes of the micro-batch that its layer computes, also if the layer is recomputed after
passes of other micro-batches. So a layer's input names its routes, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .stage_recompute import add_reader

if TYPE_CHECKING:
    import torch

    from ..prefix_tree import Tree


class RouterHook:
    """What Megatron's router asks for its choice (its attribute `router_replay`).

    - `index`: the number of the router's layer among the model's layers with experts.
    - `tp`: the group that shards the tokens of a layer; None if each rank has all tokens of its tree.
    """

    def __init__(self, layer: Any, index: int, tp: Any) -> None:
        self.index = index
        self.tp = tp
        self.routes: torch.Tensor | None = None
        self.records = False
        self.recorded: torch.Tensor | None = None
        if not hasattr(layer.mlp.router, "router_replay"):
            raise ValueError("this version of Megatron-Core cannot replay routes: use 0.16, or `fsdp`")
        layer.mlp.router.router_replay = self
        add_reader(layer, self._find_routes)

    def _find_routes(self, tree: Tree) -> None:
        self.routes = tree.routes

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of each token's experts.

        The signature is Megatron's.
        """
        import torch

        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is not None:
            given = self.routes[:, self.index].long()
            if self.tp is not None:
                given = given.chunk(self.tp.size())[self.tp.rank()]
            chosen = torch.where(given < 0, chosen, given)
            values = scores.gather(1, chosen)
        if self.records:
            self.recorded = chosen.to(torch.int16)
        return values, chosen

    def take_recorded(self) -> torch.Tensor:
        """Return the routes [tokens, k] of the last pass, for all tokens of the tree."""
        import torch

        assert self.recorded is not None
        own = self.recorded
        self.recorded = None
        if self.tp is None:
            return own
        every = own.new_empty(len(own) * self.tp.size(), own.shape[1], dtype=torch.int32)
        torch.distributed.all_gather_into_tensor(every, own.int(), group=self.tp)
        return every.to(torch.int16)


def install(chunk: Any, layers: Sequence[int], expert_layers: Sequence[int], tp: Any) -> list[RouterHook]:
    """Install hooks in the routers of a chunk.

    The chunk has the layers `layers` of the model.
    """
    index = {number: i for i, number in enumerate(expert_layers)}
    numbered = zip(chunk.decoder.layers, layers, strict=True)
    return [RouterHook(layer, index[number], tp) for layer, number in numbered if number in index]
