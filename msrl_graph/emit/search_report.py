"""The reasons for a plan: the choice of the search, and why other plans lose.

Invariant: the figures of a runner-up (a plan that the search did not choose) are computed by the same passes as the
figures of the chosen plan. If only a lower bound of a runner-up's time is known, the text says so.
"""

from __future__ import annotations

from ..diagnostics.quantities import duration
from ..diagnostics.text_page import WIDTH, Page
from ..ir.plan import Plan
from ..ir.search_record import MARGIN, Candidate, SearchRecord
from ..passes.place import compare_rival


def why_text(plan: Plan, other: SearchRecord | None = None, width: int = WIDTH, colour: bool = False) -> str:
    """Describe the search that chose the layouts of a plan.

    If the file states all layouts of the plan, `other` is the result of a search that ignores the stated layouts.
    """
    page = Page(width, colour)
    if plan.search is not None and other is None:
        _write_search(page, "Search", plan.search)
        return page.text()
    if plan.search is None:
        page.heading("Search", "nothing to choose: the file states every layout")
    else:
        _write_search(page, "Search", plan.search, "engines (the file states every layout)")
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
        _write_search(page, "What the search would choose", other)
    return page.text()


def _write_search(page: Page, heading: str, record: SearchRecord, choices: str = "pools, layouts and engines") -> None:
    page.heading(
        heading,
        f"{record.candidates:,} combinations of {choices}, {record.evaluated:,} of them evaluated by all passes",
    )
    if not record.seconds:
        page.line(f"nothing that fits was found: {record.ended}")
    else:
        page.line(_describe_choice(record))
    if record.rival is not None:
        page.line(compare_rival(record, record.rival))
    rows = [
        (
            "chosen",
            _format_layouts(record.best),
            duration(record.seconds) if record.seconds else "-",
            record.best.wrong or "-",
        )
    ]
    if record.fastest is not None:
        fastest = _describe_loss(record.fastest, record.seconds)
        rows.append(("fastest", _format_layouts(record.fastest), _format_seconds(record.fastest), fastest))
    for number, runner in enumerate(record.runners, 1):
        rows.append(
            (str(number), _format_layouts(runner), _format_seconds(runner), _describe_loss(runner, record.seconds))
        )
    page.table(("", "pools, layouts, engines", "iteration", "loses by"), rows, (2,))


def _describe_choice(record: SearchRecord) -> str:
    """Describe how the chosen plan compares with all others."""
    takes = f"an iteration of {duration(record.seconds)}"
    margin = f"{100 * MARGIN:.0f} %"
    if record.candidates == 1:
        return f"{takes}: there is no other combination"
    if record.optimal:
        return f"{takes} is optimal in the plan's own model: any other takes over {margin} longer"
    found = "" if record.is_proven else " that was found"
    if record.fastest is None:
        choice = f"{takes} is the fastest{found}, and {_simplest(record)} within {margin} of it"
    else:
        fastest = f"the fastest{found}, {duration(record.fastest_seconds)}"
        choice = f"{takes} is {_simplest(record)} within {margin} of {fastest}: {record.reason}"
    if record.is_proven:
        return choice
    gap = (
        f"no plan takes less than {duration(record.bound)}, a gap of {record.percent}"
        if record.bound
        else "no bound is known for the other plans"
    )
    return f"{record.ended} ended the search at {duration(record.seconds)}: {gap}. {choice[0].upper()}{choice[1:]}"


def _simplest(record: SearchRecord) -> str:
    return "the simplest" if record.is_simplest else "the simplest that was found"


def _format_layouts(candidate: Candidate) -> str:
    return "\n".join([*candidate.pools, *(f"{node}: {layout}" for node, layout in candidate.layouts.items())])


def _format_seconds(candidate: Candidate) -> str:
    return (
        duration(candidate.seconds)
        if candidate.exact
        else f">= {duration(candidate.seconds)}"
        if candidate.seconds
        else "-"
    )


def _describe_loss(candidate: Candidate, best: float) -> str:
    """Describe how much slower a candidate is than the chosen plan.

    A candidate is another combination of pools and layouts. `best` is the number of seconds that an iteration of the
    chosen plan takes. The text has the total difference in seconds, and the four phases with the largest differences.
    If a candidate cannot be used, the text is the reason why.
    """
    if candidate.wrong:
        return f"does not fit: {candidate.wrong}"
    loss = candidate.seconds - best
    if not candidate.exact:
        return f"at least {duration(loss)}, without resharding" if loss > 0 else "not evaluated"
    parts = sorted(candidate.loses.items(), key=lambda part: (-abs(part[1]), part[0]))
    named = ", ".join(
        f"{phase} {'+' if seconds > 0 else '-'}{duration(abs(seconds))}"
        for phase, seconds in parts[:4]
        if abs(seconds) > 1e-6
    )
    total = duration(loss) if loss > 0 else f"faster by {duration(-loss)}" if loss < 0 else "nothing"
    return f"{total}{f': {named}' if named else ''}"
