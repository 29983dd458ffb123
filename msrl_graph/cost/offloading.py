"""Device memory that the optimizer step needs if its states are offloaded.

Invariant: this module and backends/optimizer/steps.py cut optimizer states into the same parts. Therefore all engines
whose optimizer step uses steps.py need the same memory.
"""

from __future__ import annotations

from math import ceil

from ..backends.memory.sizes import CHUNK, count_orthogonalization_bytes, count_piece_bytes
from ..backends.spec import BYTES, Moments
from ..ir import optimizer_spec
from ..ir.workload import Workload
from ..sharding.layout import Side, box_at, count_busiest_elements, elements


def step_moments(work: Workload, gradients: int) -> Moments:
    """Return the device memory of an optimizer step whose states are offloaded.

    For each update rule of the optimizer, the result has a dictionary from items, such as "gradients", to bytes.
    `gradients` is the number of bytes of gradients, which remain on the device. The optimizer states are in host
    memory, cut into parts. While the optimizer step uses one part on the device, the next part is copied.
    """
    assert work.optimizer is not None
    layout = work.layout
    side = Side(work.layout, work.divided)
    mastered = work.dtype != "f32"
    item = BYTES[work.gradients]
    copies = layout.cp * (1 if work.divided else layout.dp)
    flat = copies > 1 and layout.zero == 1
    by_rule = {}
    for rule, kinds in optimizer_spec.kinds_by_rule(work.optimizer, work.model.trained_kinds):
        per_element = rule.state_bytes(mastered)
        largest = max((elements(box_at(kind.tensor, side, (0, 0, 0))) for kind in kinds), default=0)
        # Elements that a rank steps at once.
        part = (
            ceil(work.optimizer_away / optimizer_spec.PARTS / per_element)
            if per_element
            else count_busiest_elements(kinds, side)
        )
        if rule.whole:
            part = max(part, -(-largest // copies) if flat else largest)
        master = 4 * part if flat and not mastered else 0
        if rule.whole:
            turned = max((count_orthogonalization_bytes(kind, side) for kind in kinds), default=0)
        else:
            # AdamW needs a root and a quotient, of a slice or piece by piece: gradients of earlier parts are freed.
            first = part if flat else min(part, elements(box_at(work.model.trained[0], side, (0, 0, 0))))
            turned = ceil(max(rule.bytes * first, rule.bytes * min(part, largest) - BYTES[work.dtype] * part))
            turned = max(turned, count_piece_bytes(rule, item, part))
        spread = copies * min(4 * part, 4 * CHUNK) if flat else 0
        by_rule[f"a part is stepped ({rule.name})"] = {
            "gradients": gradients + item * part * (flat or mastered),
            "workspace": master + max(turned, spread),
            "optimizer's parts": ceil(optimizer_spec.AT_ONCE * part * per_element),
        }
    return by_rule
