"""How engines place the experts of a mixture on the tp x cp x dp ranks of a stage.

Invariant: this file alone says, for each engine, what etp defaults to and which ep and etp it supports. Placing,
checks, the planner, the reference and the rejections of a run read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..model.architecture import Model
from ..sharding.layout import AXES, Layout


@dataclass(frozen=True)
class ExpertPlacement:
    """An engine's rule for placing experts.

    Each function takes a layout, of which everything but etp is settled.

    - `etp`: the default of a layout that does not state it.
    - `has`: whether the engine supports the layout's ep and etp. `runs`: whether the engine can also run them here,
      or only plan for them.
    - `sends`: whether tokens go to other ranks for their experts. Where a tp group has all its tokens and all
      experts, or shards of them, the all-reduce that ends a layer sums the results.
    - `words`: the rule in words.
    """

    words: str
    etp: Callable[[Layout], int] = lambda layout: 1
    has: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp == 1
    runs: Callable[[Layout], bool] = lambda layout: True
    sends: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp > 1

    def format_layout(self, layout: Layout, model: Model) -> str:
        """Format a layout as a file states it for this engine.

        `settled` turns that back into the layout.
        """
        sizes = {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1 or axis in ("tp", "dp")}
        if layout.etp == self.settle_etp(replace(layout, etp=0), model).etp:
            sizes.pop("etp", None)
        else:
            sizes["etp"] = layout.etp
        parts = [f"{axis} = {size}" for axis, size in sizes.items()]
        parts += [f"stages = [{', '.join(map(str, layout.stages))}]"] * bool(layout.stages)
        parts += [f"zero = {layout.zero}"] * (layout.zero != Layout.zero)
        return ", ".join([*parts, *[f"cp_kind = {layout.cp_kind}"] * (layout.cp_kind != Layout.cp_kind)])

    def can_run(self, layout: Layout, model: Model) -> bool:
        """Return whether this engine can run a layout of a model.

        Any layout fits a model without experts.
        """
        return model.experts is None or self.runs(layout)

    def settle_etp(self, layout: Layout, model: Model) -> Layout:
        """Return the layout with its etp; 0 means that the file leaves etp to the engine."""
        return layout if layout.etp else replace(layout, etp=1 if model.experts is None else self.etp(layout))

    def meshes(self, layout: Layout, model: Model) -> Iterator[Layout]:
        """Yield the layout with each supported ep and etp; etp is 1 or tp."""
        experts = model.experts
        if experts is None:
            yield replace(layout, ep=1, etp=1)
            return
        for ep in [
            size for size in range(1, min(experts.number, layout.stage_devices) + 1) if experts.number % size == 0
        ]:
            for etp in sorted({1, layout.tp}):
                candidate = replace(layout, ep=ep, etp=etp)
                if experts.intermediate % etp == 0 and self.has(candidate):
                    yield candidate


def _divides(layout: Layout) -> bool:
    return layout.stage_devices % (layout.ep * layout.etp) == 0


def _fits_vllm(layout: Layout) -> bool:
    """Return whether vLLM supports a layout's ep and etp.

    Without ep experts are sharded over tp. With --enable-expert-parallel whole experts are spread over the ranks of
    vLLM's world: tp, times vLLM's own data parallelism.
    """
    if layout.ep == 1:
        return layout.etp == layout.tp
    return layout.etp == 1 and layout.ep % layout.tp == 0 and layout.dp % (layout.ep // layout.tp) == 0


NONE = ExpertPlacement("each rank has all experts")
# Tokens reach their experts by an all-to-all.
WHOLE = ExpertPlacement("ep divides tp · cp · dp, etp is 1", has=lambda layout: layout.etp == 1 and _divides(layout))
# Megatron's expert_tensor_parallel_size defaults to tensor_model_parallel_size.
MEGATRON = ExpertPlacement("ep · etp divides tp · cp · dp; etp defaults to tp", lambda layout: layout.tp, _divides)
VLLM = ExpertPlacement(
    "without `ep` each tp rank holds a shard of every expert (etp is tp); with `ep = tp` it holds whole experts; an ep "
    "over several replicas (a multiple of tp) can be planned, not run",
    lambda layout: 1 if layout.ep > 1 else layout.tp,
    _fits_vllm,
    lambda layout: layout.ep * layout.etp == layout.tp,
    lambda layout: layout.ep * layout.etp > layout.tp,
)
