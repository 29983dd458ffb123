"""The transfer dock and the sample edges of a plan as text.

Invariant: every figure is printed with its source (measured, derived, datasheet, stated or assumed).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.plan import Plan
from .humanize import duration, plural, size
from .text_page import Sheet


def write_docks(page: Sheet, plan: Plan) -> None:
    """Write the warehouses and controllers of a plan's transfer dock to a page."""
    docks = plan.docks
    where = (
        f"{plural(len(docks.warehouses), 'warehouse')} on {'host' if len(docks.warehouses) == 1 else 'hosts'} "
        f"{_format_range(docks.warehouses)}"
    )
    remark = f"{docks.mode}: {plural(len(docks.controllers), 'controller')}, {where}; deadline {docks.deadline:g} s"
    remark += f"; at most {size(docks.capacity)} of rows a host" if docks.capacity else ""
    remark += (
        f"; a share may be {docks.imbalance:g} x the even share, to keep rows on their host"
        if docks.imbalance > 1
        else ""
    )
    if len({controller.host for controller in docks.controllers}) > 1:
        remark += "; each controller is on a host with the fewest busy devices and groups to serve"
    page.heading("Transfer dock", remark)
    rows = []
    for controller in docks.controllers:
        batch = [f"{controller.chunk}"] * (controller.chunk > 0) + [plural(controller.chunk_tokens, "token")] * (
            controller.chunk_tokens > 0
        )
        chunk = f"{' or '.join(batch)} as soon as ready" if batch else "all"
        lockstep = "in lockstep: a collective spans its groups" if controller.lockstep else "each group on its own"
        rows.append(
            (
                controller.node,
                str(controller.host),
                ", ".join(controller.columns),
                str(controller.groups),
                chunk,
                lockstep,
            )
        )
    page.table(("controller of", "host", "columns", "groups", "hands out", "how"), rows, (1, 3))


def write_traffic(page: Sheet, plan: Plan) -> None:
    """Write the bytes and seconds of each sample edge of a plan to a page."""
    total = sum(traffic.bytes for traffic in plan.traffic)
    page.heading("Sample edges", f"{size(total)} an iteration, at the columns' bounds")
    rows = []
    for traffic in plan.traffic:
        cells = (
            f"{traffic.src} -> {traffic.dst}",
            ", ".join(traffic.columns) or "-",
            f"{traffic.rows:,}",
            size(traffic.bytes),
            duration(traffic.seconds.value),
        )
        rows.append((*cells, duration(traffic.central_seconds.value), traffic.seconds.source))
    page.table(("edge", "columns", "rows", "bytes", "dock", "central", "source"), rows, (2, 3, 4, 5), (0, 6))
    for how in dict.fromkeys(traffic.how for traffic in plan.traffic):
        readers = dict.fromkeys(traffic.dst for traffic in plan.traffic if traffic.how == how)
        page.line(f"{how}: {', '.join(readers)}" if len({traffic.how for traffic in plan.traffic}) > 1 else how)
    page.line(f"seconds: {plan.traffic[0].seconds.basis}")
    page.line(f"central: {plan.traffic[0].central_seconds.basis}")


def _format_range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))
