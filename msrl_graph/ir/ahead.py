"""Which pools may be ahead of the updates: what `staleness` allows.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so that no pool begins an
iteration more than so many before its update does. A pool that is ahead waits within an iteration for none that is in
step: what comes between two iterations, as an evaluation does, may wait for it.
"""

from __future__ import annotations

from .attributes import ReshardingEdge
from .plan import FUNCTIONS, Plan
from .rowsets import looping


def leads(plan: Plan) -> dict[str, int]:
    """By pool, how many iterations it may begin before the updates do; only pools that may."""
    behind = _staleness(plan)
    if not any(behind.values()):
        return {}
    pool_of, held, found = _pools(plan), hindered(plan), dict[str, int]()
    for pool in (p.name for p in plan.pools if p.name not in held):
        into = [n for (_, dst), n in behind.items() if pool_of[dst] == pool]
        found[pool] = min(into, default=max(behind.values()))
    return found


def fetched(plan: Plan) -> dict[tuple[str, str], int]:
    """The resharding edges, as (src, dst), over which weights are fetched by a pool that may be ahead, and how many
    versions these may be behind; where others state `staleness`, the two pools meet all the same."""
    if not (ahead := leads(plan)):
        return {}
    pool_of = _pools(plan)
    return {edge: n for edge, n in _staleness(plan).items() if n and pool_of[edge[1]] in ahead}


def lanes(plan: Plan) -> int:
    """How many iterations may be under way at once."""
    return 1 + max(leads(plan).values(), default=0)


def hindered(plan: Plan) -> dict[str, str]:
    """By pool that has to be in step with the updates, why, as the end of a sentence that begins with the pool."""
    found, pool_of = dict[str, str](), _pools(plan)
    for (_, dst), behind in _staleness(plan).items():
        if not behind:
            found[pool_of[dst]] = f"gives `{dst}` the newest weights"
    for node in plan.graph.verb("update"):
        if node.name in pool_of:
            found[pool_of[node.name]] = f"runs `{node.name}`"
    filter, rounds = looping(plan.graph)
    known = -1
    while len(found) > known:
        known = len(found)
        for node_name in [n for n, pool in pool_of.items() if pool in found]:
            after = plan.graph.flow.after(node_name)
            late = dict.fromkeys(after, "which")
            if filter in after:  # who makes rounds of prompts waits for it: it may ask for another one
                late |= dict.fromkeys(rounds - after, f"as often as `{filter}` asks, which")
            for other in (n for n in pool_of if n in late):
                why = f"runs `{other}`, {late[other]} waits for rows of `{node_name}`, and that is in step"
                found.setdefault(pool_of[other], why)
    return found


def _pools(plan: Plan) -> dict[str, str]:
    """By node on devices its pool, as far as nodes are placed: the planner places some at a time."""
    return {p.node: p.pool for p in plan.placements if p.pool != FUNCTIONS}


def _staleness(plan: Plan) -> dict[tuple[str, str], int]:
    pool_of = _pools(plan)
    edges = [e for e in plan.graph.reshards() if e.src in pool_of and e.dst in pool_of]
    return {(e.src, e.dst): ReshardingEdge.of(e).staleness for e in edges}
