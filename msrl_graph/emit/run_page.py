"""The page on which a run is watched: the plan's picture, and places for what changes.

Invariant: as a plan's page it holds all that it shows, but asks for facts where it came from, and nowhere else; text of
a program is escaped in it, and what is told later is only ever put there as text.
"""

from __future__ import annotations

import secrets

from ..ir.plan import Plan
from .html import drawn, template
from .picture import plan_picture


def watch_html(plan: Plan) -> str:
    scalars = [c.name for c in plan.graph.columns if c.element in ("f32", "bf16") and not c.dims]
    return (
        template("watch.html.j2").render(
            title=f"{plan.deploy.name}: {plan.graph.name} on {plan.cluster.name}",
            first=[*scalars[:1], "loss", "tokens_per_second"][:3],
            nonce=secrets.token_urlsafe(16),
            **drawn(plan_picture(plan)),
        )
        + "\n"
    )
