"""A trial of a user's loss terms before the run (loss_split_check.py).

Invariant: the result of a loss term for a row must not depend on the other rows of the micro-batch. If the trial finds
such a dependence, the plan does not run. The trial runs in a separate process, because a user's code may crash, hang or
print, and because importing torch takes seconds. The process ends before the run starts anything else. The process is
started only if the plan has a loss term of a user.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from ...checks.scope import span
from ...diagnostics import Diagnostic
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Expr, Node
from ...ir.plan import Plan

PATIENCE = 120.0  # seconds for all terms of a plan, including the start of the process


def list_user_terms(plan: Plan) -> list[tuple[Node, Expr]]:
    """Return the calls of loss terms that a user's files define.

    Each call is returned with the update node whose loss contains the call.
    """
    return [
        (node, call)
        for node in plan.graph.verb("update")
        for call in UpdateAttributes.of(node).loss.calls()
        if ":" in str(call.value)
    ]


def warn_untried(node: Node, call: Expr, why: str) -> Diagnostic:
    """Return the warning that a loss term could not be tried; `why` is the reason."""
    message = f"`{str(call.value).rpartition(':')[2]}` could not be tried on made-up rows: {why}"
    return Diagnostic(
        "bad-scope",
        message,
        span(call, node),
        "so it is not known whether the micro-batch changes its result for a row",
        "warning",
    )


def try_terms(plan: Plan) -> list[Diagnostic]:
    """Try the loss terms that a user's files define; return the problems found.

    If the terms could not be tried, the result is a warning.
    """
    terms = list_user_terms(plan)
    if not terms:
        return []
    command = (sys.executable, "-P", "-m", "msrl_graph.runtime.rank.loss_split_check")
    try:
        result = subprocess.run(
            command, input=msgspec.json.encode(plan), stdout=subprocess.PIPE, timeout=PATIENCE, check=True
        )
        return msgspec.json.decode(result.stdout, type=list[Diagnostic])
    except (subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return [warn_untried(*terms[0], "its process " + str(error).rpartition("' ")[2].rpartition("] ")[2])]
