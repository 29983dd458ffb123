"""A graph or plan as one self-contained HTML page: pictures, then tables.

Invariant: the page contains everything that it shows. The page loads no script and no other file, and nothing over a
network. All text that comes from a program is escaped. The length of the page depends on the program and on the number
of different kinds of host, never on the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from ..diagnostics.quantities import duration, plural, size
from ..ir.graph import Graph
from ..ir.plan import PhaseMemory, Plan
from ..sharding.device_range import iterate_runs
from .picture import COLOURS, Picture, colours, graph_picture, placed_picture, plan_picture
from .svg import clean, shorten, svg
from .text import write_graph, write_placed, write_plan

FUNCTIONS = "functions"
# Kinds of memory, and the words that identify them in an item's name; the first match counts.
KINDS = (
    ("optimizer", ("optimizer", "masters")),
    ("gradients", ("gradients",)),
    ("generation weights", ("generation weights",)),
    ("weights", ("weights",)),
    ("KV cache", ("KV cache",)),
    ("activations", ("activations",)),
    ("logits", ("logits",)),
    ("other", ("",)),
)
FINEST = 1000  # the resolution of a timeline, in parts of an iteration
WIDEST = 16  # devices of a host that are drawn one by one


@dataclass(frozen=True)
class BusyInterval:
    """A time interval in which devices of a pool worked on one node.

    `begin` and `end` are in seconds from the start of the iteration. `share` is the fraction of the pool's devices that
    worked.
    """

    pool: str
    node: str
    begin: float
    end: float
    share: float


@dataclass(frozen=True)
class Timeline:
    """The length of an iteration in seconds, and the intervals in which pools worked."""

    seconds: float
    stretches: tuple[BusyInterval, ...]
    about: str  # which iteration it is


@dataclass
class HtmlSection:
    """A section of a page: lines and tables, in the order in which they were written."""

    title: str
    more: str
    blocks: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Sections:
    """A page (see `Sheet`) whose sections are kept in a list, for an HTML template."""

    parts: list[HtmlSection] = field(default_factory=list)
    end: str = ""

    def heading(self, text: str, more: str = "") -> None:
        self.parts.append(HtmlSection(text, more))

    def line(self, text: str) -> None:
        self.parts[-1].blocks.append({"line": text})

    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        right: Sequence[int] = (),
        keep: Sequence[int] = (0,),
    ) -> None:
        self.parts[-1].blocks.append({"head": headings, "rows": list(rows), "right": right, "keep": keep})

    def closing(self, text: str) -> None:
        self.end = text


def graph_html(graph: Graph) -> str:
    """Return an HTML page of an algorithm: its graph, and tables of its parts.

    The tables list workers, columns, states and edges.
    """
    sheet = Sections()
    write_graph(sheet, graph)
    return _render_page(f"Algorithm {graph.name}", sheet, **picture_context(graph_picture(graph)))


def placed_html(plan: Plan) -> str:
    """Return an HTML page of a placed graph.

    The page shows nodes, docks, allgather-swaps, sends of weights between pools, and devices.
    """
    sheet = Sections()
    write_placed(sheet, plan)
    return _render_page(
        f"Placed graph of {plan.graph.name} on {plan.cluster.name}",
        sheet,
        **picture_context(placed_picture(plan)),
        **_devices(plan),
    )


def plan_html(plan: Plan, timeline: Timeline | None = None) -> str:
    """Return an HTML page of a plan.

    The page includes the timeline of an iteration if `timeline` is given.
    """
    sheet = Sections()
    write_plan(sheet, plan)
    shown = {
        **picture_context(plan_picture(plan)),
        **_devices(plan),
        "memory": _memory(plan),
        "timeline": _timeline(plan, timeline),
    }
    return _render_page(f"Plan of {plan.graph.name} on {plan.cluster.name}", sheet, figures=_figures(plan), **shown)


def fragment(picture: Picture) -> str:
    """Return the HTML of a picture with its legend, to embed in a page or a notebook."""
    # A plain string: jinja's Markup would escape strings that are joined to it.
    return str(template("drawing.html.j2").module.fragment(**picture_context(picture)))  # type: ignore[attr-defined]


def graph_fragment(graph: Graph) -> str:
    return fragment(graph_picture(graph))


def plan_fragment(plan: Plan) -> str:
    return fragment(plan_picture(plan))


def template(name: str) -> jinja2.Template:
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=here, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["clean"] = clean
    return environment.get_template(name)


def _render_page(title: str, sheet: Sections, **more: Any) -> str:
    shown = {"figures": [], "hosts": [], "memory": [], "timeline": None, **more}
    return template("page.html.j2").render(title=title, parts=sheet.parts, end=sheet.end, **shown) + "\n"


def picture_context(picture: Picture) -> dict[str, Any]:
    kinds = {box.kind for box in picture.boxes}
    legend = [(number % COLOURS, name, more) for number, (name, more) in enumerate(picture.groups)]
    arrows = dict.fromkeys(arrow.kind for arrow in picture.arrows)
    return {
        "svg": svg(picture),
        "legend": legend,
        "arrows": list(arrows),
        "puts": bool(kinds & {"dock", "allgather_swap", "send"}),
    }


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the main figures of a plan, each as (name, value, remark)."""
    figures = []
    if plan.estimate is not None:
        iteration = plan.estimate.iteration_seconds
        rate = plan.estimate.tokens_per_second_per_device
        figures.append(("an iteration", duration(iteration.value), f"{iteration.source}, every row at its bound"))
        figures.append(("throughput", f"{rate.value:,.4g}", f"tokens/s/device, {rate.source}"))
        if (stale := plan.estimate.staleness) is not None:
            figures.append(
                (
                    "versions old",
                    f"{stale.mean.value:.3g}",
                    f"the weights that generate, on average; rows are at most {stale.bound}",
                )
            )
    cluster = plan.cluster
    figures.append(("devices", f"{cluster.devices:,}", f"{cluster.device.name}, {plural(cluster.nodes, 'host')}"))
    if plan.memory:
        fullest = max(plan.memory, key=lambda phase: phase.total / phase.capacity.value)
        where = "a host" if fullest.place == "host" else "a device"
        figures.append(
            (
                "fullest",
                f"{100 * fullest.total / fullest.capacity.value:.1f} %",
                f"of {where}'s memory, in phase {fullest.phase}",
            )
        )
    if plan.traffic:
        figures.append(
            (
                "sample edges",
                size(sum(traffic.bytes for traffic in plan.traffic)),
                "an iteration, at the columns' bounds",
            )
        )
    if plan.reshards:
        released = sum(reshard.released_bytes_per_device for reshard in plan.reshards)
        figures.append(
            ("released", size(released), "a device while it generates")
            if released
            else ("resharding", "sends", "between pools")
        )
    return figures


def _devices(plan: Plan) -> dict[str, Any]:
    """Return the pools and hosts of a plan, in the form that the template draws.

    Consecutive hosts are one entry if the number of devices of each pool is the same on these hosts.
    """
    colour_of = colours(plan)
    per_host = plan.cluster.devices_per_node
    # Pools are ranges of devices: hosts differ only where a range begins or ends.
    cuts = {0, plan.cluster.nodes}
    for device_pool in plan.pools:
        for end in (
            end
            for run in iterate_runs(device_pool.first, device_pool.devices, device_pool.each, per_host)
            for end in run
        ):
            cuts |= {end // per_host, end // per_host + 1}
    marks = sorted(cut for cut in cuts if cut <= plan.cluster.nodes)
    hosts: list[dict[str, Any]] = []
    for first, last in pairwise(marks):
        here: list[tuple[int, str, int | None, int]] = []
        for device_pool in plan.pools:
            for start, stop in iterate_runs(device_pool.first, device_pool.devices, device_pool.each, per_host):
                begin = max(start, first * per_host)
                end = min(stop, (first + 1) * per_host)
                if begin < end:
                    here.append((begin, device_pool.name, colour_of.get(device_pool.name, 0), end - begin))
        parts: list[tuple[str, int | None, int]] = [(name, colour, number) for _, name, colour, number in sorted(here)]
        used = sum(number for _, _, number in parts)
        parts += [("no pool", None, per_host - used)] if used < per_host else []
        if hosts and [part[0::2] for part in hosts[-1]["parts"]] == [part[0::2] for part in parts]:
            hosts[-1]["last"] = last - 1
        else:
            hosts.append({"first": first, "last": last - 1, "parts": parts})
    for host in hosts:
        host["cells"] = per_host <= WIDEST
    pools = []
    for name in dict.fromkeys(
        [*(pool.name for pool in plan.pools), *(placement.pool for placement in plan.placements)]
    ):
        placed = [placement for placement in plan.placements if placement.pool == name]
        on = next((pool for pool in plan.pools if pool.name == name), None)
        rows = [
            (placement.node, str(placement.layout) if on else "", placement.engine.name if on else "")
            for placement in placed
        ]
        title = plural(on.devices, "device") if on else f"CPUs of {plural(plan.cluster.nodes, 'host')}"
        pools.append(
            {
                "name": name,
                "colour": colour_of.get(name),
                "what": title,
                "reason": on.reason if on else "",
                "states": rows,
            }
        )
    return {"hosts": hosts, "pools": pools}


def _memory(plan: Plan) -> list[dict[str, Any]]:
    places = []
    for place, pool in dict.fromkeys((phase.place, phase.pool) for phase in plan.memory):
        phases = [phase for phase in plan.memory if (phase.place, phase.pool) == (place, pool)]
        capacity = phases[0].capacity.value
        scale = max(capacity, *(phase.total for phase in phases))
        title = f"a {place}" + (f" of pool {pool}" if place == "device" and len(plan.pools) > 1 else "")
        bars = [_memory_bar(phase, scale) for phase in phases]
        kinds = {part["colour"] for bar in bars for part in bar["parts"]}
        legend = [(number, kind) for number, (kind, _) in enumerate(KINDS) if number in kinds]
        places.append(
            {"title": title, "capacity": size(capacity), "at": 100 * capacity / scale, "bars": bars, "legend": legend}
        )
    return places


def _memory_bar(memory: PhaseMemory, scale: float) -> dict[str, Any]:
    parts = []
    for name, number in sorted(memory.items.items(), key=lambda item: (_memory_kind(item[0]), -item[1], item[0])):
        kind = _memory_kind(name)
        if number:
            words = {"name": name, "kind": KINDS[kind][0], "size": size(number)}
            parts.append({**words, "colour": kind, "width": 100 * number / scale})
    share = memory.total / memory.capacity.value
    totals = {"total": size(memory.total), "share": f"{100 * share:.1f} %", "over": share > 1}
    return {"phase": memory.phase, "parts": parts, "remark": memory.remark, **totals}


def _memory_kind(item: str) -> int:
    """Return the kind of memory of an item, as an index in KINDS.

    `item` is the name of a line in the plan's table of memory.
    """
    return next(number for number, (_, words) in enumerate(KINDS) if any(word in item for word in words))


def _timeline(plan: Plan, timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None or not timeline.seconds:
        return None
    colour_of = colours(plan)
    pools = []
    for pool in dict.fromkeys([*(device_pool.name for device_pool in plan.pools), FUNCTIONS]):
        rows = []
        for node in dict.fromkeys(
            stretch.node
            for stretch in sorted(timeline.stretches, key=lambda stretch: (stretch.begin, stretch.node))
            if stretch.pool == pool
        ):
            worked = [stretch for stretch in timeline.stretches if (stretch.pool, stretch.node) == (pool, node)]
            busy = sum((stretch.end - stretch.begin) * stretch.share for stretch in worked)
            bars = []
            for begin, end in _join_stretches(worked, timeline.seconds / FINEST):
                words = f"{node}: from {duration(begin)} to {duration(end)}"
                bars.append(
                    {
                        "left": 100 * begin / timeline.seconds,
                        "width": 100 * (end - begin) / timeline.seconds,
                        "words": words,
                    }
                )
            row = {
                "what": node,
                "short": shorten(node, 19),
                "busy": duration(busy),
                "share": f"{100 * busy / timeline.seconds:.1f} %",
            }
            rows.append({**row, "bars": bars})
        if rows:
            pools.append({"name": pool, "colour": colour_of.get(pool, 0), "rows": rows})
    ticks = [(100 * time / timeline.seconds, duration(time)) for time in _ticks(timeline.seconds)]
    return {"pools": pools, "ticks": ticks, "seconds": duration(timeline.seconds), "about": timeline.about}


def _join_stretches(stretches: Sequence[BusyInterval], least: float) -> list[tuple[float, float]]:
    """Join time intervals with small gaps between them; return the joined intervals.

    Two intervals are joined if the gap between them is at most `least` seconds. A joined interval is a pair of its
    begin and end, in seconds.
    """
    joined: list[tuple[float, float]] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.begin, stretch.end)):
        if joined and stretch.begin <= joined[-1][1] + least:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stretch.end))
        else:
            joined.append((stretch.begin, stretch.end))
    return joined


def _ticks(seconds: float) -> list[float]:
    """Return up to seven round times from 0 to `seconds`, for the axis of a timeline."""
    one = 1e-6
    while True:
        for step in (one, 2 * one, 5 * one):
            if seconds / step <= 6:
                return [step * number for number in range(int(seconds / step) + 1)]
        one *= 10


__all__ = [
    "BusyInterval",
    "Timeline",
    "graph_fragment",
    "graph_html",
    "picture_context",
    "placed_html",
    "plan_fragment",
    "plan_html",
    "template",
]
