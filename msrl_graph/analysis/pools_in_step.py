"""Pools that must be in step with the updates, and openings of pipelined pools.

A pool is a set of devices that its nodes use in turns. A pool in step computes the same iteration as the updates. Other
pools may run ahead of the updates (async_schedule.py). A pipelined pool has both nodes of a resharding edge with
`staleness`, and runs some of its nodes for the next iteration before it ends the current iteration. These nodes are the
opening of the pool.

Invariant: a pool is in step if one of its nodes is in step. A node is in step if it is an update, or a generation with
the newest weights, or if it waits for rows of a node in step. For a pipelined pool, only the nodes of its opening
decide whether the pool is in step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import TypeVar

from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.plan import FUNCTIONS, Plan
from .rowsets import find_refill
from .sequences import previous_states

Edge = tuple[str, str]  # a resharding edge, (src, dst)
T = TypeVar("T")


def once_per_placement(function: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Decorate a function of a plan, so that its results are cached by placement.

    A planner calls the function for thousands of plans. If several plans of a graph have the same nodes in each pool
    and the same `deterministic`, the function is executed only for the first of these plans. Callers must not change
    the results.
    """

    @wraps(function)
    def once(plan: Plan) -> T:
        placed = ((placement.node, placement.pool) for placement in plan.placements)
        key = (function.__name__, plan.deploy.run.deterministic, *placed, *(pool.name for pool in plan.pools))
        cache = plan.graph.worked_out
        result: T = cache[key] if key in cache else cache.setdefault(key, function(plan))
        return result

    return once


def functions_with_states(plan: Plan) -> dict[str, str]:
    """Return the function nodes that read states, each with the first state it reads."""
    graph = plan.graph
    readers = (node for node in graph.nodes if previous_states(graph, node))
    return {node.name: node.states[0] for node in readers if graph.worker(node.worker).kind == "function"}


@once_per_placement
def reasons_in_step(plan: Plan) -> dict[str, str]:
    """Return the pools that must be in step with the updates, each with the reason.

    A reason is the end of a sentence whose subject is the pool, such as "runs `actor.update`".
    """
    reasons = dict[str, str]()
    pool_of = pools_of_nodes(plan)
    turns, _ = find_openings(plan)
    for (_, dst), staleness in staleness_of_edges(plan).items():
        if pool_of[dst] in turns:
            continue
        if not staleness:
            reasons[pool_of[dst]] = f"gives `{dst}` the newest weights"
        elif because := describe_state_wait(plan, [dst]):
            reasons.setdefault(pool_of[dst], f"runs `{dst}`, which {because}")
    for node in plan.graph.verb("update"):
        if node.name in pool_of and pool_of[node.name] not in turns:
            reasons[pool_of[node.name]] = f"runs `{node.name}`"
    filter, rounds = find_refill(plan.graph)
    if filter and plan.deploy.run.deterministic:
        why = f"begins when it is known how often `{filter}` refills, and `deterministic` lets nothing depend on timing"
        reasons = dict.fromkeys(pool_of.values(), why) | reasons
    known = -1
    while len(reasons) > known:
        known = len(reasons)
        rest = {name for name, pool in pool_of.items() if pool in turns and name not in turns[pool]}
        for node_name in [name for name, pool in pool_of.items() if pool in reasons or name in rest]:
            after = plan.graph.flow.after(node_name)
            late = dict.fromkeys(after, "which")
            if filter in after:  # nodes of the refill's rounds wait for it, since it may request another round
                late |= dict.fromkeys(rounds - after, f"as often as `{filter}` refills, which")
            for other in (name for name in pool_of if name in late and name not in rest):
                why = f"runs `{other}`, {late[other]} waits for rows of `{node_name}`, and that is in step"
                reasons.setdefault(pool_of[other], why)
    return reasons


def reasons_in_turns(plan: Plan) -> dict[str, str]:
    """Return the pools that cannot be pipelined despite `staleness`, with reasons.

    Only pools with both nodes of a resharding edge with `staleness` are considered. A reason is a complete clause.
    """
    turns, reasons = find_openings(plan)
    return reasons | {pool: f"its pool {why}" for pool, why in reasons_in_step(plan).items() if pool in turns}


@once_per_placement
def find_openings(plan: Plan) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """Return the opening of each pipelined pool, and why other pools have no opening.

    The first result maps a pool to the nodes of its opening. The second result maps a pool that cannot have an opening
    to the reason. Only pools with both nodes of a resharding edge with `staleness` are considered.

    The opening of a pool has two kinds of nodes of the pool:

    - the generations, and the nodes whose rows the generations need,
    - nodes whose weights never change in the run, if all rows that they need come from nodes of the opening or from the
      source.

    So no node of the opening waits for a node that is not in the opening, and functions get their rows as early as
    possible.
    """
    graph = plan.graph
    pool_of = pools_of_nodes(plan)
    staleness_of = staleness_of_edges(plan)
    openings = dict[str, frozenset[str]]()
    reasons = dict[str, str]()
    shared = [(src, dst) for (src, dst), bound in staleness_of.items() if bound and pool_of[src] == pool_of[dst]]
    updated = {*graph.changing_workers} if shared else set()
    for pool in dict.fromkeys(pool_of[dst] for _, dst in shared):
        edges = [(src, dst) for src, dst in shared if pool_of[dst] == pool]
        # A generation outside of the rounds of a refill waits for all rounds.
        needed = {dst for _, dst in edges}.union(*(graph.flow.before(dst) for _, dst in edges), find_refill(graph)[1])
        if because := _why_waiting(plan, edges, needed, pool):
            reasons[pool] = because
            continue
        needed |= {source.name for source in graph.verb("source")}
        for node in graph.nodes:
            if pool_of.get(node.name) == pool and node.worker not in updated and graph.flow.before(node.name) <= needed:
                needed.add(node.name)
        openings[pool] = frozenset(name for name in needed if name in pool_of)
    return openings, reasons


def _why_waiting(plan: Plan, edges: Sequence[Edge], needed: Collection[str], pool: str) -> str:
    """Return why a pool cannot run its generations before the updates; "" if it can.

    `edges` are the resharding edges that lead to the generations. `needed` are the generations and all nodes before the
    generations.
    """
    graph = plan.graph
    pool_of = pools_of_nodes(plan)
    staleness_of = staleness_of_edges(plan)
    filter, rounds = find_refill(graph)
    seldom = {(edge.src, edge.dst) for edge in graph.reshards() if ReshardingEdgeAttributes.of(edge).every > 1}
    for src, dst in edges:
        if (src, dst) in seldom:
            return "weights that these two swap are new each time"
        if dst in rounds:
            return f"`{filter}` may refill with more of its rows"
        if graph.node(dst).cuts:
            return f"the responses that `{dst}` cuts are only known when it has ended"
    for node in (name for name in needed if name in pool_of):
        if pool_of[node] != pool:
            return f"it waits for rows of `{node}`, which is on other devices"
        if graph.node(node).verb == "update" or graph.worker(graph.node(node).worker).follows:
            return f"it waits for rows of `{node}`"
    if because := describe_state_wait(plan, [dst for _, dst in edges]):
        return f"it {because}"
    for (src, dst), staleness in staleness_of.items():
        if dst in needed and not staleness:
            return f"`{dst}` takes the newest weights"
        if staleness and pool_of[dst] == pool != pool_of[src]:
            return f"`{dst}` gets its weights from other devices"
    return ""


def describe_state_wait(plan: Plan, generations: Sequence[str]) -> str:
    """Describe why generations wait for a function that reads a state.

    The text is the end of a sentence whose subject is the generation. It is "" if no generation waits for such a
    function.
    """
    late = functions_with_states(plan)
    before = {name for dst in generations for name in plan.graph.flow.before(dst)}
    node = next((name for name in late if name in before), "")
    return f"waits for `{node}`, which reads the state `{late[node]}` of the iteration before" if node else ""


def pools_of_nodes(plan: Plan) -> dict[str, str]:
    """Return the pool of each node that is placed on devices.

    While the planner searches, some nodes may have no placement yet. Such nodes are left out.
    """
    return {placement.node: placement.pool for placement in plan.placements if placement.pool != FUNCTIONS}


def staleness_of_edges(plan: Plan) -> dict[Edge, int]:
    """Return the `staleness` of each resharding edge whose two nodes are placed."""
    pool_of = pools_of_nodes(plan)
    edges = [edge for edge in plan.graph.reshards() if edge.src in pool_of and edge.dst in pool_of]
    return {(edge.src, edge.dst): ReshardingEdgeAttributes.of(edge).staleness for edge in edges}
