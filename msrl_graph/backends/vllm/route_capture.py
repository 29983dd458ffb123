"""The routes of the tokens of a generation, captured in vLLM's routers.

vLLM returns routes only from its V2 model runner, which this engine does not use (core.py). So the routers report what
they choose in each step, and this file knows which tokens a step computes.

Invariant: each token of a running request that is in the KV cache has its route here. A request that shares cached
blocks with another one starts with a copy of the other's routes, and blocks are shared only by requests of one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from ..routes import UNKNOWN

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ...model.architecture import Model


class RouteCapture:
    """The routes of the running requests of a call of `generate`.

    - `runner`: vLLM's model runner, whose steps are observed while `active` is set.
    - `stage`: the layers of the model that this rank has. `group`: the ranks that together have all layers; None if
      this rank has all.
    """

    def __init__(self, runner: Any, model: Model, stage: Container[int], group: Any) -> None:
        self.active = False
        self._group = group
        self._runner = runner
        self._execute_model = runner.execute_model
        self._routes: dict[int, NDArray[np.int16]] = {}  # by request: [tokens, layers, k]
        layers = {number: index for index, number in enumerate(model.expert_layers)}
        self._chosen: list[torch.Tensor | None] = [None] * len(layers)
        self._active_experts = model.route_length // len(layers)
        bound = set()
        for name, module in runner.model.named_modules():
            number = re.search(r"\blayers\.(\d+)\.", name)
            router = getattr(module, "router", None)
            if number is None or router is None or not hasattr(router, "set_capture_fn"):
                continue
            if getattr(module, "is_monolithic", False):
                raise ValueError(
                    f"vLLM's kernel for the experts of `{model.name}` chooses them itself, so their routes are not "
                    "known: generate with `hf`, or leave the routing columns out"
                )
            router.set_capture_fn(self._make_callback(layers[int(number[1])]))
            bound.add(int(number[1]))
        if bound != {number for number in layers if number in stage}:
            raise ValueError(
                f"this version of vLLM does not report the routes of `{model.name}`: generate with `hf`, or leave the "
                "routing columns out"
            )
        runner.execute_model = self._execute

    def _make_callback(self, index: int) -> Any:
        def keep(chosen: torch.Tensor) -> None:
            if self.active:
                self._chosen[index] = chosen.clone()

        return keep

    def add(self, number: int, tokens: int, parent: int | None) -> None:
        """Prepare for a request of at most `tokens` tokens.

        `parent` is the request with which it shares all its tokens, if there is one.
        """
        import numpy as np

        routes = np.full((tokens, len(self._chosen), self._active_experts), UNKNOWN, np.int16)
        if parent is not None:
            known = self._routes[parent][:tokens]
            routes[: len(known)] = known
        self._routes[number] = routes

    def collect(self, ended: Sequence[tuple[int, int]]) -> list[NDArray[np.int16]]:
        """Return the routes of requests, each for a number of its first tokens.

        `ended` are pairs of a request and this number. All ranks of the group make the same calls.
        """
        import numpy as np
        import torch

        own = [self._routes[number][:tokens] for number, tokens in ended]
        if self._group is None or not own:
            return [routes.copy() for routes in own]
        # Layers of other stages are unknown here, and below all indices.
        routes = torch.from_numpy(np.concatenate(own).astype(np.int32)).to(self._runner.device)
        torch.distributed.all_reduce(routes, torch.distributed.ReduceOp.MAX, group=self._group)
        stops = np.cumsum([tokens for _, tokens in ended])[:-1]
        return np.split(routes.cpu().numpy().astype(np.int16), stops)

    def drop(self, number: int) -> None:
        """Forget a request that has ended."""
        del self._routes[number]

    def _execute(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        """Execute a step of vLLM's model runner, and keep the routes of its tokens."""
        import numpy as np
        import torch

        result = self._execute_model(scheduler_output, *arguments, **options)
        if not self.active or not scheduler_output.total_num_scheduled_tokens:
            return result
        batch = self._runner.input_batch
        names = batch.req_ids
        counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
        own = [index for index, tensor in enumerate(self._chosen) if tensor is not None]
        if not own:  # a stage without experts
            return result
        chosen = [tensor for tensor in self._chosen if tensor is not None]
        routes = torch.stack(chosen, 1).to(torch.int16).cpu().numpy()[: sum(counts)]
        starts = batch.num_computed_tokens_cpu[: len(names)].tolist()
        for name, start, part in zip(names, starts, np.split(routes, np.cumsum(counts)[:-1]), strict=True):
            self._routes[int(name)][start : start + len(part), own] = part
        return result
