"""A Python script that runs a plan on Ray: a summary, then the plan as data.

Invariant: the script is one runnable file. The script calls the same runtime with the same plan as `msrl-run` does.
"""

from __future__ import annotations

from pathlib import Path

import jinja2
import msgspec

from ..ir.plan import Plan


def ray_script(plan: Plan) -> str:
    """Return the script for a plan; the script can be run from any folder."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["pyrepr"] = repr
    template = environment.from_string((Path(__file__).parent / "ray.py.j2").read_text(encoding="utf-8"))
    pools = dict.fromkeys([*(pool.name for pool in plan.pools), *(placement.pool for placement in plan.placements)])
    placed = [(pool, [placement for placement in plan.placements if placement.pool == pool]) for pool in pools]
    # The script contains the JSON in a triple-quoted string: JSON never has three adjacent quotes or a final backslash.
    data = msgspec.json.format(plan.to_json(), indent=-1)
    title = f"{plan.graph.name} on {plan.cluster.name}: {plan.cluster.devices} devices of {plan.cluster.nodes} hosts."
    return template.render(
        plan=plan, pools=placed, data=_split_parts(data), title=title, name=plan.graph.name, size=_format_size
    )


def _split_parts(data: str) -> str:
    """Write each top-level field of a JSON object on its own line.

    Two scripts can then be compared line by line.
    """
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return "{\n" + ",\n".join(f'"{key}": {bytes(raw).decode()}' for key, raw in parts.items()) + "\n}"


def _format_size(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"
