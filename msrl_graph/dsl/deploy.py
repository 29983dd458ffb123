"""Lowering of a `deploy` from the syntax tree to a Deployment.

Invariant: every statement of a deploy is either in the result or reported. Only params, models and data change what
the algorithm computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backends.spec import EVERY, EngineSpec
from ..diagnostics import Span, nearest
from ..files.urls import is_url
from ..hardware import calibration
from ..hardware.cluster import NETWORK, ClusterSpec
from ..ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ..ir.evaluation import Evaluation
from ..ir.graph import KINDS, Expr, Graph, OptionValue
from ..ir.kinds import ValueKind
from ..ir.options import (
    DockOptions,
    EngineOptions,
    LayoutOptions,
    ModelOptions,
    ReshardOptions,
    Run,
)
from ..ir.plan import MICRO_BATCH, DataSource, Deployment, EngineChoice
from ..model.architecture import Model
from ..sharding.layout import Layout
from . import ast
from .algorithm import unknown_node
from .attributes import read_attributes
from .data_sources import check_data, lower_data
from .evaluations import data_help, lower_evaluation, rename_help
from .expressions import ALREADY_REPORTED, Names, Problems, mistake
from .placement import lower_pools
from .trackers import find_trackers

LoadModel = Callable[[str, Path, str | None, Span, str], Model]


def bare_deploy(graph: Graph, target: str, load_model: LoadModel, folder: Path) -> tuple[ClusterSpec, Deployment]:
    """Create a deploy for a program that has none.

    The deploy uses the current machine. For every worker, the deploy uses the model `target` from the command line.
    """
    cluster = ClusterSpec("here", calibration.preset_of_this_machine("here", 1)[0], 1, 1, NETWORK)
    model = load_model(target, folder, None, Span("", 0, 0, 0, 0), "")
    models = {worker.model: model for worker in graph.workers if worker.model}
    return cluster, Deployment(graph.name, models, {}, {}, {})


def lower_deploy(
    deploy: ast.DeployDecl,
    graph: Graph,
    nodes: Collection[str],
    engines: Mapping[str, EngineSpec],
    load_model: LoadModel,
    folder: Callable[[Span], Path],
    model: str | None,
    cluster: ClusterSpec | None,
    problems: Problems,
) -> tuple[Deployment, Graph]:
    """Lower a deploy; return the Deployment and a changed copy of the graph.

    The changed graph also has the attributes that the deploy states for sample edges. `nodes` are the nodes that the
    algorithm declares, including nodes that are missing from the graph because of mistakes.
    """
    lowered, graph = _Deploy(deploy, graph, nodes, engines, load_model, folder, problems).lower(model)
    parting = [statement for statement in deploy.body if isinstance(statement, ast.PlaceDecl | ast.ApartDecl)]
    pools, together = lower_pools(parting, graph, nodes, cluster, problems)
    return replace(lowered, pools=pools, together=together), graph


@dataclass
class _Deploy:
    deploy: ast.DeployDecl
    graph: Graph
    nodes: Collection[str]
    engines: Mapping[str, EngineSpec]
    load_model: LoadModel
    folder: Callable[[Span], Path]  # the folder of the file that contains a statement
    problems: Problems
    models: dict[str, Model] = field(default_factory=dict)
    data: dict[str, DataSource] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    chosen: dict[str, EngineChoice] = field(default_factory=dict)
    dock: DockOptions = field(default_factory=DockOptions)
    reshard: ReshardOptions = field(default_factory=ReshardOptions)
    run: Run = field(default_factory=Run)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    stated: dict[str, Span] = field(default_factory=dict)
    misnamed: bool = False  # a model with a wrong name may be the missing one

    def lower(self, model: str | None) -> tuple[Deployment, Graph]:
        self.needed = {worker.model for worker in self.graph.workers if worker.model}
        for statement in self.deploy.body:
            with self.problems.catching():
                self._lower_statement(statement, model)
        span = self.deploy.head
        if model is not None:
            with self.problems.catching():
                self.models = dict.fromkeys(
                    self.needed, self.load_model(model, self.folder(span), None, Span("", 0, 0, 0, 0), "")
                )
        for name in sorted(self.needed - self.models.keys()):
            if f"model {name}" not in self.stated and not self.misnamed:
                users = ", ".join(f"`{worker.name}`" for worker in self.graph.workers if worker.model == name)
                help = f'add `model {name} = "qwen2.5-7b"`, or a folder, as in `model {name} = "./my-model"`'
                self.problems.report("unknown-model", f"no `model {name}` is given for {users}", span, help)
        if "data source" not in self.stated:
            help = 'a run needs it: add `data source = "file.jsonl"`'
            self.problems.report(
                "no-data", "no `data source`: the program can be planned but not run", span, help, "warning"
            )
        for evaluation in self.evaluations.values():
            if evaluation.data not in self.data:
                message = f"no data named `{evaluation.data}`"
                self.problems.report("unknown-name", message, evaluation.span, data_help(evaluation, self.data))
        check_data(self.data, self.graph, self.problems)
        self._warn_of_idle_updates()
        name = self.deploy.name.text
        evaluations = tuple(self.evaluations.values())
        lowered = Deployment(
            name,
            self.models,
            self.data,
            self.layouts,
            self.chosen,
            self.dock,
            self.reshard,
            evaluations,
            self.run,
            span,
        )
        return lowered, self.graph

    def _warn_of_idle_updates(self) -> None:
        """Warn of updates whose first iteration is after the end of the run.

        A run of one iteration gets no warning: one iteration is the default, and is only for planning.
        """
        for node in self.graph.verb("update"):
            after = UpdateAttributes.of(node).after
            if after >= self.run.iterations > 1:
                message = (
                    f"`{node.name}` takes no step: it runs after {after:,} iterations, and the run has "
                    f"{self.run.iterations:,}"
                )
                help = "let it begin earlier, or run for longer"
                self.problems.report("bad-value", message, node.span_of("after"), help, "warning")

    def _lower_statement(self, statement: ast.DeployStatement, model: str | None) -> None:
        match statement:
            case ast.ModelDecl():
                self._lower_model(statement, model)
            case ast.DataDecl():
                self._lower_data(statement)
            case ast.LayoutDecl():
                self._lower_layout(statement)
            case ast.EngineDecl():
                self._lower_engine(statement)
            case ast.OptionsDecl():
                self._lower_options(statement)
            case ast.EvaluateDecl():
                self._lower_evaluate(statement)
            case ast.EdgeDecl():
                self._lower_edge(statement)

    def _state_once(self, title: str, span: Span, help: str = "") -> None:
        if title in self.stated:
            first = ((self.stated[title], "stated here first"),)
            raise mistake("duplicate-name", f"`{title}` is stated twice", span, help, related=first)
        self.stated[title] = span

    def _read_attributes(
        self, attrs: tuple[ast.Attr, ...], statement: str, kinds: Mapping[str, ValueKind]
    ) -> dict[str, Expr]:
        params = {name: _constant(value) for name, value in self.graph.params.items()}
        return read_attributes(attrs, statement, kinds, Names(params), self.problems)

    def _lower_model(self, statement: ast.ModelDecl, model: str | None) -> None:
        name = statement.name
        if name.text not in self.needed:
            self.misnamed = True
            if any(worker.kind != "function" and worker.kind not in KINDS for worker in self.graph.workers):
                raise ALREADY_REPORTED
            raise mistake(
                "unknown-name", f"no worker has the model `{name.text}`", name.span, nearest(name.text, self.needed)
            )
        self._state_once(f"model {name.text}", name.span)
        options = ModelOptions.of_stated(self._read_attributes(statement.attrs, "model", ModelOptions.kinds()))
        if model is None:
            target = str(statement.target.value)
            span = statement.target.span
            self.models[name.text] = self.load_model(target, self.folder(span), options.dtype, span, options.base)

    def _lower_data(self, statement: ast.DataDecl) -> None:
        self._state_once(f"data {statement.name.text}", statement.name.span)
        source = lower_data(statement, self.graph, self._read_attributes, self.folder, self.problems)
        self.data[source.name] = source

    def _resolve_nodes(self, refs: tuple[ast.Ref, ...], kind: str) -> list[str]:
        """Return the names of the nodes that a `layout` or `engine` statement applies to.

        Reports a mistake for each node without weights.
        """
        names = []
        for ref in refs:
            with self.problems.catching():
                if ref.text not in self.nodes:
                    raise unknown_node(ref, self.nodes, [worker.name for worker in self.graph.workers])
                if all(known_node.name != ref.text for known_node in self.graph.nodes):
                    raise ALREADY_REPORTED
                node = self.graph.node(ref.text)
                if node.verb == "source" or self.graph.worker(node.worker).kind == "function":
                    raise mistake(
                        "bad-value",
                        f"`{ref.text}` runs on the hosts' CPUs, so it has no {kind}",
                        ref.span,
                        "leave it out",
                    )
                self._state_once(f"{kind} {ref.text}", ref.span)
                names.append(ref.text)
        return names

    def _lower_layout(self, statement: ast.LayoutDecl) -> None:
        nodes = self._resolve_nodes(statement.nodes, "layout")
        attributes = self._read_attributes(statement.attrs, "layout", LayoutOptions.kinds())
        options = LayoutOptions.of_stated(attributes)
        if options.stages and len(options.stages) != options.pp * options.vpp:
            message = f"`stages` names {len(options.stages)} stages, and pp x vpp is {options.pp * options.vpp}"
            raise mistake("bad-layout", message, attributes["stages"].span)
        layout = Layout(**vars(options), span=statement.span)
        self.layouts |= dict.fromkeys(nodes, layout)

    def _lower_engine(self, statement: ast.EngineDecl) -> None:
        nodes = self._resolve_nodes(statement.nodes, "engine")
        name = statement.name.text
        if name not in self.engines:
            raise mistake(
                "unknown-engine", f"no engine is called `{name}`", statement.name.span, nearest(name, self.engines)
            )
        spec = self.engines[name]
        for ref in statement.nodes:
            if ref.text in nodes and (verb := self.graph.node(ref.text).verb) not in spec.verbs:
                can = [engine for engine, other in sorted(self.engines.items()) if verb in other.verbs]
                message = f"the engine `{name}` cannot {verb}"
                self.problems.report(
                    "bad-value",
                    message,
                    ref.span,
                    f"these can: {', '.join(f'`{engine}`' for engine in can)}" if can else "",
                )
        kinds = {
            key: kind for key, kind in EngineOptions.kinds().items() if key in (*spec.capabilities.options, *EVERY)
        }
        values = self._read_attributes(statement.attrs, f"engine … = {name}", kinds)
        if "recompute" in values:
            self._check_recomputation(name, values["recompute"])
        if "offload" in values:
            self._check_offload(nodes, values["offload"])
        if not {*MICRO_BATCH} - values.keys():
            message = f"an engine has `{'` or `'.join(MICRO_BATCH)}`, not both"
            help = (
                "leave out `micro_batch`: with rows of different lengths, a number of tokens bounds the memory better"
            )
            self.problems.report("bad-value", message, values[MICRO_BATCH[-1]].span, help)
        options: dict[str, OptionValue] = {
            key: kinds[key].value(value) if value.kind == "list" else value.value for key, value in values.items()
        }
        if python := options.get("python"):
            options["python"] = str(self.folder(values["python"].span) / str(python))
        choice = EngineChoice(name, options, span=statement.span)
        self.chosen |= dict.fromkeys(nodes, choice)

    def _check_recomputation(self, engine: str, stated: Expr) -> None:
        """Check that an engine can recompute the stated parts, or a number of layers."""
        known = self.engines[engine].capabilities.recomputes
        for part in (stated,) if stated.kind != "list" else stated.args:
            if part.value in known or (part.kind == "number" and known) or (part is stated and part.kind == "word"):
                continue
            words = f"`{part.value}`" if part.kind == "word" else "a number of layers"
            help = f"it can recompute {', '.join(f'`{name}`' for name in known) or 'only whole layers: `full`'}"
            self.problems.report("bad-value", f"the engine `{engine}` cannot recompute {words}", part.span, help)

    def _check_offload(self, nodes: Sequence[str], stated: Expr) -> None:
        """Check that `offload` applies to each node.

        `offload = optimizer` needs a worker with an optimizer. `offload = weights` needs a worker whose weights are
        not trained.
        """
        for node in nodes:
            trained = any(update.worker == self.graph.node(node).worker for update in self.graph.verb("update"))
            if stated.value == "weights" and trained:
                message = (
                    f"the weights of `{node}` are trained: resharding already swaps them out of the devices "
                    "during generation"
                )
            elif stated.value == "optimizer" and not trained:
                message = f"`{node}` has no optimizer"
            else:
                continue
            other = "optimizer" if trained else "weights"
            help = f"`offload = {other}`, or `all`, which moves what each state can keep in host memory"
            self.problems.report("bad-value", message, stated.span, help)
            return

    def _lower_options(self, statement: ast.OptionsDecl) -> None:
        self._state_once(statement.kind, statement.span)
        match statement.kind:
            case "dock":
                attributes = self._read_attributes(statement.attrs, "dock", DockOptions.kinds())
                self.dock = replace(DockOptions.of_stated(attributes), span=statement.span)
            case "reshard":
                attributes = self._read_attributes(statement.attrs, "reshard", ReshardOptions.kinds())
                self.reshard = replace(ReshardOptions.of_stated(attributes), span=statement.span)
            case _:
                attributes = self._read_attributes(statement.attrs, "run", Run.kinds())
                run = replace(Run.of_stated(attributes), span=statement.span)
                resume = run.resume
                if resume and not is_url(resume):
                    resume = str(self.folder(attributes["resume"].span) / resume)
                track = run.track
                if "track" in attributes:
                    track = find_trackers(attributes["track"], self.folder, self.problems)
                self.run = replace(run, resume=resume, track=track)

    def _lower_evaluate(self, statement: ast.EvaluateDecl) -> None:
        name = statement.name
        self._state_once(f"evaluate {name.text}", name.span, rename_help(statement))
        self.evaluations[name.text] = lower_evaluation(statement, self.graph, self._read_attributes, self.problems)

    def _lower_edge(self, statement: ast.EdgeDecl) -> None:
        if statement.kind == "reshard":
            raise mistake(
                "bad-value", "a deploy cannot change a resharding edge", statement.span, "state it in the algorithm"
            )
        attributes = self._read_attributes(statement.attrs, "sample edge", SampleEdgeAttributes.kinds())
        edges = {(edge.src, edge.dst): i for i, edge in enumerate(self.graph.edges) if edge.kind == "sample"}
        changed = list(self.graph.edges)
        for sources, targets in zip(statement.groups[:-1], statement.groups[1:], strict=True):
            for src in sources:
                for dst in targets:
                    with self.problems.catching():
                        for ref in (src, dst):
                            if ref.text not in self.nodes:
                                raise unknown_node(ref, self.nodes, [worker.name for worker in self.graph.workers])
                        if not {src.text, dst.text} <= {node.name for node in self.graph.nodes}:
                            raise ALREADY_REPORTED
                        if (src.text, dst.text) not in edges:
                            message = f"the algorithm has no edge `{src.text} -> {dst.text}`"
                            raise mistake(
                                "unknown-name",
                                message,
                                src.span.extend_to(dst.span),
                                "a deploy can change how rows move, but not add edges",
                            )
                        index = edges[src.text, dst.text]
                        changed[index] = replace(changed[index], attributes={**changed[index].attributes, **attributes})
        self.graph = replace(self.graph, edges=tuple(changed))


def _constant(value: object) -> Expr:
    kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
    return Expr(kind, value)  # type: ignore[arg-type]
