"""How engines spread the experts of a mixture over the tp x cp x dp ranks of a stage.

Invariant: of each engine it stands here, and nowhere else, what an `etp` that no file states becomes, and which ep and
etp it can have: placing, checks, the planner, the reference and what a run refuses read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..model.architecture import Model
from ..sharding.layout import AXES, Layout


@dataclass(frozen=True)
class ExpertPlacement:
    """An engine's rule. Each function takes a layout, of which all but etp is settled.

    - `etp`: that of a layout which states none.
    - `has`: whether the engine can have a layout's ep and etp, and of these `runs`: whether its own half here does, or
      it can be planned for only.
    - `sends`: whether tokens go to other ranks for their experts. Where a group of tp has all its tokens and all
      experts, or parts of them, the all-reduce that ends a layer sums what they make of them.
    - `words`: the same for a reader.
    """

    words: str
    etp: Callable[[Layout], int] = lambda layout: 1
    has: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp == 1
    runs: Callable[[Layout], bool] = lambda layout: True
    sends: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp > 1

    def written(self, layout: Layout, model: Model) -> str:
        """A layout as a file states it for this engine; `settled` of that is the layout."""
        sizes = {a: getattr(layout, a) for a in AXES if getattr(layout, a) > 1 or a in ("tp", "dp")}
        if layout.etp == self.settled(replace(layout, etp=0), model).etp:
            sizes.pop("etp", None)
        else:
            sizes["etp"] = layout.etp
        found = [f"{a} = {n}" for a, n in sizes.items()]
        found += [f"stages = [{', '.join(map(str, layout.stages))}]"] * bool(layout.stages)
        found += [f"zero = {layout.zero}"] * (layout.zero != Layout.zero)
        return ", ".join([*found, *[f"cp_kind = {layout.cp_kind}"] * (layout.cp_kind != Layout.cp_kind)])

    def takes(self, layout: Layout, model: Model) -> bool:
        """Whether the engine's half here runs a layout of a model: of one without experts each."""
        return model.experts is None or self.runs(layout)

    def settled(self, layout: Layout, model: Model) -> Layout:
        """The layout with its etp: 0 stands for one that the file leaves to the engine."""
        return layout if layout.etp else replace(layout, etp=1 if model.experts is None else self.etp(layout))

    def meshes(self, layout: Layout, model: Model) -> Iterator[Layout]:
        """The layout with each ep, and each etp of 1 and tp, that the engine and the model's experts can have."""
        experts = model.experts
        if experts is None:
            yield replace(layout, ep=1, etp=1)
            return
        for ep in [n for n in range(1, min(experts.number, layout.stage_devices) + 1) if experts.number % n == 0]:
            for etp in sorted({1, layout.tp}):
                found = replace(layout, ep=ep, etp=etp)
                if experts.intermediate % etp == 0 and self.has(found):
                    yield found


def _divides(layout: Layout) -> bool:
    return layout.stage_devices % (layout.ep * layout.etp) == 0


def _of_vllm(layout: Layout) -> bool:
    """Parts over tp; with --enable-expert-parallel whole experts over the ranks of vLLM's world: tp, and where it has
    data parallelism of its own that many times more."""
    if layout.ep == 1:
        return layout.etp == layout.tp
    return layout.etp == 1 and layout.ep % layout.tp == 0 and layout.dp % (layout.ep // layout.tp) == 0


NONE = ExpertPlacement("each rank has all experts")
# Tokens go to their experts by an all-to-all.
WHOLE = ExpertPlacement("ep divides tp · cp · dp, etp is 1", has=lambda layout: layout.etp == 1 and _divides(layout))
# expert_tensor_parallel_size is tensor_model_parallel_size where nothing else is said.
MEGATRON = ExpertPlacement(
    "ep · etp divides tp · cp · dp; etp is tp where it is not stated", lambda layout: layout.tp, _divides
)
VLLM = ExpertPlacement(
    "without `ep` each rank of tp has a part of every expert (etp is tp), with `ep = tp` it has whole ones; an ep over "
    "several replicas, a multiple of tp, is planned and not run",
    lambda layout: 1 if layout.ep > 1 else layout.tp,
    _of_vllm,
    lambda layout: layout.ep * layout.etp == layout.tp,
    lambda layout: layout.ep * layout.etp > layout.tp,
)
