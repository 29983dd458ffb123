"""The page of a running plan: its picture, and elements that change.

Invariant: like a plan's page it contains all that it shows, but it requests facts from its own server, and from no
other. Text of a program is escaped; later messages are only ever inserted as text.
"""

from __future__ import annotations

import secrets

from ..ir.plan import Plan
from .html import picture_context, template
from .picture import plan_picture


def watch_html(plan: Plan) -> str:
    """Return the page that follows a run of a plan."""
    scalars = [column.name for column in plan.graph.columns if column.element in ("f32", "bf16") and not column.dims]
    return (
        template("watch.html.j2").render(
            title=f"{plan.deploy.name}: {plan.graph.name} on {plan.cluster.name}",
            first=[*scalars[:1], "loss", "tokens_per_second"][:3],
            nonce=secrets.token_urlsafe(16),
            **picture_context(plan_picture(plan)),
        )
        + "\n"
    )
