"""Rules by which engines place a layer's experts on the ranks of a pipeline stage.

A stage has tp x cp x dp ranks. `ep` is the size of expert parallelism; `etp` is the size of tensor parallelism inside
an expert.

Invariant: an engine's spec has the engine's rule. All code reads it from there: the code that places tensors, the
compiler's checks, the planner and the generated reference pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..model.architecture import Model
from ..sharding.layout import AXES, Layout


@dataclass(frozen=True)
class ExpertPlacement:
    """An engine's rule for placing experts.

    Every field except `words` is a function of a layout. Except for `etp`, the functions need a layout with its final
    etp.

    - `etp`: returns the etp that the engine uses if the program does not state etp.
    - `has`: returns whether the engine supports the layout's ep and etp.
    - `runs`: returns whether a run can use the layout's ep and etp. If not, this version can only plan for the layout.
    - `sends`: returns whether tokens are sent to the ranks that have their experts. For some layouts no token is sent:
      each rank of a tp group has the tokens of the whole group, and the group has all experts, whole or sharded. The
      all-reduce at the end of the layer then sums the experts' results.
    - `words`: the rule in words.
    """

    words: str
    etp: Callable[[Layout], int] = lambda layout: 1
    has: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp == 1
    runs: Callable[[Layout], bool] = lambda layout: True
    sends: Callable[[Layout], bool] = lambda layout: layout.ep * layout.etp > 1

    def format_layout(self, layout: Layout, model: Model) -> str:
        """Format a layout as the text that a program would contain for this engine.

        An etp that equals the engine's default is left out, because `settle_etp` adds it when the program is compiled.
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
        """Return whether a run can use this engine with a layout for a model.

        A model without experts can run with any layout.
        """
        return not model.experts or self.runs(layout)

    def settle_etp(self, layout: Layout, model: Model) -> Layout:
        """Return the layout with its final etp.

        An etp of 0 means that the program does not state etp. A 0 is replaced by the engine's default.
        """
        return layout if layout.etp else replace(layout, etp=self.etp(layout) if model.experts else 1)

    def meshes(self, layout: Layout, model: Model) -> Iterator[Layout]:
        """Yield copies of `layout`: one with each pair (ep, etp) that the engine supports.

        Only pairs in which etp is 1 or equals tp are considered. For a model without experts, the only pair is ep = etp
        = 1.
        """
        if not model.experts:
            yield replace(layout, ep=1, etp=1)
            return
        number = math.gcd(*(experts.number for experts in model.experts))
        width = math.gcd(*(experts.intermediate for experts in model.experts))
        for ep in [size for size in range(1, min(number, layout.stage_devices) + 1) if number % size == 0]:
            for etp in sorted({1, layout.tp}):
                candidate = replace(layout, ep=ep, etp=etp)
                if width % etp == 0 and self.has(candidate):
                    yield candidate


def divides(layout: Layout) -> bool:
    """Return whether ep x etp divides the ranks of a pipeline stage."""
    return layout.stage_devices % (layout.ep * layout.etp) == 0


NONE = ExpertPlacement("each rank has all experts")
# Tokens reach their experts by an all-to-all.
WHOLE = ExpertPlacement("ep divides tp · cp · dp, etp is 1", has=lambda layout: layout.etp == 1 and divides(layout))
