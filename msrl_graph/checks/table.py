"""The checks of each stage of a compilation.

A check is a pure function that returns diagnostics. What it reads depends on the stage:

- `graph`: `(graph, library)`. `library` has the signatures of all functions and loss terms that a program may call.
- `evaluated`: `(graph, columns)`. `columns` are those that the deploy's evaluations read.
- `files`: `(plan, context)`, before the first pass. These checks also read the models' folders and the data files.
- `place`, `memory`, `environment`: `(plan, context)`, after the pass with this name.

Invariant: this is the only list of these checks. A new check is a function and a line here. The checks of a machine are
in runtime/driver/preflight.py, because they need the packages of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..diagnostics import Diagnostic
from ..dsl.dropped import Dropped, add_drop_notes
from ..ir.graph import Graph
from ..ir.plan import Plan
from . import (
    adapters,
    columns,
    datafiles,
    edges,
    environments,
    features,
    filters,
    folders,
    followers,
    frozen_weights,
    layout,
    levels,
    lints,
    liveness,
    memory,
    optimizers,
    routing,
    scope,
    sharing,
    staleness,
    states,
    temperature,
    terms,
    tokenizers,
    verb_columns,
)
from .columns import Library
from .stage import Check, PlanContext, When, run_checks

CHECKS: Mapping[str, tuple[Check, ...]] = {
    "graph": (
        Check(columns.two_writers, When.ALWAYS),
        Check(states.two_setters),
        Check(columns.never_written),
        Check(edges.cycle, When.ALWAYS),
        Check(columns.unreachable),
        Check(columns.no_path),
        Check(edges.unknown_verb, When.ALWAYS),
        Check(edges.frozen_update, When.ALWAYS),
        Check(followers.check_followers),
        Check(frozen_weights.check_workers),
        Check(adapters.check_workers),
        Check(edges.bad_reshard),
        Check(edges.no_reshard),
        Check(scope.term_column),
        Check(terms.term_worker),
        Check(terms.token_columns),
        Check(terms.mixed_row_terms),
        Check(terms.one_column),
        Check(scope.stale_logp, When.COUNTED),
        Check(scope.bad_scope),
        Check(levels.no_common_row),
        Check(levels.value_of_row),
        Check(states.state_scope),
        Check(states.equal_weights),
        Check(optimizers.row_learning_rates),
        Check(optimizers.shared_optimizers),
        Check(filters.broken_groups),
        Check(filters.adaptive_refills),
        Check(filters.refilled_batch, When.COUNTED),
        Check(filters.refilled_twice),
        Check(filters.disjoint_filters),
        Check(filters.unfiltered_updates),
        Check(filters.compared_columns),
        Check(liveness.starved_nodes, When.COUNTED),
        Check(verb_columns.check_written_columns),
        Check(scope.result_types),
        Check(routing.check_nodes),
        Check(verb_columns.too_long),
        Check(temperature.one_number),
        Check(temperature.greedy),
        Check(temperature.equal_responses),
        Check(verb_columns.own_metric),
        Check(staleness.missing_staleness),
        Check(staleness.uncorrected),
        Check(states.unread),
        Check(states.unset),
        Check(terms.unused_reads),
        Check(terms.unread_mask),
        Check(terms.joined_pair),
    ),
    "evaluated": (Check(columns.unused),),
    "files": (
        Check(features.check),
        Check(routing.check_sizes),
        Check(frozen_weights.check_models),
        Check(adapters.check_models),
        Check(tokenizers.check),
        Check(folders.check),
        Check(datafiles.check),
    ),
    "place": (
        Check(layout.check),
        Check(sharing.check, When.ELSEWHERE),
        Check(staleness.check, When.ELSEWHERE),
        Check(followers.check_follower_placement, When.ELSEWHERE),
        Check(optimizers.check_moments),
        Check(optimizers.check_decays, When.CLEAN),
        Check(lints.check, When.CLEAN),
    ),
    "memory": (
        Check(liveness.check),
        Check(memory.check, When.CLEAN),
    ),
    "environment": (Check(environments.check),),
}
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
# The beginnings of messages about numbers of rows that could not be read.
COUNTS = ("`samples` ", "`source` ", "`epochs` ", "`mini_batch` ", "`stream` ", "`/` ")


def check_graph(
    graph: Graph,
    library: Library,
    earlier: Sequence[Diagnostic] = (),
    evaluated: Collection[str] = (),
    dropped: Mapping[str, Dropped] | None = None,
) -> list[Diagnostic]:
    """Run the checks of a graph and return their diagnostics, sorted by span.

    - `earlier`: the diagnostics of the compiler pass that made the graph from the program.
    - `evaluated`: the columns that evaluations read.
    - `dropped`: the `drop` statements of an algorithm that extends other algorithms. The keys are the dropped names.
    """
    mistakes = [diagnostic for diagnostic in earlier if diagnostic.severity == "error"]
    skipped = set[When]()
    if any(mistake.code not in VALUES for mistake in mistakes):
        skipped |= {When.COMPLETE, When.COUNTED}
    if any(mistake.message.startswith(COUNTS) for mistake in mistakes):
        skipped.add(When.COUNTED)
    found = [
        *run_checks(CHECKS["graph"], graph, library, skipped=skipped),
        *run_checks(CHECKS["evaluated"], graph, evaluated, skipped=skipped),
    ]
    known = {(diagnostic.code, diagnostic.span) for diagnostic in earlier}
    diagnostics = sorted(
        (
            add_drop_notes(diagnostic, dropped or {})
            for diagnostic in found
            if (diagnostic.code, diagnostic.span) not in known
        ),
        key=lambda diagnostic: diagnostic.span,
    )
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    # A warning may follow from a mistake.
    return errors if errors or not all(diagnostic.severity == "warning" for diagnostic in earlier) else diagnostics


def check_plan(stage: str, plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Run the checks of a plan at a stage; a stage without checks reports nothing."""
    return run_checks(CHECKS.get(stage, ()), plan, context)
