"""Why a plan is as it is: the search's choice, the runners-up, and their losses.

Invariant: a runner-up's figures are those of the passes on the plan that it would be; where only a bound is known, the
text says so.
"""

from __future__ import annotations

from ..ir.plan import Plan
from ..ir.search_record import Candidate, SearchRecord
from .humanize import duration, versus
from .text_page import WIDTH, Page


def why_text(plan: Plan, other: SearchRecord | None = None, width: int = WIDTH, colour: bool = False) -> str:
    """Describe the search.

    For a plan whose layouts are all stated, `other` is what the search would find without them.
    """
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
            f"without the stated layouts an iteration would take {duration(best)}, {less} the stated {duration(stated)}"
        )
        _searched(page, "What the search would choose", other)
    return page.text()


def _searched(page: Page, heading: str, found: SearchRecord, of: str = "pools, layouts and engines") -> None:
    page.heading(
        heading, f"{found.candidates:,} combinations of {of}, {found.evaluated:,} of them evaluated by all passes"
    )
    if not found.seconds:
        page.line(f"nothing that fits was found: {found.ended}")
    elif found.optimal:
        page.line(
            f"an iteration of {duration(found.seconds)} is optimal in the plan's own model: no other can be faster"
        )
    else:
        gap = (
            f"no plan takes less than {duration(found.bound)}, a gap of {found.percent}"
            if found.bound
            else "no bound is known for the other plans"
        )
        page.line(f"{found.ended} ended the search at {duration(found.seconds)}: {gap}")
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
    """Describe a candidate's loss, in total and by phase with the largest first.

    For a candidate that cannot be taken, return the reason.
    """
    if candidate.wrong:
        return f"does not fit: {candidate.wrong}"
    whole = candidate.seconds - best
    if not candidate.exact:
        return f"at least {duration(whole)}, without resharding" if whole > 0 else "not evaluated"
    parts = sorted(candidate.loses.items(), key=lambda p: (-abs(p[1]), p[0]))
    named = ", ".join(f"{phase} {'+' if s > 0 else '-'}{duration(abs(s))}" for phase, s in parts[:4] if abs(s) > 1e-6)
    return f"{duration(whole) if whole > 0 else 'nothing'}{f': {named}' if named else ''}"
