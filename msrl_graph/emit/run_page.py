"""The HTML page of a run: a picture of the plan, and data that the page updates.

Invariant: the page contains everything that it shows, except the data of the run. The page requests these data from the
server that served the page, and from no other server. All text that comes from a program is escaped. Messages that
arrive while the page is open are inserted only as text, never as HTML.
"""

from __future__ import annotations

import secrets

from ..ir.plan import Plan
from .html import picture_context, template
from .picture import plan_picture


def watch_html(plan: Plan) -> str:
    """Return the HTML page that shows the progress of a run of a plan."""
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
