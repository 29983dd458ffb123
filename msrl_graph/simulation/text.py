"""A simulation as text: how long iterations take, and what they wait for.

Invariant: the text fits 100 columns, and the same simulation gives the same bytes.
"""

from __future__ import annotations

from ..analysis.sequences import token_columns
from ..diagnostics.quantities import duration, plural
from ..diagnostics.text_page import WIDTH, Page
from ..ir.plan import FUNCTIONS
from ..passes.estimate import describe_filters
from .assumptions import generated_columns
from .lanes import LaneSpan
from .result import RESHARD, Simulation


def simulation_text(simulation: Simulation, width: int = WIDTH, colour: bool = False) -> str:
    """Format the result of a simulation as text."""
    page = Page(width, colour)
    plan = simulation.plan
    more = f"{plural(len(simulation.iterations), 'iteration')}, seed {simulation.specs.seed}"
    page.heading(f"Simulation of {plan.graph.name} on {plan.cluster.name}", more)
    lengths = [
        (column, str(simulation.specs.lengths.get(column, "at the bound")), *_length_statistics(simulation, column))
        for column in token_columns(plan.graph)
    ]
    page.table(("tokens of", "sampled from", "mean", "median", "longest"), lengths, (2, 3, 4))
    page.line(f"stragglers: {simulation.specs.stragglers}")
    for name, seconds in simulation.specs.functions.items():
        page.line(f"seconds per row of {name}: {seconds}")
    _write_iterations(page, simulation)
    _write_work(page, simulation)
    _write_timeline(page, simulation, width)
    return page.text()


def _length_statistics(simulation: Simulation, column: str) -> tuple[str, str, str]:
    rows = sorted(length for lengths in simulation.lengths for length in lengths[column])
    return f"{sum(rows) / len(rows):,.0f}", f"{rows[(len(rows) - 1) // 2]:,}", f"{rows[-1]:,}"


def _write_iterations(page: Page, simulation: Simulation) -> None:
    page.heading("Iterations")
    quantiles = f"median {duration(simulation.quantile(0.5))}, 95th percentile {duration(simulation.quantile(0.95))}"
    page.line(f"an iteration: {duration(simulation.seconds)} on average; {quantiles}")
    if simulation.plan.estimate is not None:
        page.line(
            f"the estimate with every row at its bound: {duration(simulation.plan.estimate.iteration_seconds.value)}"
        )
    rate = f"{_format_rate(simulation.throughput)} tokens/s/device at the rows' own lengths (arXiv:2507.19017, eq. 5)"
    page.line(f"throughput: {rate}; {_format_rate(simulation.tokens_per_second)} for all devices")
    same = sum(iteration.path == simulation.path for iteration in simulation.iterations)
    page.line(f"critical path of {same} of {len(simulation.iterations)}: {' > '.join(simulation.path)}")
    if generated_columns(simulation.plan.graph):
        page.line(
            f"tail: for {100 * simulation.tail:.1f} % of the generation's time, fewer than half of the peak's "
            "sequences are live"
        )
    stale = sum(iteration.staleness for iteration in simulation.iterations) / len(simulation.iterations)
    if words := describe_filters(simulation.plan.graph):
        page.line(words)
    if most := max(iteration.most_stale for iteration in simulation.iterations):
        page.line(f"staleness: rows are {stale:.2f} versions old on average, at most {most}")


def _format_rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _write_work(page: Page, simulation: Simulation) -> None:
    page.heading("Work by pool", "seconds per iteration")
    rows = []
    for pool, size in simulation.sizes.items():
        work = [node_work for node_work in simulation.work if node_work.pool == pool]
        if pool == FUNCTIONS and not work:
            continue
        title = pool
        if pool == FUNCTIONS:
            lanes_per_host = size // (nodes := simulation.plan.cluster.nodes)
            title = plural(nodes, "host") + (f", {lanes_per_host} lanes" if lanes_per_host > 1 else "")
        for node_work in work:
            rows.append(
                (
                    title,
                    node_work.name,
                    duration(node_work.span),
                    duration(node_work.mean),
                    duration(node_work.most),
                    f"{100 * node_work.share:.1f} %",
                )
            )
            title = ""
        rows.append((title, "idle", "", "", "", f"{100 * simulation.idle(pool):.1f} %"))
    page.table(("pool", "node", "first to last", "mean", "busiest", "share"), rows, (2, 3, 4, 5), (0, 1))
    page.line("idle: waiting for rows, slower devices or weights")


def _write_timeline(page: Page, simulation: Simulation, width: int) -> None:
    """Write the timeline of one iteration, with one line per pool.

    The iteration is the one whose seconds are the median of all iterations.
    """
    shown = sorted(simulation.iterations, key=lambda iteration: (iteration.seconds, iteration.number))[
        (len(simulation.iterations) - 1) // 2
    ]
    if not shown.seconds:
        return
    names = dict.fromkeys(work.name for work in simulation.work if simulation.idle(work.pool) < 0.995)
    letters = _choose_letters(list(names))
    pools = [pool for pool in simulation.sizes if simulation.idle(pool) < 0.995]
    label_width = max(map(len, map(_pool_label, pools)), default=0)
    cells = width - label_width - 6
    page.heading(f"Iteration {shown.number}", f"{duration(shown.seconds)} from left to right")
    for pool in pools:
        spans = [
            span for span in simulation.spans if span.pool == pool and span.end > shown.begin and span.begin < shown.end
        ]
        page.line(
            f"{_pool_label(pool):<{label_width}} |"
            f"{_format_bar(spans, shown.begin, shown.seconds / cells, cells, simulation.sizes[pool], letters)}|"
        )
    legend = ", ".join(f"{letters[name]} {name}" for name in names)
    page.line(f"{legend}; lower case: less than half of the devices; dots: none")


def _pool_label(name: str) -> str:
    return "hosts" if name == FUNCTIONS else name


def _choose_letters(names: list[str]) -> dict[str, str]:
    """Choose a letter for each node's name: the first free letter of the node's verb.

    If all letters of the verb are used, the first free letter of the alphabet is chosen. `=` is for resharding.
    """
    letters: dict[str, str] = {}
    for name in names:
        wanted = "=" if name == RESHARD else ""
        for letter in wanted or [*name.rpartition(".")[2].upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]:
            if letter not in letters.values() and (letter.isalpha() or wanted):
                letters[name] = letter
                break
        else:
            letters[name] = "*"
    return letters


def _format_bar(
    spans: list[LaneSpan], begin: float, cell_seconds: float, cells: int, devices: int, letters: dict[str, str]
) -> str:
    busy: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        first = max(0, int((span.begin - begin) / cell_seconds))
        last = min(cells - 1, int((span.end - begin) / cell_seconds))
        for cell in range(first, last + 1):
            inside = min(span.end, begin + (cell + 1) * cell_seconds) - max(span.begin, begin + cell * cell_seconds)
            if inside > 0:
                busy[cell][span.name] = busy[cell].get(span.name, 0.0) + inside * span.width
    out = ""
    for parts in busy:
        # Python versions differ in the last digits of sums.
        share = round(sum(parts.values()) / (cell_seconds * devices), 9)
        letter = letters[max(parts, key=lambda name: (parts[name], name))] if share >= 0.005 else "."
        out += letter if share >= 0.5 else letter.lower()
    return out
