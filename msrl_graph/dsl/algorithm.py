"""An `algorithm` to a Graph.

Invariant: every name is resolved and every param substituted; what is wrong goes to `problems`, each mistake once, and
what can still be said of the rest is said. The Graph is whole only if nothing was told.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..diagnostics import Fault, nearest
from ..ir import attributes as declared
from ..ir.flow import dependency_order
from ..ir.graph import KINDS, Edge, Expr, Graph, Node, Worker
from ..ir.kinds import COUNT
from ..ir.options import STATEMENTS
from ..ir.sequences import reads_tempered
from ..ir.signatures import CallKind, Signature
from . import ast
from .attributes import read, read_as
from .calls import CallingNode, Folder, Library
from .declarations import Declarations
from .derive import node_name
from .expressions import Problems, mistake
from .levels import levels
from .node_calls import forms
from .params import Override, evaluate_params

MOST_ROWS = 10**9


@dataclass(frozen=True)
class Lowering:
    """A graph, the names of the nodes that were declared, and the signatures of the user's functions that they call."""

    graph: Graph
    nodes: Collection[str]
    used: Library


def lower_algorithm(
    algorithm: ast.AlgorithmDecl, overrides: Sequence[Override], library: Library, folder: Folder, problems: Problems
) -> Lowering:
    """The graph of an algorithm that stands for itself (derive.py), its params overridden."""
    return _Algorithm(algorithm, library, folder, problems).lower(overrides)


class _Algorithm(Declarations):
    def __init__(self, algorithm: ast.AlgorithmDecl, library: Library, folder: Folder, problems: Problems) -> None:
        super().__init__(algorithm, problems)
        self.library = library
        self.folder = folder
        self.workers: dict[str, Worker] = {}
        self.nodes: dict[str, Node] = {}
        self.edges: dict[tuple[str, str, str], Edge] = {}
        self.callers: list[CallingNode] = []
        self.meant: set[str] = set()  # names that a node with a misspelt worker or verb may be meant to have

    def lower(self, overrides: Sequence[Override]) -> Lowering:
        self._declare()
        defaults = {s.name.text: s.value for s in self._statements(ast.ParamDecl) if self._is(s.name, "param")}
        self.params = evaluate_params(self.algorithm.name.text, defaults, overrides, self._others, self.problems)
        self._lower_columns()
        for state in self._statements(ast.StateDecl):
            with self.problems.catching():
                self._lower_state(state)
        for worker in self._statements(ast.WorkerDecl):
            self._lower_worker(worker)
        self._lower_source()
        for node in self._statements(ast.NodeDecl):
            self._lower_node(node)
        self._find_meant()
        for edge in self._statements(ast.EdgeDecl):
            self.add_edges(edge)
        used = {key: value for caller in self.callers for key, value in caller.used.items()}
        return Lowering(self._graph(), {*self.nodes, *self.meant}, used)

    # Workers, source and nodes

    def _lower_worker(self, worker: ast.WorkerDecl) -> None:
        if not self._is(worker.name, "worker"):
            return
        kind = worker.kind.text
        said = declared.WorkerAttributes.of_stated(
            read(worker.attrs, "worker", declared.WorkerAttributes.kinds(), self.names, self.problems)
        )
        with self.problems.catching():
            if kind != "function" and kind not in KINDS:
                known = ("function", *KINDS)
                # No model is asked for: which one it has follows from the kind.
                self.workers[worker.name.text] = Worker(worker.name.text, kind, worker.frozen, "", worker.span)
                raise mistake(
                    "unknown-name", f"no kind of worker is called `{kind}`", worker.kind.span, nearest(kind, known)
                )
            if kind == "function":
                self.workers[worker.name.text] = Worker(worker.name.text, kind, span=worker.span)
                if worker.frozen or said.model or said.follows:
                    what = "frozen" if worker.frozen else "model" if said.model else "follows"
                    raise mistake(
                        "bad-value", f"a function has no weights, so `{what}` means nothing here", worker.span
                    )
                return
            follows = (said.follows, said.every, said.decay)
            self.workers[worker.name.text] = Worker(
                worker.name.text, kind, worker.frozen, said.model or kind, worker.span, *follows
            )

    def _lower_source(self) -> None:
        sources = list(self._statements(ast.SourceDecl))
        if not sources:
            help = "add `source(COUNT) -> prompt`, with the columns that the data fill"
            self.problems.tell(
                "unreachable", f"`{self.algorithm.name.text}` has no source", self.algorithm.name.span, help
            )
            return
        first = sources[0]
        for other in sources[1:]:
            note = ((first.span, "the first source"),)
            self.problems.found += mistake(
                "duplicate-name", "an algorithm has one source", other.span, related=note
            ).diagnostics
        writes, _ = self._known(first.writes, "source", "writes")
        states = tuple(self.states)
        caller = CallingNode("source", states, self._values, self.library, self.folder, self.problems, states, writes)
        self.callers.append(caller)
        attributes = read(
            first.attrs, "source", declared.SourceAttributes.kinds(), self.names, self.problems, forms(caller)
        )
        with self.problems.catching():
            attributes["count"] = read_as(COUNT, "source", first.count, self.names)
        end = first.writes[-1].span
        weights = attributes.get("weights")
        known = {
            n
            for n in states
            if weights is not None and n in (*weights.columns().values(), *self._signature(weights, caller).columns)
        }
        reads = tuple(n for n in states if n in known)
        self.nodes["source"] = Node(
            "source", "source", "source", (), writes, attributes=attributes, span=first.span.to(end), states=reads
        )

    def _lower_node(self, node: ast.NodeDecl) -> None:
        worker = node.worker.text
        verb = node.verb.text
        name = node_name(node)
        if name in self.nodes:
            if not node.label:  # two equal labels were told as names
                help = f"give this one a label: `node second: {name}(…)`"
                note = ((self.nodes[name].span, "the first one"),)
                self.problems.found += mistake(
                    "duplicate-name", f"`{name}` is declared twice", node.title, help, note
                ).diagnostics
            return
        function = worker in self.workers and self.workers[worker].kind == "function"
        (reads, states), (writes, sets) = (
            self._known(node.reads or (), name, "reads", function or verb == "update"),
            self._known(node.writes, name, "writes", function),
        )
        if worker not in self.workers and self.declared.get(worker, ("",))[0] != "worker":
            self.problems.tell(
                "unknown-name", f"no worker is called `{worker}`", node.worker.span, nearest(worker, self.workers)
            )
        kind = self.workers[worker].kind if worker in self.workers else ""
        statement = "function" if kind == "function" else verb if verb in KINDS.get(kind, ()) else ""
        per = Node.per
        attributes = dict[str, Expr]()
        whole = Node.whole
        scores = Node.scores
        if kind in KINDS and not statement:
            # A check tells it of graphs of the Python API; here, so that nothing is told that only follows. Its
            # attributes mean nothing.
            help = nearest(verb, KINDS[kind])
            self.problems.tell("unknown-verb", f"`{worker}` is a {kind}, which cannot {verb}", node.head, help)
        if statement:
            caller = CallingNode(
                name, (*reads, *states), self._values, self.library, self.folder, self.problems, states
            )
            self.callers.append(caller)
            above = next(iter(self.nodes["source"].writes), "") if "source" in self.nodes else ""
            kinds = STATEMENTS[statement].kinds()
            readers = forms(caller, self.columns, above)
            attributes = read(node.attrs, statement, kinds, self.names, self.problems, readers)
            per = str(attributes.pop("per").value) if "per" in attributes else per
            self._need(node, statement)
            if "loss" in attributes:
                whole = caller.whole(attributes["loss"])
                scores = caller.scores(attributes["loss"])
            calls = declared.CallAttributes.of_stated(attributes).functions if statement == "function" else ()
            # Of several each may take some of the columns.
            if [c.kind for c in calls] == ["call"]:
                caller.taken(node, "call", calls[0], self._signature(calls[0], caller))
            for key in {"environment", "agent"} & attributes.keys():
                beside = [c.name for c in self.columns.values() if c.element in ("text", "json")]
                made = attributes[key]
                caller.taken(node, key, made, self._signature(made, caller), beside)
        gives = tuple(n.text for n in node.writes if n.text in (*writes, *sets)) if sets else ()
        self.nodes[name] = Node(
            name, worker, verb, reads, writes, per, attributes, node.head, states, gives, whole, scores
        )

    def _find_meant(self) -> None:
        """What edges may call nodes whose worker or verb is misspelt: the mistake is told once, at the node."""
        for name, node in self.nodes.items():
            kind = self.workers[node.worker].kind if node.worker in self.workers else ""
            if name != f"{node.worker}.{node.verb}":
                continue
            if not kind and self.declared.get(node.worker, ("",))[0] != "worker":
                self.meant |= {f"{w}.{node.verb}" for w in self.workers} - self.nodes.keys()
            elif node.verb not in KINDS.get(kind, (node.verb,)):
                self.meant |= {f"{node.worker}.{v}" for v in KINDS[kind]} - self.nodes.keys()

    def _known(
        self, names: Sequence[ast.Name], node: str, verb: str, stateful: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that are columns, and those that are states; others are told. `stateful`: a node may read, or
        write, states here."""
        columns = dict[str, None]()
        states = dict[str, None]()
        for name in names:
            what = self.declared.get(name.text, ("", name.span))[0]
            if name.text in columns or name.text in states:
                self.problems.tell("duplicate-name", f"`{node}` {verb} `{name.text}` twice", name.span, "name it once")
            elif what == "column":
                columns[name.text] = None
            elif what == "state" and node != "source":
                states[name.text] = None
            elif name.text not in self.doubled:
                known = [n for n, (w, _) in self.declared.items() if w in ("column", "state") and n != name.text]
                message = f"`{node}` {verb} `{name.text}`, which " + (
                    f"is a {what}, not a column" if what else "no column is called"
                )
                help = nearest(name.text, known)
                if stateful and not what and not help.startswith("did"):
                    state = f"`state {name.text} : f32 = 0`"
                    declare = f"declare it as a column, or, if it outlives an iteration, as a state: {state}"
                    help = "; ".join(filter(None, (help, declare)))
                if what == "param":
                    help = (
                        f"a call or a loss names it as it is; one that a node sets is a state, `state {name.text} "
                        ": f32 = …`"
                    )
                self.problems.tell("unknown-column", message, name.span, help)
        return tuple(columns), tuple(states)

    def _need(self, node: ast.NodeDecl, statement: str) -> None:
        """Attributes that a node cannot be without."""
        given = {a.key.text for a in node.attrs}
        if statement == "function" and not given & {"call", "keep", "select", "refill"}:
            help = 'add `{ call = NAME() }` or `{ call = "file.py:function" }`'
            self.problems.tell("bad-value", f"`{node_name(node)}` says nowhere what it calls", node.title, help)
        elif statement == "function" and node.writes and "call" not in given:
            help = f"add `call`, or leave out `-> {', '.join(n.text for n in node.writes)}`: a filter writes nothing"
            self.problems.tell(
                "bad-value", f"`{node_name(node)}` says nowhere what computes what it writes", node.title, help
            )
        if statement == "function" and "on_failure" in given and given & {"keep", "select"}:
            help = "leave it out, or compute first what the filter chooses by: `node host.NAME(…) -> … { call = … }`"
            self.problems.tell(
                "bad-value", f"`{node_name(node)}` is a filter, and `on_failure` is for a `call`", node.title, help
            )
        if statement == "function" and "refill" in given and not given & {"keep", "select"}:
            help = "add `keep` or `select`, or leave `refill` out"
            self.problems.tell("bad-value", f"`{node_name(node)}` refills, and drops no row", node.title, help)
        if statement == "function" and "adaptive" in given and "refill" not in given:
            what = f"`{node_name(node)}` draws no more prompts, so `adaptive` means nothing here"
            self.problems.tell("bad-value", what, node.title, "add `refill = 3`, or leave `adaptive` out")
        if statement == "generate" and {"environment", "memory"} <= given and "on_failure" not in given:
            help = "add `on_failure = drop_row` or `drop_group`, or leave it out"
            what = f"`memory` of `{node_name(node)}` bounds processes, and its environment has none of its own"
            self.problems.tell("bad-value", what, node.title, help)
        if statement == "generate":
            self._need_partner(node, given)
            for key in ("cuts", "overdue"):
                if key in given and "partial" not in given:
                    what = f"`{key}` of `{node_name(node)}` is of partial rollout, and there is none"
                    self.problems.tell("bad-value", what, node.title, "add `partial = 0.5`, or leave it out")
        for key, attribute in STATEMENTS[statement].declared().items():
            if attribute.must and key not in given:
                message = f"`{node_name(node)}` has no `{key}`"
                self.problems.tell("bad-value", message, node.title, f"add `{key} = {attribute.must}`")

    def _need_partner(self, node: ast.NodeDecl, given: Collection[str]) -> None:
        """What a generation may say only with an environment or an agent, of which it has one."""
        if {"environment", "agent"} <= {*given}:
            what = f"`{node_name(node)}` has an environment and an agent"
            help = "leave one out: an environment answers the policy, an agent asks it"
            self.problems.tell("bad-value", what, node.title, help)
        both = ("environment", "agent")
        for key, partners in (
            ("on_failure", both),
            ("timeout", both),
            ("tool_calls", both[1:]),
            ("turns", both),
            ("conversations", both[1:]),
            ("memory", both[:1]),
        ):
            if key in given and not {*partners} & {*given}:
                who = " or ".join(f"an {p}" for p in partners)
                one = 'environment = "file.py:Name"' if "environment" in partners else 'agent = "file.py:name"'
                what = f"`{key}` of `{node_name(node)}` is of {who}, and there is none"
                self.problems.tell("bad-value", what, node.title, f"add `{one}`, or leave it out")
                return

    def _signature(self, call: Expr, caller: CallingNode) -> Signature:
        key: tuple[CallKind, str] = ("function", str(call.value))
        return (caller.used if key in caller.used else self.library)[key][0]

    # Edges

    def add_edges(self, edge: ast.EdgeDecl) -> None:
        statement = "sample edge" if edge.kind == "sample" else "resharding edge"
        attributes = read(edge.attrs, statement, STATEMENTS[statement].kinds(), self.names, self.problems)
        groups = [[ref for ref in group if self._is_node(ref)] for group in edge.groups]
        for sources, targets in pairwise(groups):
            for src in sources:
                for dst in targets:
                    if dst.text == "source":
                        self.problems.tell("bad-value", "no edge leads to the source: it is where rows begin", dst.span)
                    else:
                        new = Edge(edge.kind, src.text, dst.text, attributes, src.span.to(dst.span))
                        self.edges[edge.kind, src.text, dst.text] = new

    def _is_node(self, ref: ast.Ref) -> bool:
        if ref.text in self.nodes:
            return True
        if ref.text == "source" or ref.text in self.meant:
            return False  # told where it is missing, or misspelt
        self.problems.found += unknown_node(ref, self.nodes, self.workers).diagnostics
        return False

    # The graph

    def _graph(self) -> Graph:
        # A node of an unknown worker was told; a graph holds only nodes whose parts are known.
        nodes = {name: n for name, n in self.nodes.items() if n.verb == "source" or n.worker in self.workers}
        edges = [e for e in self.edges.values() if e.src in nodes and e.dst in nodes]
        order = dependency_order(nodes, edges)
        count = (
            declared.SourceAttributes.of(self.nodes["source"]).count
            if "source" in self.nodes
            else declared.SourceAttributes.count
        )
        found = levels(count, (self.nodes[n] for n in order), self.columns)
        if max(found.rows) > MOST_ROWS:
            self.problems.tell("bad-value", "more rows an iteration than can be counted", self.nodes["source"].span)
        graph = Graph(
            name=self.algorithm.name.text,
            params={k: v.value for k, v in self.params.items() if v is not None},
            columns=tuple(replace(c, level=found.of.get(c.name, 0)) for c in self.columns.values()),
            workers=tuple(self.workers.values()),
            nodes=tuple(self.nodes[n] for n in order),
            edges=tuple(edges),
            rows=tuple(found.rows),
            span=self.algorithm.name.span,
            states=tuple(self.states.values()),
            under=tuple(found.under),
        )
        return replace(graph, nodes=tuple(reads_tempered(graph, n) for n in graph.nodes))


def unknown_node(ref: ast.Ref, nodes: Collection[str], workers: Collection[str]) -> Fault:
    """What to say of a reference that is no node."""
    if ref.text in workers:
        own = ", ".join(f"`{n}`" for n in sorted(nodes) if n.startswith(ref.text + "."))
        return mistake(
            "unknown-name",
            f"`{ref.text}` is a worker; a node stands here",
            ref.span,
            f"its nodes are {own}" if own else "",
        )
    return mistake("unknown-name", f"no node is called `{ref.text}`", ref.span, nearest(ref.text, nodes))
