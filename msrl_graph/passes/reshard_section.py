"""The resharding edges of a plan: how they are verified, shown and compared.

Invariant: every figure is printed with its source (measured, derived, datasheet, stated or assumed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from ..analysis.async_schedule import Sends
from ..diagnostics.quantities import duration, plural, size
from ..diagnostics.sheet import Sheet
from ..ir.plan import Plan
from ..ir.resharding_plan import Reshard, ReshardRoute
from .facts import Fact
from .place import format_layout
from .spec import describe_incomplete


def verify_reshards(plan: Plan) -> Iterator[str]:
    """Verify the plans of resharding edges.

    Every resharding edge (`=>`) must have a plan, and each tensor must be in exactly one bucket.
    """
    if [(reshard.src, reshard.dst) for reshard in plan.reshards] != [
        (edge.src, edge.dst) for edge in plan.graph.reshards()
    ]:
        yield describe_incomplete("reshard")
        return
    for reshard in plan.reshards:
        if (reshard.mode == "send") != (plan.placement(reshard.src).pool != plan.placement(reshard.dst).pool):
            yield f"the mode of `{reshard.name}` cannot be {reshard.mode} with its pools"
        if Counter(chain.from_iterable((*reshard.buckets, *reshard.first_buckets))) != Counter(
            tensor.name for tensor in plan.model(reshard.src).weights
        ):
            yield f"the buckets of `{reshard.name}` do not have every tensor once"


def write_reshards(page: Sheet, plan: Plan) -> None:
    """Write each resharding edge of a plan to a page, step by step."""
    sent = Sends(plan)
    for reshard in plan.reshards:
        source, target = (format_layout(plan.placement(end).layout) for end in (reshard.src, reshard.dst))
        page.heading(f"Reshard {reshard.name}", f"{source} to {target}")
        sends = reshard.mode == "send"
        page.line(f"mode {reshard.mode}, order {reshard.order}: {reshard.reason}")
        largest = "as large as the largest bucket"
        how = (
            "each rank receives from ranks that hold its slices"
            if sends
            else "; ".join(_describe_route(route, len(reshard.ways)) for route in reshard.ways)
        )
        once = f", and {len(reshard.first_buckets)} of frozen weights the first time," if reshard.first_buckets else ""
        page.line(
            f"{plural(len(reshard.buckets), 'bucket')}{once} of up to {size(reshard.bucket_bytes)}; {how}; "
            f"the buffer is {largest}"
        )
        steps = [
            (
                str(number),
                step.name,
                size(step.bytes),
                duration(step.seconds.value),
                step.seconds.source,
                step.seconds.basis,
            )
            for number, step in enumerate(reshard.steps, 1)
        ]
        swap_step = reshard.swap_in
        if swap_step.bytes:
            steps.append(
                (
                    "",
                    swap_step.name,
                    size(swap_step.bytes),
                    duration(swap_step.seconds.value),
                    swap_step.seconds.source,
                    "after the generation, overlaps with inference",
                )
            )
        if (copy := reshard.copied) is not None:
            how = "by the update when it begins, before it continues"
            cells = copy.name, size(copy.bytes), duration(copy.seconds.value), copy.seconds.source
            steps.insert(0, ("", *cells, how))
        page.table(("", "step", "bytes a device", "seconds", "source", "how"), steps, (2, 3), (0, 1, 4))
        if (reshard.src, reshard.dst) in sent.sparse:
            _write_share(page, reshard, sent)
        if sends:
            page.line(
                f"releases nothing: {size(reshard.update_bytes_per_device)} of update weights a device stay in place "
                "(derived)"
            )
            page.line(f"peak {size(reshard.peak_bytes_per_device)} a device: {_peak_formula('staged')} (derived)")
            continue
        page.line(
            f"releases {size(reshard.released_bytes_per_device)} a device while it generates "
            "(update weights swapped out; derived)"
        )
        page.line(f"peak {size(reshard.peak_bytes_per_device)} a device: {_peak_formula(reshard.order)} (derived)")
        devices = plural(plan.cluster.devices, "device")
        page.line(
            f"naive resharding would leave {size(reshard.redundant_bytes)} on {devices} (derived; cross-check: eq. 3)"
        )


def _write_share(page: Sheet, reshard: Reshard, sent: Sends) -> None:
    """Write the fraction of the iterations in which a resharding edge fetches weights.

    The line is written only for an edge that does not fetch every version of the weights.
    """
    share = sent.share((reshard.src, reshard.dst))
    multiples = sorted({*sent.multiples[reshard.src, reshard.dst]})
    page.line(
        f"fetched in {100 * share:.3g} % of the iterations, {size(share * reshard.received_bytes_per_device)} a device "
        f"and iteration on average (derived): only versions that are multiples of {' or '.join(map(str, multiples))} "
        f"are sent; {reshard.dst} keeps its weights in between"
    )


def _describe_route(way: ReshardRoute, ways: int) -> str:
    """Describe how ranks exchange the weights of one route.

    `ways` is the number of routes of the resharding edge. If there are several routes, the text begins with the kind of
    weights that the route moves.
    """
    name = f"{way.of}: " if ways > 1 else ""
    blocks = f" ({plural(way.block, 'neighbour')} of each stage)" if way.across else ""
    if way.how == "all-to-all":
        return f"{name}each rank receives only its slices, in groups of {way.ranks}{blocks}"
    return f"{name}ranks gather in groups of {way.ranks}{blocks}"


def _peak_formula(order: str) -> str:
    """Return the formula of a device's peak memory for a value of `reshard { order }`."""
    return "max(update, generation) + a bucket" if order == "staged" else "update + generation + a bucket"


def reshard_facts(reshard: Reshard) -> dict[str, Fact]:
    facts_found = {"mode": Fact(reshard.mode), "order": Fact(reshard.order)}
    facts_found["moves a device"] = Fact(float(sum(route.bytes for route in reshard.ways)), "bytes")
    for route in reshard.ways:
        among = (
            f" in groups of {route.ranks}, blocks of {route.block}{' of each stage' if route.across else ''}"
            if route.ranks > 1
            else ""
        )
        facts_found[route.of] = Fact(f"{route.how}{among}")
        facts_found[f"{route.of}, a device"] = Fact(float(route.bytes), "bytes", True)
    facts_found["buckets"] = Fact(float(len(reshard.buckets)), "buckets", True)
    names = {
        "bucket": reshard.bucket_bytes,
        "update weights a device": reshard.update_bytes_per_device,
        "generation weights a device": reshard.generate_bytes_per_device,
        "released a device": reshard.released_bytes_per_device,
        "peak a device": reshard.peak_bytes_per_device,
        "naive would leave": reshard.redundant_bytes,
    }
    facts_found |= {name: Fact(float(size), "bytes") for name, size in names.items()}
    for step in (*reshard.steps, reshard.swap_in, *([reshard.copied] if reshard.copied else [])):
        facts_found[f"{step.name}: bytes"] = Fact(float(step.bytes), "bytes", True)
        facts_found[f"{step.name}: seconds"] = Fact(step.seconds.value, "s", True)
    return facts_found
