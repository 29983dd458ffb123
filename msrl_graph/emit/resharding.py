"""Resharding edges as text: bytes and steps of each, and what it releases.

Invariant: as in all text of a plan, every figure has its source next to it.
"""

from __future__ import annotations

from ..ir.async_schedule import Sends
from ..ir.plan import Plan, Reshard, ReshardRoute
from .humanize import duration, laid, many, size
from .text_page import Sheet


def write_reshards(page: Sheet, plan: Plan) -> None:
    """Write each resharding edge, step by step."""
    sent = Sends(plan)
    for r in plan.reshards:
        page.heading(
            f"Reshard {r.name}", f"{laid(plan.placement(r.src).layout)} to {laid(plan.placement(r.dst).layout)}"
        )
        sends = r.mode == "send"
        page.line(f"mode {r.mode}, order {r.order}: {r.reason}")
        largest = "as large as the largest bucket"
        how = (
            "each rank receives from ranks that hold its slices"
            if sends
            else "; ".join(_way(w, len(r.ways)) for w in r.ways)
        )
        page.line(f"{many(len(r.buckets), 'bucket')} of up to {size(r.bucket_bytes)}; {how}; the buffer is {largest}")
        steps = [
            (str(i), s.name, size(s.bytes), duration(s.seconds.value), s.seconds.source, s.seconds.basis)
            for i, s in enumerate(r.steps, 1)
        ]
        s = r.swap_in
        if s.bytes:
            steps.append(
                (
                    "",
                    s.name,
                    size(s.bytes),
                    duration(s.seconds.value),
                    s.seconds.source,
                    "after the generation, overlaps with inference",
                )
            )
        if (copy := r.copied) is not None:
            how = "by the update when it begins, before it continues"
            cells = copy.name, size(copy.bytes), duration(copy.seconds.value), copy.seconds.source
            steps.insert(0, ("", *cells, how))
        page.table(("", "step", "bytes a device", "seconds", "source", "how"), steps, (2, 3), (0, 1, 4))
        if (r.src, r.dst) in sent.sparse:
            _write_share(page, r, sent)
        if sends:
            page.line(
                f"releases nothing: {size(r.update_bytes_per_device)} of update weights a device stay in place "
                "(derived)"
            )
            page.line(f"peak {size(r.peak_bytes_per_device)} a device: {_peak('staged')} (derived)")
            continue
        page.line(
            f"releases {size(r.released_bytes_per_device)} a device while it generates (update weights swapped out; "
            "derived)"
        )
        page.line(f"peak {size(r.peak_bytes_per_device)} a device: {_peak(r.order)} (derived)")
        devices = many(plan.cluster.devices, "device")
        page.line(f"naive resharding would leave {size(r.redundant_bytes)} on {devices} (derived; cross-check: eq. 3)")


def _write_share(page: Sheet, r: Reshard, sent: Sends) -> None:
    """Write how often weights come that are not sent each time."""
    share, multiples = sent.share((r.src, r.dst)), sorted({*sent.multiples[r.src, r.dst]})
    page.line(
        f"fetched in {100 * share:.3g} % of the iterations, {size(share * r.received_bytes_per_device)} a device and "
        f"iteration on average (derived): only versions that are multiples of {' or '.join(map(str, multiples))} are "
        f"sent; {r.dst} keeps its weights in between"
    )


def _way(way: ReshardRoute, ways: int) -> str:
    """Describe how weights reach the ranks that want them."""
    of = f"{way.of}: " if ways > 1 else ""
    blocks = f" ({many(way.block, 'neighbour')} of each stage)" if way.across else ""
    if way.how == "all-to-all":
        return f"{of}each rank receives only its slices, in groups of {way.ranks}{blocks}"
    return f"{of}ranks gather in groups of {way.ranks}{blocks}"


def _peak(order: str) -> str:
    """Return the formula of the peak."""
    return "max(update, generation) + a bucket" if order == "staged" else "update + generation + a bucket"
