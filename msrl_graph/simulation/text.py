"""A simulation as text: how long iterations take, and what they wait for.

Invariant: it fits 100 columns; the same simulation gives the same bytes.
"""

from __future__ import annotations

from ..emit.humanize import duration, many
from ..emit.text_page import WIDTH, Page
from ..ir.plan import FUNCTIONS
from ..ir.sequences import token_columns
from ..passes.estimate import unfiltered
from .assumptions import generated
from .lanes import LaneSpan
from .result import RESHARD, Simulation


def simulation_text(found: Simulation, width: int = WIDTH, colour: bool = False) -> str:
    """Format a simulation."""
    page = Page(width, colour)
    plan = found.plan
    more = f"{many(len(found.iterations), 'iteration')}, seed {found.specs.seed}"
    page.heading(f"Simulation of {plan.graph.name} on {plan.cluster.name}", more)
    lengths = [
        (c, str(found.specs.lengths.get(c, "at the bound")), *_spread(found, c)) for c in token_columns(plan.graph)
    ]
    page.table(("tokens of", "sampled from", "mean", "median", "longest"), lengths, (2, 3, 4))
    page.line(f"stragglers: {found.specs.stragglers}")
    for name, seconds in found.specs.functions.items():
        page.line(f"seconds per row of {name}: {seconds}")
    _iterations(page, found)
    _work(page, found)
    _timeline(page, found, width)
    return page.text()


def _spread(found: Simulation, column: str) -> tuple[str, str, str]:
    rows = sorted(n for lengths in found.lengths for n in lengths[column])
    return f"{sum(rows) / len(rows):,.0f}", f"{rows[(len(rows) - 1) // 2]:,}", f"{rows[-1]:,}"


def _iterations(page: Page, found: Simulation) -> None:
    page.heading("Iterations")
    quantiles = f"median {duration(found.quantile(0.5))}, 95th percentile {duration(found.quantile(0.95))}"
    page.line(f"an iteration: {duration(found.seconds)} on average; {quantiles}")
    if found.plan.estimate is not None:
        page.line(f"the estimate with every row at its bound: {duration(found.plan.estimate.iteration_seconds.value)}")
    rate = f"{_rate(found.throughput)} tokens/s/device at the rows' own lengths (arXiv:2507.19017, eq. 5)"
    page.line(f"throughput: {rate}; {_rate(found.tokens_per_second)} for all devices")
    same = sum(i.path == found.path for i in found.iterations)
    page.line(f"critical path of {same} of {len(found.iterations)}: {' > '.join(found.path)}")
    if generated(found.plan.graph):
        page.line(
            f"tail: for {100 * found.tail:.1f} % of the generation's time, fewer than half of the peak's sequences are "
            "live"
        )
    stale = sum(i.staleness for i in found.iterations) / len(found.iterations)
    if words := unfiltered(found.plan.graph):
        page.line(words)
    if most := max(i.most_stale for i in found.iterations):
        page.line(f"staleness: rows are {stale:.2f} versions old on average, at most {most}")


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _work(page: Page, found: Simulation) -> None:
    page.heading("Work by pool", "seconds per iteration")
    rows = []
    for pool, size in found.sizes.items():
        work = [w for w in found.work if w.pool == pool]
        if pool == FUNCTIONS and not work:
            continue
        what = pool
        if pool == FUNCTIONS:
            each = size // (nodes := found.plan.cluster.nodes)
            what = many(nodes, "host") + (f", {each} lanes" if each > 1 else "")
        for w in work:
            rows.append((what, w.name, duration(w.span), duration(w.mean), duration(w.most), f"{100 * w.share:.1f} %"))
            what = ""
        rows.append((what, "idle", "", "", "", f"{100 * found.idle(pool):.1f} %"))
    page.table(("pool", "node", "first to last", "mean", "busiest", "share"), rows, (2, 3, 4, 5), (0, 1))
    page.line("idle: waiting for rows, slower devices or weights")


def _timeline(page: Page, found: Simulation, width: int) -> None:
    """Write the iteration of median time, one line per pool."""
    shown = sorted(found.iterations, key=lambda i: (i.seconds, i.number))[(len(found.iterations) - 1) // 2]
    if not shown.seconds:
        return
    names = dict.fromkeys(w.name for w in found.work if found.idle(w.pool) < 0.995)
    letters = _letters(list(names))
    pools = [p for p in found.sizes if found.idle(p) < 0.995]
    left = max(map(len, map(_pool, pools)), default=0)
    cells = width - left - 6
    page.heading(f"Iteration {shown.number}", f"{duration(shown.seconds)} from left to right")
    for pool in pools:
        spans = [s for s in found.spans if s.pool == pool and s.end > shown.begin and s.begin < shown.end]
        page.line(
            f"{_pool(pool):<{left}} |"
            f"{_bar(spans, shown.begin, shown.seconds / cells, cells, found.sizes[pool], letters)}|"
        )
    legend = ", ".join(f"{letters[n]} {n}" for n in names)
    page.line(f"{legend}; lower case: less than half of the devices; dots: none")


def _pool(name: str) -> str:
    return "hosts" if name == FUNCTIONS else name


def _letters(names: list[str]) -> dict[str, str]:
    """Choose a letter for each name: its verb's first letter if that is free."""
    found: dict[str, str] = {}
    for name in names:
        wanted = "=" if name == RESHARD else ""
        for letter in wanted or [*name.rpartition(".")[2].upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]:
            if letter not in found.values() and (letter.isalpha() or wanted):
                found[name] = letter
                break
        else:
            found[name] = "*"
    return found


def _bar(spans: list[LaneSpan], begin: float, each: float, cells: int, devices: int, letters: dict[str, str]) -> str:
    busy: list[dict[str, float]] = [{} for _ in range(cells)]
    for s in spans:
        first = max(0, int((s.begin - begin) / each))
        last = min(cells - 1, int((s.end - begin) / each))
        for cell in range(first, last + 1):
            inside = min(s.end, begin + (cell + 1) * each) - max(s.begin, begin + cell * each)
            if inside > 0:
                busy[cell][s.name] = busy[cell].get(s.name, 0.0) + inside * s.width
    out = ""
    for parts in busy:
        share = round(sum(parts.values()) / (each * devices), 9)  # Python versions differ in the last digits of sums
        letter = letters[max(parts, key=lambda n: (parts[n], n))] if share >= 0.005 else "."
        out += letter if share >= 0.5 else letter.lower()
    return out
