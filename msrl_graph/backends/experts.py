"""A layer's experts on a rank, as a module that takes the place of transformers' own.

Invariant: a token's result is the sum over the experts that its router chose, whichever rank has them: with expert
parallelism tokens go to the ranks of their experts and their results come back, by all-to-all. Ranks that have the same
tokens (tensor parallelism) each send a part of them, so that none is computed twice. A rank whose tokens choose no
expert of another takes part all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernels.modules import is_silu

if TYPE_CHECKING:
    import torch

    from ..model.architecture import Model
    from ..sharding.layout import Layout
    from .devices import Devices
    from .kernels import Kernels


def install(module: Any, model: Model, layout: Layout, devices: Devices, kernels: Kernels) -> None:
    """Puts this rank's part of the experts into a transformers model on the meta device: those of its place on `ep`,
    each whole. Of a layout with neither tp nor ep each rank computes them for itself."""
    tp = devices.axis("tp").get_group() if layout.tp > 1 else None
    ep = devices.among(layout, "pp", "etp", "edp") if layout.ep > 1 else None
    if model.experts is not None:
        for layer in module.model.layers[model.experts.first :]:
            layer.mlp.experts = module_of(layer.mlp.experts, model.experts.number // layout.ep, kernels, tp, ep)


def module_of(theirs: Any, number: int, kernels: Kernels, tp: Any = None, ep: Any = None) -> Any:
    """The module of `number` experts of a layer, with the sizes and the activation of `theirs`; `tp` are the ranks that
    have the same tokens, `ep` those that have the other experts."""
    import torch
    from torch.distributed import _functional_collectives as collectives

    width = theirs.intermediate_dim
    hidden = theirs.hidden_dim
    activation = theirs.act_fn
    like = theirs.down_proj
    swiglu = kernels.swiglu if is_silu(activation) else None
    part_of, whole_of = _exchanges()

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, size in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                made = torch.empty(number, *size, dtype=like.dtype, device=like.device)
                self.register_parameter(f"{name}_proj", torch.nn.Parameter(made))

        def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            """[tokens, hidden] from [tokens, hidden] and the experts and weights of each token, [tokens, k]."""
            if tp is None:
                return self._routed(states, chosen, weights)
            more = -len(states) % tp.size()
            parts = [part_of(torch.nn.functional.pad(x, (0, 0, 0, more)), tp) for x in (states, chosen, weights)]
            whole: torch.Tensor = whole_of(self._routed(*parts), tp)
            return whole[: len(states)]

        def _routed(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            active = chosen.shape[1]
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=number * (ep.size() if ep else 1))
            rows = states.index_select(0, order // active)
            found = self._products(rows, counts) if ep is None else self._exchanged(rows, counts)
            found = (found * weights.flatten()[order, None]).to(states.dtype)
            return torch.zeros_like(states).index_add(0, order // active, found)

        def _exchanged(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            """The products of rows that are sorted by expert, wherever these are."""
            theirs = torch.empty_like(counts)
            torch.distributed.all_to_all_single(theirs, counts, group=ep)
            out = counts.view(-1, number).sum(1).tolist()
            into = theirs.view(-1, number).sum(1).tolist()
            arrived = collectives.all_to_all_single_autograd(rows.contiguous(), into, out, ep)
            # By rank, and of each by expert: to be laid by expert.
            expert = torch.arange(number, device=rows.device).repeat(ep.size()).repeat_interleave(theirs)
            order = expert.argsort(stable=True)
            found = self._products(arrived.index_select(0, order), theirs.view(-1, number).sum(0))
            back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
            result: torch.Tensor = collectives.all_to_all_single_autograd(found.index_select(0, back), out, into, ep)
            return result

        def _products(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            """Of rows that lie by expert, `counts` of each."""
            ends = counts.cumsum(0).to(torch.int32)

            def product(x: torch.Tensor, weight: Any) -> torch.Tensor:
                return kernels.grouped(x, weight.transpose(1, 2), ends)

            if swiglu is None:
                inner = activation(product(rows, self.gate_proj)) * product(rows, self.up_proj)
            else:
                inner = swiglu(torch.cat([product(rows, self.gate_proj), product(rows, self.up_proj)], dim=-1))
            return product(inner, self.down_proj)

    return Experts()


def _exchanges() -> tuple[Any, Any]:
    """Of ranks that have the same tokens: a part for each (its gradient is of all parts), and the whole of the parts
    (each has its whole gradient)."""
    import torch

    def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
        found = part.new_empty(len(part) * group.size(), *part.shape[1:])
        torch.distributed.all_gather_into_tensor(found, part.contiguous(), group=group)
        return found

    def own(whole: torch.Tensor, group: Any) -> torch.Tensor:
        part: torch.Tensor = whole.chunk(group.size())[group.rank()].contiguous()
        return part

    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return own(whole, group)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gathered(gradient, ctx.group), None

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return gathered(part, group)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return own(gradient, ctx.group), None

    return Part.apply, Whole.apply
