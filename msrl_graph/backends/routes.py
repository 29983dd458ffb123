"""Routes: the experts that routers choose for tokens, recorded or replayed.

A route is replayed as in R2 and R3 (arXiv:2510.11370): the indices of the experts are given, and the router computes
the weights of these experts from its own scores. So gradients still flow to the router.

Invariant: replaying the routes that a router would choose changes no bit of the results or gradients. This file does
not know the formulas of routers: each router of transformers chooses the experts of a token by one call of `topk` over
the scores of all experts, and only the result of this call is recorded or replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..model.architecture import Model

UNKNOWN = -1  # in the place of an expert's index: the router chooses


class Routers:
    """The routers of a transformers model, in the order of the layers.

    - `given` [tokens, layers, k]: the routes that all calls replay; None: the routers choose. A layer that recomputes
      its activations calls its router again in the backward pass, so the routes are set until the next forward pass.
    - `recorded`: for each router, the routes of its last call, if `records` is set.
    """

    def __init__(self, module: Any, model: Model) -> None:
        count = len(model.expert_layers)
        self.records = False
        self.given: torch.Tensor | None = None
        self.recorded: list[torch.Tensor | None] = [None] * count
        experts = [kind.mlp for kind in model.layer_kinds]
        for index, number in enumerate(model.expert_layers):
            mlp = module.model.layers[number].mlp
            router = mlp.gate if hasattr(mlp, "gate") else mlp.router
            size: Any = experts[model.kind_of_layer[number]]
            router.forward = self._wrap(router.forward, index, size.number, size.active)

    def _wrap(self, forward: Any, index: int, number: int, active: int) -> Any:
        """Return a router's forward method that records or replays routes."""
        import torch

        def routed_forward(*args: Any, **options: Any) -> Any:
            if self.given is None and not self.records:
                return forward(*args, **options)
            given = None if self.given is None else self.given[:, index].long()
            with _choice(number, active, given) as choice:
                result = forward(*args, **options)
            if self.records:
                self.recorded[index] = choice.chosen.to(torch.int16)
            return result

        return routed_forward

    def take_recorded(self) -> torch.Tensor:
        """Return the routes of the last forward pass, [tokens, layers, k] in 16 bits."""
        import torch

        routes = torch.stack([chosen for chosen in self.recorded if chosen is not None], 1)
        self.recorded = [None] * len(self.recorded)
        return routes


def _choice(number: int, active: int, given: torch.Tensor | None) -> Any:
    """Return a context in which `topk` over `number` scores returns the given experts.

    Within the context, its attribute `chosen` is set to the chosen indices, [tokens, active].
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class _RouterChoice(TorchFunctionMode):
        chosen: torch.Tensor | None = None

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function not in (torch.topk, torch.Tensor.topk):
                return result
            scores = args[0] if args else kwargs["input"]
            values, chosen = result
            if scores.shape[-1] != number or chosen.shape[-1] != active:  # a choice of groups
                return result
            if given is not None:
                chosen = torch.where(given < 0, chosen, given)
                values = scores.gather(-1, chosen)
            self.chosen = chosen
            return torch.return_types.topk((values, chosen))

    return _RouterChoice()
