"""Why a plan is as it is: what a search over layouts took, the runners-up, and what each loses by.

Invariant: a runner-up's figures are those of the passes on the plan that it would be; where only a bound is known, that
is said.
"""

from __future__ import annotations

from ..ir.plan import Plan
from ..ir.search_record import Candidate, SearchRecord
from .humanize import duration, versus
from .text_page import WIDTH, Page


def why_text(plan: Plan, other: SearchRecord | None = None, width: int = WIDTH, colour: bool = False) -> str:
    """What the search found; for a plan whose layouts are all stated, `other` is what it would have found without
    them."""
    page = Page(width, colour)
    if plan.search is not None and other is None:
        _searched(page, "Search", plan.search)
        return page.text()
    if plan.search is None:
        page.heading("Search", "nothing to choose: the file states every layout")
    else:
        _searched(page, "Search", plan.search, "engines (the file states every layout)")
    if other is not None and other.seconds and plan.estimate is not None:
        stated = plan.estimate.iteration_seconds.value
        best = other.seconds
        less = (
            f"{100 * (1 - best / stated):.2g} % less than"
            if best < stated
            else "as long as"
            if best == stated
            else "longer than"
        )
        page.line(
            f"without them an iteration would take {duration(best)}, {less} the {duration(stated)} of what is stated"
        )
        _searched(page, "What the search would take", other)
    return page.text()


def _searched(page: Page, heading: str, found: SearchRecord, of: str = "pools, layouts and engines") -> None:
    page.heading(
        heading, f"{found.candidates:,} combinations of {of}, of which {found.evaluated:,} went through all passes"
    )
    if not found.seconds:
        page.line(f"nothing that fits was found: {found.ended}")
    elif found.optimal:
        page.line(
            f"an iteration of {duration(found.seconds)} is optimal in the plan's own model: all others are bounded by "
            "as much or more"
        )
    else:
        gap = (
            f"none takes less than {duration(found.bound)}, a gap of {found.percent}"
            if found.bound
            else "of the others no bound is known"
        )
        page.line(f"{found.ended} ended it at {duration(found.seconds)}: {gap}")
    if found.rival is not None:
        page.line(versus(found, found.rival))
    rows = [
        ("chosen", _layouts(found.best), duration(found.seconds) if found.seconds else "-", found.best.wrong or "-")
    ]
    for number, runner in enumerate(found.runners, 1):
        rows.append((str(number), _layouts(runner), _seconds(runner), _loses(runner, found.seconds)))
    page.table(("", "pools, layouts, engines", "iteration", "loses by"), rows, (2,))


def _layouts(candidate: Candidate) -> str:
    return "\n".join([*candidate.pools, *(f"{node}: {layout}" for node, layout in candidate.layouts.items())])


def _seconds(candidate: Candidate) -> str:
    return (
        duration(candidate.seconds)
        if candidate.exact
        else f">= {duration(candidate.seconds)}"
        if candidate.seconds
        else "-"
    )


def _loses(candidate: Candidate, best: float) -> str:
    """What a candidate loses in all and by phase, the most first; or why it cannot be taken."""
    if candidate.wrong:
        return f"does not fit: {candidate.wrong}"
    whole = candidate.seconds - best
    if not candidate.exact:
        return f"at least {duration(whole)}, without resharding" if whole > 0 else "not evaluated"
    parts = sorted(candidate.loses.items(), key=lambda p: (-abs(p[1]), p[0]))
    named = ", ".join(f"{phase} {'+' if s > 0 else '-'}{duration(abs(s))}" for phase, s in parts[:4] if abs(s) > 1e-6)
    return f"{duration(whole) if whole > 0 else 'nothing'}{f': {named}' if named else ''}"
