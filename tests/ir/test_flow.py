"""Programs of any shape and size: what is known of paths is what a search would find, and long chains need no stack."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
from folders import TESTS
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import compile
from msrl_graph.checks.columns import no_path, unreachable
from msrl_graph.checks.edges import cycle
from msrl_graph.ir.flow import dependency_order
from msrl_graph.ir.graph import Column, Edge, Graph, Node, Worker

PAGE = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes that write a column each and read any others', with any sample edges, cycles among them."""
    number = draw(st.integers(1, 8))
    names = ["source", *(f"host.f{i}" for i in range(number))]
    pairs = st.tuples(st.integers(0, number), st.integers(1, number))
    edges = [Edge("sample", names[a], names[b]) for a, b in sorted(draw(st.sets(pairs, max_size=20)))]
    reads = draw(st.lists(st.sets(st.integers(0, number), max_size=4), min_size=number + 1, max_size=number + 1))
    nodes = {
        name: Node(
            name, "host", "source" if name == "source" else name, tuple(f"c{r}" for r in sorted(some)), (f"c{i}",)
        )
        for i, (name, some) in enumerate(zip(names, reads, strict=True))
    }
    nodes["source"] = replace(nodes["source"], reads=())
    columns = tuple(Column(f"c{i}", "f32") for i in range(number + 1))
    order = tuple(nodes[n] for n in dependency_order(nodes, edges))
    return Graph("any", {}, columns, (Worker("host", "function"),), order, tuple(edges), (1, 1))


@given(graphs())
def test_a_column_arrives_where_a_path_leads(graph: Graph) -> None:
    for node in graph.nodes:
        for column in node.reads:
            writer = graph.writer(column).name
            before = [e.src for e in graph.into(node.name)]
            assert graph.flow.arrives(column, node.name) == any(
                nx.has_path(graph.flow.digraph(), writer, b) for b in before
            )


@given(graphs())
def test_checks_of_paths_find_what_a_search_finds(graph: Graph) -> None:
    flow = graph.flow.digraph()
    reached = {"source"} | nx.descendants(flow, "source")
    before = {n: set(flow.predecessors(n)) for n in flow}
    knots = {frozenset(p) for p in nx.strongly_connected_components(flow) if len(p) > 1 or flow.has_edge(*2 * tuple(p))}
    assert len(cycle(graph, {})) == len(knots) and {frozenset(k) for k in graph.flow.knots} == knots
    assert len(unreachable(graph, {})) == sum(n not in reached and before[n] <= reached for n in flow)
    reads = [(graph.writer(c).name, n.name) for n in graph.nodes if n.name in reached for c in n.reads]
    lost = [(w, n) for w, n in reads if not any(nx.has_path(flow, w, p) for p in before[n])]
    assert len(no_path(graph, {})) == len(lost)


@given(graphs())
def test_a_column_is_carried_once_to_each_reader_that_it_arrives_at(graph: Graph) -> None:
    carried = [(column, dst) for (_, dst), columns in graph.flow.carried.items() for column in columns]
    assert sorted(carried) == sorted((c, n.name) for n in graph.nodes for c in n.reads if graph.flow.arrives(c, n.name))


def test_what_an_update_waits_for_may_be_a_chain_of_any_length() -> None:
    number = 1_500
    lines = ["columns {", *(f"c{i} : f32" for i in range(number)), "}"]
    for i in range(number):
        before, column = (f"host.f{i - 1}", f"c{i - 1}") if i else ("host.reward", "reward")
        lines += [f"node host.f{i}({column}) -> c{i} {{ call = shuffle(score = {column}), per = prompt }}"]
        lines += [f"{before} -> host.f{i}"]
    reads = f"prompt, response, old_logp, ref_logp, advantage, c{number - 1}"
    lines += [
        f"node actor.update({reads}) {{ loss = clip(0.2), optimizer = adamw(lr = 1e-6) }}",
        f"host.f{number - 1} -> actor.update",
    ]
    algorithm, deploy = PAGE.split("cluster pod")
    body = "\n".join(lines)
    text = (
        f"{algorithm}\nalgorithm big extends grpo {{\n{body}\n}}\ncluster "
        f"pod{deploy.replace('deploy grpo', 'deploy big')}"
    )
    plan = compile("big.rlg", text=text)
    assert plan.estimate is not None
    assert plan.estimate.iteration_seconds.basis.endswith("> actor.update")
    assert len(plan.estimate.phases) > number
