"""The streams of a plan: whatever the graph, two pools never wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import page
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.analysis.rowsets import find_refill
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.ir.graph import Column, Edge, Expr, Graph, Node, Worker
from msrl_graph.ir.instruction import Instruction, InstructionStream, Walk, Walker
from msrl_graph.ir.plan import EngineChoice, Placement, Plan, Pool
from msrl_graph.passes.schedule import BuildSchedule
from msrl_graph.sharding.layout import Layout

WORKERS = (
    Worker("actor", "policy", model="policy"),
    Worker("reference", "policy", True, "policy"),
    Worker("reward", "reward_model", True, "reward"),
    Worker("host", "function"),
)


def plan(
    nodes: list[Node], edges: list[tuple[str, str]], reports: list[tuple[str, ...]], pools: dict[str, str] | None = None
) -> Plan:
    """`pools` are those of states on devices, by node; all share one where it is not given."""
    pools = {n.name: (pools or {}).get(n.name, "devices") for n in nodes if n.worker != "host"}
    columns = tuple(Column(c, "f32") for n in nodes for c in n.writes)
    reshards = [
        Edge("reshard", u.name, g.name) for u in nodes for g in nodes if u.verb == "update" and g.verb == "generate"
    ]
    samples = [Edge("sample", a, b) for a, b in edges]
    graph = Graph("any", {}, columns, WORKERS, tuple(nodes), (*samples, *reshards), (1, 1))
    placements = tuple(
        Placement(n.name, "functions" if n.worker == "host" else pools[n.name], Layout(), 0, EngineChoice("any"), "")
        for n in nodes
    )
    deploy = replace(
        page.DEPLOY, evaluations=tuple(Evaluation(f"data{i}", 1, r, 1, 0.0) for i, r in enumerate(reports))
    )
    names = ("devices", *sorted(set(pools.values()) - {"devices"}))
    made = tuple(Pool(tuple(n for n in pools if pools[n] == p), i, 1, p) for i, p in enumerate(names))
    return BuildSchedule({}).apply(replace(Plan(graph, page.CLUSTER, deploy), placements=placements, pools=made))


def left_over(graph: Graph, streams: list[InstructionStream]) -> list[str]:
    """What is never done when each pool walks its stream, waits for all that comes before a node, and meets another to
    reshard."""
    flow = graph.flow.digraph()
    left = [[i for i in s.instructions if i.op in ("RUN", "RESHARD")] for s in streams]
    task = {i.node for stream in left for i in stream if i.op == "RUN"}
    done = set[str]()
    moved = True
    while moved:
        moved = False
        for stream in left:
            while stream:
                step = stream[0]
                meeting = [s for s in left if step in s]
                ready = (
                    nx.ancestors(flow, step.node) & task <= done
                    if step.op == "RUN"
                    else all(s[0] == step for s in meeting)
                )
                if not ready:
                    break
                done |= {step.node} if step.op == "RUN" else set()
                for other in meeting:
                    other.pop(0)
                moved = True
    return [i.node for stream in left for i in stream]


def test_a_function_that_a_device_waits_for_comes_before_one_that_waits_for_a_device() -> None:
    nodes = [
        Node("source", "host", "source", (), ("prompt", "answer")),
        Node("actor.generate", "actor", "generate", ("prompt",), ("response",)),
        Node("actor.infer", "actor", "infer", ("response",), ("old_logp",)),
        Node("host.drift", "host", "drift", ("old_logp",), ("drift",)),
        Node("host.zhint", "host", "zhint", ("answer",), ("hint",)),
        Node("reference.infer", "reference", "infer", ("hint", "response"), ("ref_logp",)),
        Node("actor.update", "actor", "update", ("old_logp", "ref_logp"), ()),
    ]
    edges = [
        ("source", "actor.generate"),
        ("actor.generate", "actor.infer"),
        ("actor.infer", "host.drift"),
        ("source", "host.zhint"),
        ("host.zhint", "reference.infer"),
        ("actor.generate", "reference.infer"),
        ("actor.infer", "actor.update"),
        ("reference.infer", "actor.update"),
    ]
    found = plan(nodes, edges, [])
    devices, functions = found.schedule
    assert [i.node for i in functions.instructions] == ["source", "host.zhint", "host.drift"]
    assert [i.node for i in devices.instructions if i.op == "RUN"][1:3] == ["reference.infer", "actor.infer"]
    assert left_over(found.graph, list(found.schedule)) == []


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size = draw(st.integers(2, 12))
    labels = draw(st.permutations(range(size)))  # names, by which ties are broken, say nothing of the order
    kinds = st.sampled_from(
        [
            ("host", "score"),
            ("host", "score"),
            ("actor", "infer"),
            ("actor", "update"),
            ("actor", "generate"),
            ("reference", "infer"),
        ]
    )
    nodes = [Node("source", "host", "source", (), ("c0",))]
    edges = list[tuple[str, str]]()
    for i in range(1, size):
        worker, verb = draw(kinds)
        before = draw(st.sets(st.integers(0, i - 1), min_size=1))
        flow = nx.DiGraph([*edges, *((nodes[b].name, "new") for b in before)])
        # It may read what any node before it wrote, also past nodes that read nothing of it.
        reads = draw(
            st.sets(
                st.sampled_from([f"c{j}" for j in range(i) if nodes[j].name in nx.ancestors(flow, "new")]), min_size=1
            )
        )
        nodes.append(Node(f"n{labels[i]:02}", worker, verb, tuple(sorted(reads)), (f"c{i}",)))
        edges += [(nodes[b].name, nodes[i].name) for b in sorted(before)]
    ready = list(nx.lexicographical_topological_sort(nx.DiGraph(edges), key=lambda n: (n != "source", n)))
    reports = draw(st.lists(st.sets(st.sampled_from([f"c{i}" for i in range(size)]), min_size=1), max_size=2))
    pools = {n.name: draw(st.sampled_from(("devices", "more"))) for n in nodes if n.verb == "generate"}
    shared = draw(st.sampled_from(("devices", "more", "most")))
    pools |= {n.name: shared for n in nodes if n.worker == "reference"}
    return plan(sorted(nodes, key=lambda n: ready.index(n.name)), edges, [tuple(sorted(r)) for r in reports], pools)


@given(plans())
def test_merging_the_streams_never_deadlocks(found: Plan) -> None:
    tasks = dict.fromkeys(s.task for s in found.schedule)
    for task in tasks:
        assert left_over(found.graph, [s for s in found.schedule if s.task == task]) == []
    runs = [i.node for s in found.schedule if s.task == "train" for i in s.instructions if i.op == "RUN"]
    assert sorted(runs) == sorted(n.name for n in found.graph.nodes)


@given(plans())
def test_all_streams_follow_one_order(found: Plan) -> None:
    runs = [[i.node for i in s.instructions if i.op == "RUN"] for s in found.schedule]
    # One order holds all of them, and the graph's edges, if what they say together has no cycle.
    order = nx.DiGraph((a, b) for stream in runs for a, b in pairwise(stream))
    order.add_edges_from((e.src, e.dst) for e in found.graph.samples())
    assert nx.is_directed_acyclic_graph(order)


class Rounds(Walker):
    """What a process does in so many rounds of prompts; an AGAIN that is asked stands there with the round after
    which."""

    def __init__(self, stream: InstructionStream, rounds: int) -> None:
        self.rounds = rounds
        self.steps: list[tuple[Instruction, int]] = []
        assert Walk({stream.pool: stream.instructions}).finish(self)

    def run(self, pool: str, node: str) -> None:
        self.steps.append((Instruction("RUN", node), 0))

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        self.steps.append((Instruction("RESHARD", src, dst), 0))

    def release(self, pool: str, node: str) -> None:
        self.steps.append((Instruction("RELEASE", node), 0))

    def swap_in(self, pool: str, node: str) -> None:
        self.steps.append((Instruction("SWAP_IN", node), 0))

    def wait(self, pool: str, node: str) -> None:
        self.steps.append((Instruction("WAIT", node), 0))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        self.steps.append((Instruction("AGAIN", node), rounds))
        return rounds < self.rounds


@st.composite
def refilled(draw: st.DrawFn) -> Plan:
    """Plans in which some function is a filter that refills."""
    found = draw(plans())
    flow = found.graph.flow.digraph()
    updates = {n.name for n in found.graph.verb("update")}
    filters = [
        n.name
        for n in found.graph.nodes
        if n.name != "source" and n.worker == "host" and not updates & nx.ancestors(flow, n.name)
    ]
    if not filters:
        return found
    chosen = draw(st.sampled_from(filters))
    attributes = {"refill": Expr("number", 3)}
    nodes = tuple(replace(n, attributes=attributes) if n.name == chosen else n for n in found.graph.nodes)
    return BuildSchedule({}).apply(replace(found, graph=replace(found.graph, nodes=nodes)))


def walk(found: Plan, rounds: int) -> None:
    """Every pool walks its stream of an iteration of so many rounds; fails where one waits for ever, or weights are not
    there."""
    _, repeated = find_refill(found.graph)
    streams = [s for s in found.schedule if s.task == "train"]
    left = [Rounds(s, rounds).steps for s in streams]
    for steps in left:  # weights are there when a state generates, and do not come twice
        runs = {s.node for s, _ in steps if s.op == "RUN"}
        there = set[str]()
        for step, _ in steps:
            if step.op == "RESHARD" and step.other in runs:
                assert step.other not in there
                there.add(step.other)
            elif step.op == "RELEASE":
                there.remove(step.node)
            elif step.op == "RUN" and step.node in {e.dst for e in found.graph.reshards()}:
                assert step.node in there
    for step in {x for steps in left for x in steps if x[0].op == "RESHARD"}:
        assert len({steps.count(step) for steps in left} - {0}) == 1  # who sends does it as often as who receives
    left = [[(s, r) for s, r in steps if s.op in ("RUN", "RESHARD", "AGAIN")] for steps in left]
    done = Counter[str]()
    moved = True
    while moved:
        moved = False
        for stream in left:
            while stream:
                step, round = stream[0]
                meeting = [s for s in left if stream[0] in s] if step.op == "RESHARD" else [stream]
                if step.op == "AGAIN":
                    ready = done[step.node] >= round
                elif step.op == "RESHARD":
                    ready = all(s[0] == stream[0] for s in meeting)
                else:
                    before = found.graph.flow.before(step.node)
                    mine = done[step.node] + 1 if step.node in repeated else rounds
                    ready = all(done[a] >= (mine if a in repeated else 1) for a in before)
                if not ready:
                    break
                done[step.node] += step.op == "RUN"
                for other in meeting:
                    other.pop(0)
                moved = True
    assert not any(left)
    assert all(done[n.name] == (rounds if n.name in repeated else 1) for n in found.graph.nodes)


@given(refilled(), st.integers(1, 3))
def test_rounds_of_prompts_never_deadlock(found: Plan, rounds: int) -> None:
    walk(found, rounds if find_refill(found.graph)[0] else 1)


def test_weights_that_come_anew_in_each_round_from_a_pool_that_has_a_part_in_it() -> None:
    nodes = [
        Node("source", "host", "source", (), ("prompt",)),
        Node("actor.generate", "actor", "generate", ("prompt",), ("response",)),
        Node("reward.infer", "reward", "infer", ("response",), ("score",)),
        Node("reference.infer", "reference", "infer", ("response",), ("ref_logp",)),
        Node("host.keep", "host", "keep", ("score", "ref_logp"), (), attributes={"refill": Expr("number", 3)}),
        Node("actor.update", "actor", "update", ("response",), ()),
    ]
    edges = [(a.name, b.name) for a in nodes for b in nodes if {*a.writes} & {*b.reads}] + [
        ("host.keep", "actor.update")
    ]
    found = plan(nodes, edges, [], {"actor.generate": "more", "reward.infer": "more"})
    trainer, generator, _ = ([f"{i.op} {i.other or i.node}" for i in s.instructions] for s in found.schedule)
    assert trainer == ["RESHARD actor.generate", "RUN reference.infer", "AGAIN actor.generate", "RUN actor.update"]
    assert generator == [
        "RESHARD actor.generate",
        "RUN actor.generate",
        "RELEASE actor.generate",
        "RUN reward.infer",
        "AGAIN actor.generate",
    ]
    walk(found, 3)
