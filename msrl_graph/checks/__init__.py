"""What the compiler refuses, one concern a file. A check of a graph is a pure function `(graph, library) ->
diagnostics`.

Invariant: checks judge, they never change a graph; each mistake is told once, none that only follows from another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ..diagnostics import Diagnostic
from ..dsl.dropped import Dropped, missed
from ..ir.graph import Graph
from . import (
    columns,
    edges,
    filters,
    followers,
    levels,
    liveness,
    optimizers,
    scope,
    staleness,
    states,
    temperature,
    terms,
)
from .columns import Library

Check = Callable[[Graph, Library], list[Diagnostic]]
CHECKS: tuple[Check, ...] = (
    columns.two_writers,
    states.two_setters,
    columns.never_written,
    edges.cycle,
    columns.unreachable,
    columns.no_path,
    edges.unknown_verb,
    edges.frozen_update,
    followers.stated,
    edges.bad_reshard,
    edges.no_reshard,
    scope.term_column,
    terms.term_worker,
    terms.token_columns,
    terms.of_rows,
    terms.one_column,
    scope.stale_logp,
    scope.bad_scope,
    levels.no_common_row,
    levels.value_of_row,
    states.state_scope,
    states.weighed,
    optimizers.rated,
    optimizers.shared,
    filters.broken_groups,
    filters.adaptive,
    filters.refilled_batch,
    filters.refilled_twice,
    filters.rows_apart,
    filters.unfiltered,
    filters.compared,
    liveness.starved,
    scope.written,
    scope.results,
    scope.too_long,
    temperature.one_number,
    temperature.greedy,
    temperature.equal,
    scope.own_metric,
    staleness.missing,
    staleness.uncorrected,
    states.unread,
    states.unset,
    terms.unused_reads,
    terms.unread_mask,
    terms.joined_pair,
    columns.unused,
)
# These stay true of a graph of which some statements could not be read; the others might follow from what is missing.
STURDY: tuple[Check, ...] = (columns.two_writers, edges.cycle, edges.unknown_verb, edges.frozen_update)
# Mistakes in values, which take no name, node or edge out of the graph.
VALUES = {
    "bad-layout",
    "bad-place",
    "bad-unit",
    "bad-value",
    "division-by-zero",
    "no-deploy",
    "unknown-attribute",
    "unknown-device",
    "unknown-engine",
    "unknown-model",
    "unknown-unit",
}
# These count rows: where a number of rows could not be read, they would be of one that nobody wrote.
COUNTING: tuple[Check, ...] = (liveness.starved, scope.stale_logp, filters.refilled_batch)
COUNTS = ("`samples` ", "`source` ", "`epochs` ", "`mini_batch` ", "`stream` ", "`/` ")


def check(
    graph: Graph,
    library: Library,
    told: Sequence[Diagnostic] = (),
    reported: Collection[str] = (),
    dropped: Mapping[str, Dropped] | None = None,
) -> list[Diagnostic]:
    """All that the checks find. `told` is what lowering found already, `reported` the columns that evaluations read,
    `dropped` what the algorithm dropped of those that it extends."""
    whole = all(d.code in VALUES for d in told if d.severity == "error")
    last = partial(columns.unused, reported=reported)
    checks = [last if c is columns.unused else c for c in CHECKS] if whole else STURDY
    if any(d.message.startswith(COUNTS) for d in told if d.severity == "error"):
        checks = [c for c in checks if c not in COUNTING]
    known = {(d.code, d.span) for d in told}
    found = sorted(
        (missed(d, dropped or {}) for c in checks for d in c(graph, library) if (d.code, d.span) not in known),
        key=lambda d: d.span,
    )
    errors = [d for d in found if d.severity == "error"]
    # A warning may follow from a mistake.
    return errors if errors or not all(d.severity == "warning" for d in told) else found
