"""Rules by which engines place a layer's experts on the ranks of a pipeline stage.

A stage has tp x cp x dp ranks.

Invariant: only this file defines, for each engine, the default of etp and the supported ep and etp. The code that
places tensors, the checks, the planner, the reference and the rejections of a run all read this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..model.architecture import Model
from ..sharding.layout import AXES, Layout


@dataclass(frozen=True)
class ExpertPlacement:
    """An engine's rule for placing experts.

    Each function accepts a layout in which every axis except etp is final.

    - `etp`: returns the default etp of a layout that does not state one.
    - `has`: returns whether the engine supports the layout's ep and etp.
    - `runs`: returns whether this version can also run the layout's ep and etp with the engine, and not only plan for
      them.
    - `sends`: returns whether tokens are sent to other ranks for their experts. Tokens need not be sent where a tp
      group has all its tokens and all experts, or shards of all experts. There the all-reduce at the end of a layer
      sums the results.
    - `words`: the rule in words.
    """

    words: str
    etp: Callable[[Layout], int] = lambda layout: 1
    has: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp == 1
    runs: Callable[[Layout], bool] = lambda layout: True
    sends: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp > 1

    def format_layout(self, layout: Layout, model: Model) -> str:
        """Format a layout as a program states it for this engine.

        An etp that equals the engine's default is left out; `settle_etp` adds it again.
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

        A model without experts can run with any layout.
        """
        return model.experts is None or self.runs(layout)

    def settle_etp(self, layout: Layout, model: Model) -> Layout:
        """Return the layout with its final etp.

        An etp of 0 means that the program leaves etp to the engine: it is replaced by the engine's default.
        """
        return layout if layout.etp else replace(layout, etp=1 if model.experts is None else self.etp(layout))

    def meshes(self, layout: Layout, model: Model) -> Iterator[Layout]:
        """Yield the layout with each supported pair of ep and etp; etp is 1 or tp."""
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

    Without ep, each expert is sharded over tp. With --enable-expert-parallel, whole experts are distributed over the
    ranks of vLLM's world, whose size is tp times vLLM's own data parallelism.
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
