"""The experts of a layer on one rank: a module that replaces transformers' module.

Invariant: a token's result is the weighted sum over the experts that the router chose for the token, regardless of
which ranks have these experts. With expert parallelism, an all-to-all sends tokens to the ranks of their experts, and a
second all-to-all returns the results. A rank whose tokens choose no remote expert still joins both collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from . import hf_modules
from .adapters import DISABLED
from .kernels.modules import is_silu
from .recompute import checkpoint

if TYPE_CHECKING:
    import torch

    from ..model.architecture import Model
    from ..sharding.layout import Layout
    from .devices import Devices
    from .kernels import Kernels


ALIGNED = 8  # grouped products need rows of a multiple of 16 bytes


def install(module: Any, model: Model, layout: Layout, devices: Devices, kernels: Kernels) -> None:
    """Replace the experts in a transformers model by modules with this rank's experts.

    The model is on the meta device. With ep, the rank's coordinate on the axis ep determines which experts the rank
    has, and each of these experts is whole (not sharded). Without ep, each rank computes all experts for its tokens.
    """
    ep = devices.make_group(layout, "pp", "etp", "edp") if layout.ep > 1 else None
    for number in model.expert_layers:
        mlp = module.model.layers[number].mlp
        mlp.experts = module_of(mlp.experts, len(mlp.experts.down_proj) // layout.ep, kernels, ep)
        _add_adapters(mlp.experts, f"model.layers.{number}.mlp.experts.", model)


def _add_adapters(experts: Any, prefix: str, model: Model) -> None:
    """Add the matrices of the model's adapters to a module of experts."""
    import torch

    for tensor in model.weights:
        if model.lora and tensor.role == "adapter" and tensor.name.startswith(prefix):
            size = (len(experts.down_proj), *tensor.shape[1:])
            values = torch.empty(size, dtype=experts.down_proj.dtype, device=experts.down_proj.device)
            leaf = hf_modules.parameter_path(tensor.name).rpartition(".")[2]
            experts.register_parameter(leaf, torch.nn.Parameter(values))
            experts.scale = model.lora.scale
            setattr(experts, DISABLED, False)


def module_of(theirs: Any, number: int, kernels: Kernels, ep: Any = None) -> Any:
    """Build a module for this rank's experts of one layer.

    - `theirs`: transformers' module of the experts, which determines the sizes and the activation.
    - `number`: the number of experts that this rank has.
    - `ep`: the group of ranks that together have all experts of the layer; None if this rank has all experts.
    """
    import torch
    from torch.distributed import _functional_collectives as collectives

    activation: Any = getattr(theirs, "act_fn", None)
    ungated = not hasattr(theirs, "gate_up_proj")
    swiglu = kernels.swiglu if is_silu(activation) else None
    add_results, multiply_gated = _make_lean_operators()

    class Experts(torch.nn.Module):
        scale: float  # of adapters
        recomputes_activation = False

        def __init__(self) -> None:
            super().__init__()
            for name, template in self._list_parameters():
                values = torch.empty(number, *template.shape[1:], dtype=template.dtype, device=template.device)
                self.register_parameter(name, torch.nn.Parameter(values))

        def _list_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
            """Yield the names of the parameters, each with a tensor.

            The tensor has the shape of the parameter, for all experts.
            """
            if not ungated:
                gate, up = theirs.gate_up_proj.chunk(2, dim=1)
                yield from (("gate_proj", gate), ("up_proj", up), ("down_proj", theirs.down_proj))
            else:
                yield from theirs.named_parameters()

        def forward(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            """Return each token's weighted sum over its experts, [tokens, hidden].

            - `states` [tokens, hidden]: the tokens' hidden states.
            - `chosen` [tokens, k]: for each token, the indices of its k experts.
            - `weights` [tokens, k]: for each token, the weights of its k experts.
            """
            active = chosen.shape[1]
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=number * (ep.size() if ep else 1))
            rows = states.index_select(0, order // active)
            results = self._apply_experts(rows, counts) if ep is None else self._exchange_tokens(rows, counts)
            combined: torch.Tensor = add_results(results, weights.flatten()[order], order // active, states)
            return combined

        def _exchange_tokens(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            """Send hidden states to the ranks of their experts; return the experts' results.

            `rows` has one hidden state for each pair of a token and an expert, sorted by expert. `counts` has the
            number of rows of each expert, for all experts of the layer.
            """
            received_counts = torch.empty_like(counts)
            torch.distributed.all_to_all_single(received_counts, counts, group=ep)
            send_sizes = counts.view(-1, number).sum(1).tolist()
            receive_sizes = received_counts.view(-1, number).sum(1).tolist()
            arrived = collectives.all_to_all_single_autograd(rows.contiguous(), receive_sizes, send_sizes, ep)
            # Rows arrive by rank, and within a rank by expert. Sort them by expert.
            expert = torch.arange(number, device=rows.device).repeat(ep.size()).repeat_interleave(received_counts)
            order = expert.argsort(stable=True)
            results = self._apply_experts(arrived.index_select(0, order), received_counts.view(-1, number).sum(0))
            inverse_order = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=rows.device))
            result: torch.Tensor = collectives.all_to_all_single_autograd(
                results.index_select(0, inverse_order), send_sizes, receive_sizes, ep
            )
            return result

        def _apply_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            """Return the results of this rank's experts for the hidden states `rows`.

            `rows` is sorted by expert. `counts` has the number of rows for each of this rank's experts.
            """
            ends = counts.cumsum(0).to(torch.int32)

            def multiply(inputs: torch.Tensor, weight: Any) -> torch.Tensor:
                return kernels.grouped(inputs, weight.transpose(1, 2), ends)

            def project(inputs: torch.Tensor, name: str) -> torch.Tensor:
                output = multiply(inputs, getattr(self, name))
                if (down := getattr(self, f"{name}_lora_A", None)) is None or getattr(self, DISABLED):
                    return output
                padding = -down.shape[1] % ALIGNED
                down = torch.nn.functional.pad(down, (0, 0, 0, padding))
                up = torch.nn.functional.pad(getattr(self, f"{name}_lora_B"), (0, padding))
                return output.add_(multiply(multiply(inputs, down) * self.scale, up))

            def activate(*projected: torch.Tensor) -> torch.Tensor:
                if ungated:
                    output: torch.Tensor = activation(*projected)
                elif swiglu is None:
                    output = multiply_gated(activation, *projected)
                else:
                    output = swiglu(torch.cat(projected, dim=-1))
                return output

            names = ("up_proj",) if ungated else ("gate_proj", "up_proj")
            return self._finish(
                activate, lambda inner: project(inner, "down_proj"), (project(rows, name) for name in names)
            )

        def _finish(self, activate: Any, project: Any, projected: Iterable[torch.Tensor]) -> torch.Tensor:
            """Compute the second half of experts, from outputs of gate and up."""
            if self.recomputes_activation:
                return checkpoint(lambda *outputs: project(activate(*outputs)), *projected)  # type: ignore[no-any-return]
            return project(activate(*projected))  # type: ignore[no-any-return]

    class ClampedExperts(Experts):
        """Experts with biases (ClampedExpertMlp in layers.py)."""

        def __init__(self) -> None:
            super().__init__()
            self.activate: Any = theirs._apply_gate

        def _list_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from theirs.named_parameters()

        def _apply_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0).to(torch.int32)

            def product(inputs: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
                result: torch.Tensor = kernels.grouped(inputs, weight, ends) + bias.repeat_interleave(counts, dim=0)
                return result

            projected = (product(rows, self.gate_up_proj, self.gate_up_proj_bias) for _ in range(1))
            return self._finish(
                self.activate, lambda inner: product(inner, self.down_proj, self.down_proj_bias), projected
            )

    return Experts() if hasattr(theirs, "act_fn") else ClampedExperts()


@cache
def _make_lean_operators() -> tuple[Any, Any]:
    """Return two functions that save few tensors for the backward pass.

    Their results and gradients have the same bits. The first adds up the results of each token's experts. The second
    multiplies the activation of gate by up; if the activation is SiLU, its result is computed again.
    """
    import torch

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, results: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor
        ) -> torch.Tensor:
            """Return the weighted sums of results; `tokens` has each result's token."""
            ctx.save_for_backward(results, weights, tokens)
            scaled = (results * weights[:, None]).to(states.dtype)
            return torch.zeros_like(states).index_add_(0, tokens, scaled)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
            results, weights, tokens = ctx.saved_tensors
            scaled = gradient.index_select(0, tokens).to(torch.promote_types(results.dtype, weights.dtype))
            of_weights = (scaled * results).sum(1, keepdim=True)[:, 0].to(weights.dtype)
            return scaled.mul_(weights[:, None]).to(results.dtype), of_weights, None, None

    class GatedSilu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate).mul_(up)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate, up = ctx.saved_tensors
            of_up = torch.nn.functional.silu(gate).mul_(gradient)
            return torch.ops.aten.silu_backward(gradient * up, gate), of_up

    gated_silu: Any = GatedSilu.apply

    def multiply_gated(activation: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = gated_silu(gate, up) if is_silu(activation) else activation(gate) * up
        return output

    return Sum.apply, multiply_gated
