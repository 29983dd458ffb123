"""A dock that can starve: the batch that a node waits for can never be complete.

Invariant: told only where it is certain, whatever the functions do and however long rows are: rows that a filter may
drop count as there; where `select` may repeat rows, their number is not known and nothing is told. Bytes are those at
the columns' bounds, as in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics import Diagnostic
from ..ir.async_schedule import lanes
from ..ir.attributes import CallAttributes, SampleEdgeAttributes, UpdateAttributes
from ..ir.graph import Edge, Graph, Node
from ..ir.plan import PhaseMemory, Plan
from ..ir.sequences import is_tokens, weighs
from .columns import Library


def starved(graph: Graph, library: Library) -> list[Diagnostic]:
    """Batches of more rows than there are."""
    repeated = {
        n for node in graph.nodes if CallAttributes.of(node).select is not None for n in graph.flow.after(node.name)
    }
    found: list[Diagnostic] = []
    for node in graph.nodes:
        if node.name not in repeated:
            found += _mini_batch(graph, node) if node.verb == "update" else ()
            found += _streams(graph, node)
    return found


def _has(graph: Graph, level: int) -> str:
    """How many rows an iteration has, in words."""
    prompts = graph.rows[0]
    rows = graph.rows[level]
    return f"{rows:,}" + (f" ({prompts:,} x {rows // prompts:,})" if rows > prompts > 0 else "")


def _mini_batch(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    level = graph.level(node)
    size = UpdateAttributes.of(node).mini_batch
    rows = graph.rows[level]
    if size is not None and size > rows > 0:
        message = f"`{node.name}` waits for a mini-batch of {size:,} rows, and an iteration has {_has(graph, level)}"
        help = f"`mini_batch = {rows}` is all of them; or more prompts an iteration"
        yield Diagnostic("dock-starves", message, node.at("mini_batch"), help)


def _streams(graph: Graph, node: Node) -> Iterator[Diagnostic]:
    for edge in graph.into(node.name):
        said = SampleEdgeAttributes.of(edge)
        for key, asked, what, check in (
            ("stream", said.stream, "of them", _units),
            ("stream_tokens", said.stream_tokens, "tokens", _tokens),
        ):
            if asked is None:
                continue
            if node.per == "batch":
                message = f"`{node.name}` has `per = batch`: it is handed all rows at once, never {asked:,} {what}"
                yield Diagnostic("dock-starves", message, edge.at(key), f"leave `{key}` out")
            else:
                yield from check(graph, node, edge, asked)


def _units(graph: Graph, node: Node, edge: Edge, asked: int) -> Iterator[Diagnostic]:
    level = graph.unit_level(node)
    units = graph.rows[level]
    if asked > units > 0:
        what = "rows" if level == graph.level(node) else "groups"
        message = f"`{node.name}` waits for batches of {asked:,} {what}, and an iteration has {_has(graph, level)}"
        help = f"`stream = {units}` at most; or leave it out: all {units:,} at once"
        yield Diagnostic("dock-starves", message, edge.at("stream"), help)


def _tokens(graph: Graph, node: Node, edge: Edge, asked: int) -> Iterator[Diagnostic]:
    columns = weighs(graph, node)
    if not any(is_tokens(graph, c) for c in columns):
        message = f"`{node.name}` reads no column of tokens, so that {asked:,} of them never come together"
        yield Diagnostic("dock-starves", message, edge.at("stream_tokens"), "say `stream`, which counts rows")
        return
    level = graph.level(node)
    rows = graph.rows[level]
    each = sum(times * graph.bound(c) for c, times in columns.items())
    if all(graph.bound(c) for c in columns) and asked > rows * each > 0:
        message = (
            f"`{node.name}` waits for batches of {asked:,} tokens, and an iteration has {rows * each:,} at most: "
            f"{_has(graph, level)} of {each:,}"
        )
        help = f"`stream_tokens = {rows * each}` at most; or leave it out: all at once"
        yield Diagnostic("dock-starves", message, edge.at("stream_tokens"), help)


def check(plan: Plan) -> list[Diagnostic]:
    """What the dock of a plan, whose memory is counted, can never hold at once."""
    return list(_capacity(plan))


def _capacity(plan: Plan) -> Iterator[Diagnostic]:
    capacity = plan.docks.capacity
    host = plan.cluster.device.host_memory.value
    if not capacity:
        return
    span = plan.deploy.dock.span
    if capacity > host:
        message = f"`capacity` is {_size(capacity)}, and a host has {_size(host)}"
        yield Diagnostic("bad-value", message, span, "leave it out: the hosts' memory is the bound")
        return
    worst = max((m for m in plan.memory if m.place == "host"), key=_held, default=None)
    if worst is None:
        return

    def least(rows: int) -> int:
        return least_capacity(rows, _largest(plan.graph), len(plan.docks.warehouses))

    if (need := least(held := _held(worst))) <= capacity:
        return
    ahead = lanes(plan) - 1
    waits = next(iter(plan.graph.verb("update")), plan.graph.nodes[-1])
    level = plan.graph.level(waits)
    rows = f"{plan.graph.rows[level]:,} rows" + (f" of each of {1 + ahead} iterations" if ahead else "")
    message = (
        f"`{waits.name}` waits for {rows}; what lies in the dock by then is {_size(need)} a host, and "
        f"`capacity` is {_size(capacity)}"
    )
    help = f"`capacity = {_rounded(need)}`"
    if need > host:
        help = f"a host has {_size(host)}: more hosts share the rows, or fewer prompts an iteration"
    elif ahead:
        help += f"; or without `staleness`, `capacity = {_rounded(least(-(-held // (1 + ahead))))}`"
    else:
        help += "; or more hosts, or fewer prompts an iteration"
    yield Diagnostic("dock-starves", message, span, help)


def least_capacity(rows: int, largest: int, warehouses: int) -> int:
    """The bytes of each warehouse that are enough for so many bytes of rows a host, the largest row having so many:
    rows that find no place where they are made go to another host, and as long as the largest finds none anywhere, less
    than it is left in each."""
    return rows + (largest if warehouses > 1 else 0)


def _largest(graph: Graph) -> int:
    return max((size // max(graph.rows[graph.column(c).level], 1) for c, size in graph.column_bytes.items()), default=0)


def _held(memory: PhaseMemory) -> int:
    return memory.items.get("rows", 0)


def _rounded(need: float) -> str:
    """A quantity that is not below, of three digits."""
    unit, size = next((u, s) for u, s in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1)) if need >= s or s == 1)
    step = max(1, 10 ** (len(str(int(need))) - 3))
    return f"{-(-int(need) // step) * step / size:g} {unit}"


def _size(number: float) -> str:
    unit, size = next(
        (u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1)) if number >= s or s == 1
    )
    return f"{number / size:.3g} {unit}"
