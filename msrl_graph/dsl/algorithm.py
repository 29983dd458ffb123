"""Lowering of an `algorithm` from the syntax tree to a Graph.

Invariant: every name is resolved and every param is replaced by its value. Each mistake is added to `problems` once,
and lowering continues with the next statement. The Graph is complete only if no mistake was reported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..analysis.sequences import reads_tempered
from ..diagnostics import Fault, nearest
from ..ir import attributes as declared
from ..ir.flow import dependency_order
from ..ir.graph import KINDS, Edge, Expr, Graph, Node, Worker
from ..ir.kinds import COUNT
from ..ir.signatures import CallKind, Signature
from ..ir.statements import STATEMENTS
from ..ir.worker_attributes import WorkerAttributes
from . import ast
from .attributes import read_as, read_attributes
from .calls import CallingNode, Folder, Library
from .declarations import Declarations
from .derive import node_name
from .expressions import Problems, mistake
from .levels import compute_levels
from .node_calls import form_readers
from .params import Override, evaluate_params

MOST_ROWS = 10**9


@dataclass(frozen=True)
class Lowering:
    """The result of lowering an algorithm.

    - `nodes`: the names of all nodes that the algorithm declares.
    - `used`: the signatures of the user functions that the graph calls.
    """

    graph: Graph
    nodes: Collection[str]
    used: Library


def lower_algorithm(
    algorithm: ast.AlgorithmDecl, overrides: Sequence[Override], library: Library, folder: Folder, problems: Problems
) -> Lowering:
    """Lower an algorithm whose `extends` is already resolved (derive.py).

    `overrides` replace the defaults of params.
    """
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
        self.likely_names: set[str] = set()  # names that an edge may use for a node with a misspelt worker or verb

    def lower(self, overrides: Sequence[Override]) -> Lowering:
        self._declare()
        defaults = {
            declaration.name.text: declaration.value
            for declaration in self._statements(ast.ParamDecl)
            if self._owns_name(declaration.name, "param")
        }
        self.params = evaluate_params(self.algorithm.name.text, defaults, overrides, self._other_names, self.problems)
        self._lower_columns()
        for state in self._statements(ast.StateDecl):
            with self.problems.catching():
                self._lower_state(state)
        for worker in self._statements(ast.WorkerDecl):
            self._lower_worker(worker)
        self._lower_source()
        for node in self._statements(ast.NodeDecl):
            self._lower_node(node)
        self._find_likely_names()
        for edge in self._statements(ast.EdgeDecl):
            self.add_edges(edge)
        used = {key: value for caller in self.callers for key, value in caller.used.items()}
        return Lowering(self._graph(), {*self.nodes, *self.likely_names}, used)

    # Workers, source and nodes

    def _lower_worker(self, worker: ast.WorkerDecl) -> None:
        if not self._owns_name(worker.name, "worker"):
            return
        kind = worker.kind.text
        stated = WorkerAttributes.of_stated(
            read_attributes(worker.attrs, "worker", WorkerAttributes.kinds(), self.names, self.problems)
        )
        with self.problems.catching():
            if kind != "function" and kind not in KINDS:
                known = ("function", *KINDS)
                # The model does not need to be stated: it follows from the kind.
                self.workers[worker.name.text] = Worker(worker.name.text, kind, worker.frozen, "", worker.span)
                raise mistake("unknown-name", f"unknown worker kind `{kind}`", worker.kind.span, nearest(kind, known))
            if kind == "function":
                self.workers[worker.name.text] = Worker(worker.name.text, kind, span=worker.span)
                named = {"frozen": worker.frozen, **vars(stated)}
                if attribute := next(
                    (name for name in ("frozen", "model", "follows", "freeze", "adapter") if named[name]), ""
                ):
                    message = f"a function has no weights, so `{attribute}` has no effect"
                    raise mistake("bad-value", message, worker.span)
                return
            more = vars(stated) | {"model": stated.model or kind, "span": worker.span}
            self.workers[worker.name.text] = Worker(worker.name.text, kind, worker.frozen, **more)

    def _lower_source(self) -> None:
        sources = list(self._statements(ast.SourceDecl))
        if not sources:
            help = "add `source(COUNT) -> prompt`, with the columns that the data fills"
            self.problems.report(
                "unreachable", f"`{self.algorithm.name.text}` has no source", self.algorithm.name.span, help
            )
            return
        first = sources[0]
        for other in sources[1:]:
            note = ((first.span, "the first source"),)
            self.problems.diagnostics += mistake(
                "duplicate-name", "an algorithm has one source", other.span, related=note
            ).diagnostics
        writes, _ = self._split_names(first.writes, "source", "writes")
        states = tuple(self.states)
        caller = CallingNode(
            "source", states, self._value_names, self.library, self.folder, self.problems, states, writes
        )
        self.callers.append(caller)
        attributes = read_attributes(
            first.attrs, "source", declared.SourceAttributes.kinds(), self.names, self.problems, form_readers(caller)
        )
        with self.problems.catching():
            attributes["count"] = read_as(COUNT, "source", first.count, self.names)
        end = first.writes[-1].span
        weights = attributes.get("weights")
        weight_states = {
            name
            for name in states
            if weights is not None and name in (*weights.columns().values(), *self._signature(weights, caller).columns)
        }
        reads = tuple(name for name in states if name in weight_states)
        self.nodes["source"] = Node(
            "source",
            "source",
            "source",
            (),
            writes,
            attributes=attributes,
            span=first.span.extend_to(end),
            states=reads,
        )

    def _lower_node(self, node: ast.NodeDecl) -> None:
        worker = node.worker.text
        verb = node.verb.text
        name = node_name(node)
        if name in self.nodes:
            if not node.label:  # equal labels are already reported as duplicate names
                help = f"give this one a label: `node second: {name}(…)`"
                note = ((self.nodes[name].span, "the first one"),)
                self.problems.diagnostics += mistake(
                    "duplicate-name", f"`{name}` is declared twice", node.title, help, note
                ).diagnostics
            return
        function = worker in self.workers and self.workers[worker].kind == "function"
        (reads, states), (writes, sets) = (
            self._split_names(node.reads or (), name, "reads", function or verb == "update"),
            self._split_names(node.writes, name, "writes", function),
        )
        if worker not in self.workers and self.declared.get(worker, ("",))[0] != "worker":
            self.problems.report(
                "unknown-name", f"no worker is called `{worker}`", node.worker.span, nearest(worker, self.workers)
            )
        kind = self.workers[worker].kind if worker in self.workers else ""
        statement = "function" if kind == "function" else verb if verb in KINDS.get(kind, ()) else ""
        per = Node.per
        attributes = dict[str, Expr]()
        needs_mini_batch = Node.whole
        scores = Node.scores
        if kind in KINDS and not statement:
            # The checks report this for graphs of the Python API. Reported here, it does not cause further errors: the
            # node's attributes are skipped.
            help = nearest(verb, KINDS[kind])
            self.problems.report("unknown-verb", f"`{worker}` is a {kind}, which cannot {verb}", node.head, help)
        if statement:
            caller = CallingNode(
                name, (*reads, *states), self._value_names, self.library, self.folder, self.problems, states
            )
            self.callers.append(caller)
            above = next(iter(self.nodes["source"].writes), "") if "source" in self.nodes else ""
            kinds = STATEMENTS[statement].kinds()
            readers = form_readers(caller, self.columns, above)
            attributes = read_attributes(node.attrs, statement, kinds, self.names, self.problems, readers)
            per = str(attributes.pop("per").value) if "per" in attributes else per
            self._check_attributes(node, statement)
            if "loss" in attributes:
                needs_mini_batch = caller.needs_mini_batch(attributes["loss"])
                scores = caller.scores(attributes["loss"])
            calls = declared.CallAttributes.of_stated(attributes).functions if statement == "function" else ()
            # With several calls, each may take only some of the columns.
            if [call.kind for call in calls] == ["call"]:
                caller.report_untaken(node, "call", calls[0], self._signature(calls[0], caller))
            for key in {"environment", "agent"} & attributes.keys():
                text_columns = [column.name for column in self.columns.values() if column.element in ("text", "json")]
                partner = attributes[key]
                caller.report_untaken(node, key, partner, self._signature(partner, caller), text_columns)
        gives = tuple(written.text for written in node.writes if written.text in (*writes, *sets)) if sets else ()
        self.nodes[name] = Node(
            name, worker, verb, reads, writes, per, attributes, node.head, states, gives, needs_mini_batch, scores
        )

    def _find_likely_names(self) -> None:
        """Guess the correct names of the nodes whose worker or verb is misspelt.

        An edge with a guessed name gets no error: the misspelling is reported at the node.
        """
        for name, node in self.nodes.items():
            kind = self.workers[node.worker].kind if node.worker in self.workers else ""
            if name != f"{node.worker}.{node.verb}":
                continue
            if not kind and self.declared.get(node.worker, ("",))[0] != "worker":
                self.likely_names |= {f"{other}.{node.verb}" for other in self.workers} - self.nodes.keys()
            elif node.verb not in KINDS.get(kind, (node.verb,)):
                self.likely_names |= {f"{node.worker}.{other_verb}" for other_verb in KINDS[kind]} - self.nodes.keys()

    def _split_names(
        self, names: Sequence[ast.Name], node: str, verb: str, stateful: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split the names that a node reads or writes into columns and states.

        Reports any other name. `verb`: "reads" or "writes". `stateful`: whether help can suggest to declare a state.
        """
        columns = dict[str, None]()
        states = dict[str, None]()
        for name in names:
            kind = self.declared.get(name.text, ("", name.span))[0]
            if name.text in columns or name.text in states:
                self.problems.report(
                    "duplicate-name", f"`{node}` {verb} `{name.text}` twice", name.span, "name it once"
                )
            elif kind == "column":
                columns[name.text] = None
            elif kind == "state" and node != "source":
                states[name.text] = None
            elif name.text not in self.doubled:
                known = [
                    other
                    for other, (other_kind, _) in self.declared.items()
                    if other_kind in ("column", "state") and other != name.text
                ]
                if kind:
                    message = f"`{node}` {verb} `{name.text}`, which is a {kind}, not a column"
                else:
                    message = f"`{node}` {verb} undeclared column `{name.text}`"
                help = nearest(name.text, known)
                if stateful and not kind and not help.startswith("did"):
                    state = f"`state {name.text} : f32 = 0`"
                    declare = f"declare it as a column or, if it outlives an iteration, as a state: {state}"
                    help = "; ".join(filter(None, (help, declare)))
                if kind == "param":
                    help = (
                        "a call or a loss uses a param directly; a value that a node sets is a state: "
                        f"`state {name.text} : f32 = …`"
                    )
                self.problems.report("unknown-column", message, name.span, help)
        return tuple(columns), tuple(states)

    def _check_attributes(self, node: ast.NodeDecl, statement: str) -> None:
        """Report missing attributes of a node, and attributes that the node must not have."""
        stated = {attr.key.text for attr in node.attrs}
        if statement == "function" and not stated & {"call", "keep", "select", "refill"}:
            help = 'add `{ call = NAME() }` or `{ call = "file.py:function" }`'
            self.problems.report("bad-value", f"`{node_name(node)}` needs `call`, `keep` or `select`", node.title, help)
        elif statement == "function" and node.writes and "call" not in stated:
            help = (
                "add `call`, or leave out `-> "
                f"{', '.join(column.text for column in node.writes)}`: a filter writes nothing"
            )
            self.problems.report(
                "bad-value",
                f"`{node_name(node)}` writes columns but has no `call` that computes them",
                node.title,
                help,
            )
        if statement == "function" and "on_failure" in stated and stated & {"keep", "select"}:
            help = (
                "leave it out, or compute the filter's criterion in a node before it: "
                "`node host.NAME(…) -> … { call = … }`"
            )
            self.problems.report(
                "bad-value", f"`{node_name(node)}` is a filter, but `on_failure` needs a `call`", node.title, help
            )
        if statement == "function" and "refill" in stated and not stated & {"keep", "select"}:
            help = "add `keep` or `select`, or leave `refill` out"
            self.problems.report("bad-value", f"`{node_name(node)}` has `refill` but drops no rows", node.title, help)
        if statement == "function" and "adaptive" in stated and "refill" not in stated:
            problem = f"`adaptive` of `{node_name(node)}` has no effect without `refill`"
            self.problems.report("bad-value", problem, node.title, "add `refill = 3`, or leave `adaptive` out")
        if statement == "generate" and {"environment", "memory"} <= stated and "on_failure" not in stated:
            help = "add `on_failure = drop_row` or `drop_group`, or leave it out"
            problem = f"`memory` of `{node_name(node)}` limits environment processes, but this environment runs in none"
            self.problems.report("bad-value", problem, node.title, help)
        if statement == "generate":
            self._check_partner(node, stated)
            for key in ("cuts", "overdue"):
                if key in stated and "partial" not in stated:
                    problem = f"`{key}` of `{node_name(node)}` needs `partial`"
                    self.problems.report("bad-value", problem, node.title, "add `partial = 0.5`, or leave it out")
        for key, attribute in STATEMENTS[statement].declared().items():
            if attribute.must and key not in stated:
                message = f"`{node_name(node)}` has no `{key}`"
                self.problems.report("bad-value", message, node.title, f"add `{key} = {attribute.must}`")

    def _check_partner(self, node: ast.NodeDecl, stated: Collection[str]) -> None:
        """Check that a node has what its attributes need: an environment or an agent.

        Also reports a node that has both. `stated` are the keys of the node's attributes.
        """
        if {"environment", "agent"} <= {*stated}:
            message = f"`{node_name(node)}` has an environment and an agent"
            help = "leave one out: an environment answers the policy, an agent asks it"
            self.problems.report("bad-value", message, node.title, help)
        both = ("environment", "agent")
        for key, partners in (
            ("on_failure", both),
            ("timeout", both),
            ("tool_calls", both[1:]),
            ("turns", both),
            ("conversations", both[1:]),
            ("memory", both[:1]),
        ):
            if key in stated and not {*partners} & {*stated}:
                needed = " or ".join(f"an {partner}" for partner in partners)
                one = 'environment = "file.py:Name"' if "environment" in partners else 'agent = "file.py:name"'
                message = f"`{key}` of `{node_name(node)}` needs {needed}"
                self.problems.report("bad-value", message, node.title, f"add `{one}`, or leave it out")
                return

    def _signature(self, call: Expr, caller: CallingNode) -> Signature:
        key: tuple[CallKind, str] = ("function", str(call.value))
        return (caller.used if key in caller.used else self.library)[key][0]

    # Edges

    def add_edges(self, edge: ast.EdgeDecl) -> None:
        statement = "sample edge" if edge.kind == "sample" else "resharding edge"
        attributes = read_attributes(edge.attrs, statement, STATEMENTS[statement].kinds(), self.names, self.problems)
        groups = [[ref for ref in group if self._is_node(ref)] for group in edge.groups]
        for sources, targets in pairwise(groups):
            for src in sources:
                for dst in targets:
                    if dst.text == "source":
                        self.problems.report("bad-value", "no edge can lead to the source: rows begin there", dst.span)
                    else:
                        new = Edge(edge.kind, src.text, dst.text, attributes, src.span.extend_to(dst.span))
                        self.edges[edge.kind, src.text, dst.text] = new

    def _is_node(self, ref: ast.Ref) -> bool:
        if ref.text in self.nodes:
            return True
        if ref.text == "source" or ref.text in self.likely_names:
            return False  # reported where it is missing or misspelt
        self.problems.diagnostics += unknown_node(ref, self.nodes, self.workers).diagnostics
        return False

    # The graph

    def _graph(self) -> Graph:
        # Nodes of unknown workers are already reported; the graph holds only nodes with known parts.
        nodes = {
            name: node for name, node in self.nodes.items() if node.verb == "source" or node.worker in self.workers
        }
        edges = [edge for edge in self.edges.values() if edge.src in nodes and edge.dst in nodes]
        order = dependency_order(nodes, edges)
        count = (
            declared.SourceAttributes.of(self.nodes["source"]).count
            if "source" in self.nodes
            else declared.SourceAttributes.count
        )
        row_levels = compute_levels(count, (self.nodes[name] for name in order), self.columns)
        if max(row_levels.rows) > MOST_ROWS:
            self.problems.report("bad-value", "too many rows in an iteration", self.nodes["source"].span)
        graph = Graph(
            name=self.algorithm.name.text,
            params={param: value.value for param, value in self.params.items() if value is not None},
            columns=tuple(
                replace(column, level=row_levels.by_column.get(column.name, 0)) for column in self.columns.values()
            ),
            workers=tuple(self.workers.values()),
            nodes=tuple(self.nodes[name] for name in order),
            edges=tuple(edges),
            rows=tuple(row_levels.rows),
            span=self.algorithm.name.span,
            states=tuple(self.states.values()),
            under=tuple(row_levels.under),
        )
        return replace(graph, nodes=tuple(reads_tempered(graph, node) for node in graph.nodes))


def unknown_node(ref: ast.Ref, nodes: Collection[str], workers: Collection[str]) -> Fault:
    """Create the error for a name that an edge or a deploy uses, but no node has."""
    if ref.text in workers:
        own = ", ".join(f"`{node}`" for node in sorted(nodes) if node.startswith(ref.text + "."))
        return mistake(
            "unknown-name",
            f"`{ref.text}` is a worker, not a node",
            ref.span,
            f"its nodes are {own}" if own else "",
        )
    return mistake("unknown-name", f"no node is called `{ref.text}`", ref.span, nearest(ref.text, nodes))
