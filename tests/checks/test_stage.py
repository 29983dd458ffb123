"""Which checks of a stage run, and which of their diagnostics are reported."""

from __future__ import annotations

from msrl_graph.checks.stage import Check, When, run_checks
from msrl_graph.checks.table import CHECKS
from msrl_graph.diagnostics import Diagnostic, Span

HERE = Span("a.rlg", 1, 1, 1, 2)
THERE = Span("a.rlg", 2, 1, 2, 2)


def finding(code: str, span: Span, when: When = When.COMPLETE) -> Check:
    return Check(lambda graph: [Diagnostic(code, f"{code} of {graph}", span)], when)


def codes(*checks: Check, skipped: tuple[When, ...] = (), earlier: tuple[Diagnostic, ...] = ()) -> list[str]:
    return [found.code for found in run_checks(checks, "it", skipped=skipped, earlier=earlier)]


def test_a_later_check_reports_elsewhere_only() -> None:
    first = finding("bad-layout", HERE)
    assert codes(first, finding("bad-value", HERE, When.ELSEWHERE)) == ["bad-layout"]
    assert codes(first, finding("bad-value", THERE, When.ELSEWHERE)) == ["bad-layout", "bad-value"]
    assert codes(first, finding("bad-value", HERE)) == ["bad-layout", "bad-value"]


def test_a_check_for_a_clean_stage_runs_last() -> None:
    last = finding("out-of-memory", THERE, When.CLEAN)
    assert codes(finding("bad-layout", HERE), last) == ["bad-layout"]
    assert codes(last) == ["out-of-memory"]
    assert codes(last, earlier=(Diagnostic("bad-value", "", HERE),)) == []


def test_what_could_not_be_read_leaves_out_checks() -> None:
    checks = [
        finding("bad-value", THERE, When.ALWAYS),
        finding("bad-layout", THERE),
        finding("dock-starves", THERE, When.COUNTED),
    ]
    assert codes(*checks) == ["bad-value", "bad-layout", "dock-starves"]
    assert codes(*checks, skipped=(When.COUNTED,)) == ["bad-value", "bad-layout"]
    assert codes(*checks, skipped=(When.COUNTED, When.COMPLETE)) == ["bad-value"]


def test_each_check_is_listed_once() -> None:
    listed = [check.find for checks in CHECKS.values() for check in checks]
    assert len(listed) == len({*listed}) > 50
