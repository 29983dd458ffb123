"""Checks of programs, one concern per file.

A check of a graph is a pure function `(graph, library) -> diagnostics`. `library` has the signatures of all functions
and loss terms that a program may call.

Invariant: checks never change a graph. Each mistake is reported once. If one mistake causes a second mistake, only the
first mistake is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ..diagnostics import Diagnostic
from ..dsl.dropped import Dropped, add_drop_notes
from ..ir.graph import Graph
from . import (
    columns,
    edges,
    filters,
    followers,
    frozen_weights,
    levels,
    liveness,
    optimizers,
    scope,
    staleness,
    states,
    temperature,
    terms,
    verb_columns,
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
    followers.check_followers,
    frozen_weights.check_workers,
    edges.bad_reshard,
    edges.no_reshard,
    scope.term_column,
    terms.term_worker,
    terms.token_columns,
    terms.mixed_row_terms,
    terms.one_column,
    scope.stale_logp,
    scope.bad_scope,
    levels.no_common_row,
    levels.value_of_row,
    states.state_scope,
    states.equal_weights,
    optimizers.row_learning_rates,
    optimizers.shared_optimizers,
    filters.broken_groups,
    filters.adaptive_refills,
    filters.refilled_batch,
    filters.refilled_twice,
    filters.disjoint_filters,
    filters.unfiltered_updates,
    filters.compared_columns,
    liveness.starved_nodes,
    verb_columns.check_written_columns,
    scope.result_types,
    verb_columns.too_long,
    temperature.one_number,
    temperature.greedy,
    temperature.equal_responses,
    verb_columns.own_metric,
    staleness.missing_staleness,
    staleness.uncorrected,
    states.unread,
    states.unset,
    terms.unused_reads,
    terms.unread_mask,
    terms.joined_pair,
    columns.unused,
)
# These checks are valid even if some statements of the program could not be read. Any other check might report a
# mistake that only follows from a missing statement.
STURDY: tuple[Check, ...] = (columns.two_writers, edges.cycle, edges.unknown_verb, edges.frozen_update)
# Codes of mistakes in values. Such a mistake removes no name, node or edge from the graph.
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
# These checks count rows. If a number of rows could not be read, they would use a number that is not in the program.
COUNTING: tuple[Check, ...] = (liveness.starved_nodes, scope.stale_logp, filters.refilled_batch)
COUNTS = ("`samples` ", "`source` ", "`epochs` ", "`mini_batch` ", "`stream` ", "`/` ")


def check(
    graph: Graph,
    library: Library,
    earlier: Sequence[Diagnostic] = (),
    reported: Collection[str] = (),
    dropped: Mapping[str, Dropped] | None = None,
) -> list[Diagnostic]:
    """Run the checks of a graph and return their diagnostics, sorted by span.

    - `earlier`: the diagnostics of the compiler pass that made the graph from the program.
    - `reported`: the columns that evaluations read.
    - `dropped`: the `drop` statements of an algorithm that extends other algorithms. The keys are the dropped names.
    """
    only_values = all(diagnostic.code in VALUES for diagnostic in earlier if diagnostic.severity == "error")
    last = partial(columns.unused, reported=reported)
    checks = [last if rule is columns.unused else rule for rule in CHECKS] if only_values else STURDY
    if any(diagnostic.message.startswith(COUNTS) for diagnostic in earlier if diagnostic.severity == "error"):
        checks = [rule for rule in checks if rule not in COUNTING]
    known = {(diagnostic.code, diagnostic.span) for diagnostic in earlier}
    diagnostics = sorted(
        (
            add_drop_notes(diagnostic, dropped or {})
            for rule in checks
            for diagnostic in rule(graph, library)
            if (diagnostic.code, diagnostic.span) not in known
        ),
        key=lambda diagnostic: diagnostic.span,
    )
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    # A warning may follow from a mistake.
    return errors if errors or not all(diagnostic.severity == "warning" for diagnostic in earlier) else diagnostics
