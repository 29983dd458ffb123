"""Terms of a loss that stand in a user's files, run before the run: `loss_split_check.py` in a process of its own.

Invariant: no plan is run with a term that is known to give a row something else in another micro-batch. A user's code
may crash, hang or print, and torch takes seconds to load: so a process does it that ends before anything else is
started, and only where there is such a term.
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

PATIENCE = 120.0  # seconds for all terms of a plan, the start of the process among them


def own_terms(plan: Plan) -> list[tuple[Node, Expr]]:
    """The calls of terms that stand in files, each with its update."""
    return [
        (n, call)
        for n in plan.graph.verb("update")
        for call in UpdateAttributes.of(n).loss.calls()
        if ":" in str(call.value)
    ]


def untried(node: Node, call: Expr, why: str) -> Diagnostic:
    """What is told of a term that could not be run."""
    what = f"`{str(call.value).rpartition(':')[2]}` could not be tried on made-up rows: {why}"
    return Diagnostic(
        "bad-scope",
        what,
        span(call, node),
        "so it is not known whether it gives each row the same in any micro-batch",
        "warning",
    )


def tried(plan: Plan) -> list[Diagnostic]:
    """What is wrong with the terms that stand in files; a warning where they could not be run."""
    terms = own_terms(plan)
    if not terms:
        return []
    command = (sys.executable, "-P", "-m", "msrl_graph.runtime.rank.loss_split_check")
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(plan), stdout=subprocess.PIPE, timeout=PATIENCE, check=True
        )
        return msgspec.json.decode(done.stdout, type=list[Diagnostic])
    except (subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return [untried(*terms[0], "its process " + str(error).rpartition("' ")[2].rpartition("] ")[2])]
