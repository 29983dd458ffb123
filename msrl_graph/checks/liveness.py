"""Checks for starvation: a node waits for a batch that is never complete.

Invariant: a node is reported only if it starves for all possible results of functions and for all possible lengths of
rows. Rows that a filter could drop are counted as rows that remain. The number of rows after a `select` is unknown,
since a `select` may repeat rows. So nodes after a `select` are not reported. Sizes in bytes are for columns of maximum
length, as in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..analysis.async_schedule import count_lanes
from ..analysis.sequences import is_tokens, length_columns
from ..diagnostics import Diagnostic
from ..ir.attributes import CallAttributes, SampleEdgeAttributes, UpdateAttributes
from ..ir.graph import Edge, Graph, Node
from ..ir.plan import PhaseMemory, Plan
from .columns import Library
from .stage import PlanContext


def starved_nodes(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that wait for more rows or tokens than an iteration has."""
    repeated = {
        name
        for node in graph.nodes
        if CallAttributes.of(node).select is not None
        for name in graph.flow.after(node.name)
    }
    diagnostics: list[Diagnostic] = []
    for node in graph.nodes:
        if node.name not in repeated:
            diagnostics += _check_mini_batch(graph, node) if node.verb == "update" else ()
            diagnostics += _check_streams(graph, node)
    return diagnostics


def _describe_rows(graph: Graph, level: int) -> str:
    """Return the number of rows of a level as text, such as `1,024 (128 x 8)`."""
    prompts = graph.rows[0]
    rows = graph.rows[level]
    return f"{rows:,}" + (f" ({prompts:,} x {rows // prompts:,})" if rows > prompts > 0 else "")


def _check_mini_batch(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    level = graph.level(node)
    size = UpdateAttributes.of(node).mini_batch
    rows = graph.rows[level]
    if size is not None and size > rows > 0:
        message = (
            f"`{node.name}` waits for a mini-batch of {size:,} rows, but an iteration has "
            f"{_describe_rows(graph, level)}"
        )
        help = f"set `mini_batch = {rows}`, all of them, or take more prompts per iteration"
        yield Diagnostic("dock-starves", message, node.span_of("mini_batch"), help)


def _check_streams(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    for edge in graph.into(node.name):
        options = SampleEdgeAttributes.of(edge)
        for key, requested, unit, check in (
            ("stream", options.stream, "of them", _check_units),
            ("stream_tokens", options.stream_tokens, "tokens", _check_tokens),
        ):
            if requested is None:
                continue
            if node.per == "batch":
                message = f"`{node.name}` has `per = batch`, so it gets all rows at once, never {requested:,} {unit}"
                yield Diagnostic("dock-starves", message, edge.span_of(key), f"leave `{key}` out")
            else:
                yield from check(graph, node, edge, requested)


def _check_units(graph: Graph, node: Node, edge: Edge, requested: int) -> Iterator[Diagnostic]:
    level = graph.unit_level(node)
    units = graph.rows[level]
    if requested > units > 0:
        unit = "rows" if level == graph.level(node) else "groups"
        message = (
            f"`{node.name}` waits for batches of {requested:,} {unit}, but an iteration has "
            f"{_describe_rows(graph, level)}"
        )
        help = f"set at most `stream = {units}`, or leave it out to get all {units:,} at once"
        yield Diagnostic("dock-starves", message, edge.span_of("stream"), help)


def _check_tokens(graph: Graph, node: Node, edge: Edge, requested: int) -> Iterator[Diagnostic]:
    columns = length_columns(graph, node)
    if not any(is_tokens(graph, column) for column in columns):
        message = f"`{node.name}` reads no column of tokens, so a batch of {requested:,} tokens is never complete"
        yield Diagnostic("dock-starves", message, edge.span_of("stream_tokens"), "use `stream`, which counts rows")
        return
    level = graph.level(node)
    rows = graph.rows[level]
    row_tokens = sum(times * graph.bound(column) for column, times in columns.items())
    if all(graph.bound(column) for column in columns) and requested > rows * row_tokens > 0:
        message = (
            f"`{node.name}` waits for batches of {requested:,} tokens, but an iteration has {rows * row_tokens:,} "
            f"at most: {_describe_rows(graph, level)} of {row_tokens:,}"
        )
        help = f"set at most `stream_tokens = {rows * row_tokens}`, or leave it out to get all at once"
        yield Diagnostic("dock-starves", message, edge.span_of("stream_tokens"), help)


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report a dock whose `capacity` is too small for the rows that a node waits for.

    The dock must hold all these rows at the same time. The memory section of the plan must be filled.
    """
    return list(_check_capacity(plan))


def _check_capacity(plan: Plan) -> Iterator[Diagnostic]:
    capacity = plan.docks.capacity
    host = plan.cluster.device.host_memory.value
    if not capacity:
        return
    span = plan.deploy.dock.span
    if capacity > host:
        message = f"`capacity` is {_format_size(capacity)}, but a host has {_format_size(host)}"
        yield Diagnostic("bad-value", message, span, "leave it out: the memory of the hosts is then the limit")
        return
    worst = max((memory for memory in plan.memory if memory.place == "host"), key=_row_bytes, default=None)
    if worst is None:
        return

    def least(rows: int) -> int:
        return least_capacity(rows, _largest_row(plan.graph), len(plan.docks.warehouses))

    if (need := least(used := _row_bytes(worst))) <= capacity:
        return
    extra_iterations = count_lanes(plan) - 1
    waits = next(iter(plan.graph.verb("update")), plan.graph.nodes[-1])
    level = plan.graph.level(waits)
    rows = f"{plan.graph.rows[level]:,} rows" + (
        f" of each of {1 + extra_iterations} iterations" if extra_iterations else ""
    )
    message = (
        f"`{waits.name}` waits for {rows}; by then the dock holds {_format_size(need)} per host, but "
        f"`capacity` is {_format_size(capacity)}"
    )
    help = f"`capacity = {_round_up(need)}`"
    if need > host:
        help = f"a host has {_format_size(host)}: add hosts, which share the rows, or take fewer prompts per iteration"
    elif extra_iterations:
        help += f"; or without `staleness`, `capacity = {_round_up(least(-(-used // (1 + extra_iterations))))}`"
    else:
        help += "; or add hosts, or take fewer prompts per iteration"
    yield Diagnostic("dock-starves", message, span, help)


def least_capacity(rows: int, largest: int, warehouses: int) -> int:
    """Return a capacity per warehouse that is enough for `rows` bytes per host.

    All sizes are in bytes. `largest` is the size of the largest row. With several warehouses, a row that does not fit
    on its own host is stored on another host. A capacity of `rows + largest` is then enough. Proof: suppose that the
    largest row fits on no host. Each host then has less than `largest` bytes left, so it stores more than `rows` bytes.
    But all hosts together have only `rows` bytes per host.
    """
    return rows + (largest if warehouses > 1 else 0)


def _largest_row(graph: Graph) -> int:
    return max(
        (size // max(graph.rows[graph.column(column).level], 1) for column, size in graph.column_bytes.items()),
        default=0,
    )


def _row_bytes(memory: PhaseMemory) -> int:
    return memory.items.get("rows", 0)


def _round_up(need: float) -> str:
    """Round a number of bytes up to three significant digits; return it with a unit."""
    unit, size = next(
        (name, scale)
        for name, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))
        if need >= scale or scale == 1
    )
    step = max(1, 10 ** (len(str(int(need))) - 3))
    return f"{-(-int(need) // step) * step / size:g} {unit}"


def _format_size(number: float) -> str:
    unit, size = next(
        (name, scale)
        for name, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1))
        if number >= scale or scale == 1
    )
    return f"{number / size:.3g} {unit}"
