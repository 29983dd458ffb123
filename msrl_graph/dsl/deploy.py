"""`deploy` to Deploy.

Invariant: every statement of a deploy is either in the result or told; nothing of it changes what the algorithm
computes, except params, models and data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backends.spec import EVERY, EngineSpec
from ..diagnostics import Span, nearest
from ..files.paths import hub_name, is_file, is_folder
from ..files.urls import is_url
from ..hardware import calibration
from ..hardware.cluster import NETWORK, ClusterSpec
from ..ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ..ir.evaluation import Evaluation
from ..ir.graph import KINDS, Expr, Graph
from ..ir.kinds import StringKind, ValueKind
from ..ir.options import (
    DockOptions,
    EngineOptions,
    LayoutOptions,
    ModelOptions,
    ReshardOptions,
    Run,
)
from ..ir.plan import DataSource, Deployment, EngineChoice
from ..model.architecture import Model
from ..sharding.layout import Layout
from . import ast, foreign_names
from .algorithm import unknown_node
from .attributes import read
from .evaluations import another_name, lower_evaluation, other_data
from .expressions import TOLD, Names, Problems, mistake
from .placement import lower_pools

LoadModel = Callable[[str, Path, str | None, Span], Model]


def bare_deploy(graph: Graph, target: str, load_model: LoadModel, folder: Path) -> tuple[ClusterSpec, Deployment]:
    """What a program without a deploy gets when the command line names a model: the machine at hand, that model for
    every worker."""
    cluster = ClusterSpec("here", calibration.here("here", 1)[0], 1, 1, NETWORK)
    model = load_model(target, folder, None, Span("", 0, 0, 0, 0))
    models = {w.model: model for w in graph.workers if w.model}
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
    """The deploy, and the graph with the attributes of sample edges that the deploy states.

    `nodes` are those that the algorithm declares, also those whose mistakes keep them out of the graph."""
    lowered, graph = _Deploy(deploy, graph, nodes, engines, load_model, folder, problems).lower(model)
    parting = [s for s in deploy.body if isinstance(s, ast.PlaceDecl | ast.ApartDecl)]
    pools, together = lower_pools(parting, graph, nodes, cluster, problems)
    return replace(lowered, pools=pools, together=together), graph


@dataclass
class _Deploy:
    deploy: ast.DeployDecl
    graph: Graph
    nodes: Collection[str]
    engines: Mapping[str, EngineSpec]
    load_model: LoadModel
    folder: Callable[[Span], Path]  # of the file where a statement stands
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
    misnamed: bool = False  # a model of a wrong name may be the one that is missing

    def lower(self, model: str | None) -> tuple[Deployment, Graph]:
        self.needed = {w.model for w in self.graph.workers if w.model}
        for statement in self.deploy.body:
            with self.problems.catching():
                self._statement(statement, model)
        span = self.deploy.head
        if model is not None:
            with self.problems.catching():
                self.models = dict.fromkeys(
                    self.needed, self.load_model(model, self.folder(span), None, Span("", 0, 0, 0, 0))
                )
        for name in sorted(self.needed - self.models.keys()):
            if f"model {name}" not in self.stated and not self.misnamed:
                users = ", ".join(f"`{w.name}`" for w in self.graph.workers if w.model == name)
                help = f'add `model {name} = "qwen2.5-7b"`, or a folder, as in `model {name} = "./my-model"`'
                self.problems.tell("unknown-model", f"nothing says what the model `{name}` of {users} is", span, help)
        if "data source" not in self.stated:
            help = 'a run needs it: add `data source = "file.jsonl"`'
            self.problems.tell("no-data", "no data for the source: it can be planned, not run", span, help, "warning")
        for evaluation in self.evaluations.values():
            if evaluation.data not in self.data:
                message = f"no data are called `{evaluation.data}`"
                self.problems.tell("unknown-name", message, evaluation.span, other_data(evaluation, self.data))
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
        """Updates that begin when the run has ended. A run of one iteration, which none states, is there to be
        planned."""
        for node in self.graph.verb("update"):
            after = UpdateAttributes.of(node).after
            if after >= self.run.iterations > 1:
                message = (
                    f"`{node.name}` takes no step: it runs after {after:,} iterations, and the run has "
                    f"{self.run.iterations:,}"
                )
                help = "let it begin earlier, or run for longer"
                self.problems.tell("bad-value", message, node.at("after"), help, "warning")

    def _statement(self, statement: ast.DeployStatement, model: str | None) -> None:
        match statement:
            case ast.ModelDecl():
                self._model(statement, model)
            case ast.DataDecl():
                self._data(statement)
            case ast.LayoutDecl():
                self._layout(statement)
            case ast.EngineDecl():
                self._engine(statement)
            case ast.OptionsDecl():
                self._options(statement)
            case ast.EvaluateDecl():
                self._evaluate(statement)
            case ast.EdgeDecl():
                self._edge(statement)

    def _once(self, what: str, span: Span, help: str = "") -> None:
        if what in self.stated:
            first = ((self.stated[what], "stated here first"),)
            raise mistake("duplicate-name", f"`{what}` is stated twice", span, help, related=first)
        self.stated[what] = span

    def _read(self, attrs: tuple[ast.Attr, ...], statement: str, kinds: Mapping[str, ValueKind]) -> dict[str, Expr]:
        params = {k: _constant(v) for k, v in self.graph.params.items()}
        return read(attrs, statement, kinds, Names(params), self.problems)

    def _model(self, statement: ast.ModelDecl, model: str | None) -> None:
        name = statement.name
        if name.text not in self.needed:
            self.misnamed = True
            if any(w.kind != "function" and w.kind not in KINDS for w in self.graph.workers):
                raise TOLD
            raise mistake(
                "unknown-name", f"no worker has the model `{name.text}`", name.span, nearest(name.text, self.needed)
            )
        self._once(f"model {name.text}", name.span)
        said = ModelOptions.of_stated(self._read(statement.attrs, "model", ModelOptions.kinds()))
        if model is None:
            target = str(statement.target.value)
            span = statement.target.span
            self.models[name.text] = self.load_model(target, self.folder(span), said.dtype, span)

    def _data(self, statement: ast.DataDecl) -> None:
        name = statement.name.text
        target = str(statement.target.value)
        self._once(f"data {name}", statement.name.span)
        source = self.graph.node("source")
        kinds: dict[str, ValueKind] = dict.fromkeys(source.writes, StringKind())
        for attr in statement.attrs:
            if attr.key.text not in kinds:
                message = f"the source writes no column `{attr.key.text}`"
                self.problems.tell("unknown-column", message, attr.key.span, nearest(attr.key.text, kinds))
        fields = {c: c for c in source.writes}
        known = tuple(a for a in statement.attrs if a.key.text in kinds)
        stated = self._read(known, "data", kinds)
        fields |= {k: str(v.value) for k, v in stated.items()}
        span = statement.target.span
        if hub := hub_name(target):
            made = f"{hub.rsplit('/', 1)[-1]}.jsonl"
            help = (
                f'write a file of it: `datasets.load_dataset("{hub}", split="train").to_json("{made}")`, and name '
                f'that: `"{made}"`'
            )
            message = (
                f"`{target}` is no file: it looks like the name of data on the Hugging Face Hub, which is not read"
            )
            raise mistake("bad-value", message, span, help)
        if not target.endswith((".jsonl", ".parquet")):
            folder = not is_url(target) and is_folder(self.folder(span) / target)
            message = "data is a .jsonl file, one object a line, or a .parquet file"
            raise mistake("bad-value", message, span, foreign_names.data_file(target, folder))
        path = target if is_url(target) else str(self.folder(span) / target)
        self.data[name] = DataSource(name, path, fields, span, {k: v.span for k, v in stated.items()})
        if not is_url(path) and not is_file(Path(path)):
            help = "a run needs it; the path is relative to the program's folder"
            self.problems.tell("missing-file", f"`{target}` is not on this machine", span, help, "warning")

    def _refs(self, refs: tuple[ast.Ref, ...], what: str) -> list[str]:
        """The nodes with weights that a layout or an engine is for."""
        found = []
        for ref in refs:
            with self.problems.catching():
                if ref.text not in self.nodes:
                    raise unknown_node(ref, self.nodes, [w.name for w in self.graph.workers])
                if all(n.name != ref.text for n in self.graph.nodes):
                    raise TOLD
                node = self.graph.node(ref.text)
                if node.verb == "source" or self.graph.worker(node.worker).kind == "function":
                    raise mistake(
                        "bad-value",
                        f"`{ref.text}` runs on the hosts' CPUs, so it has no {what}",
                        ref.span,
                        "leave it out",
                    )
                self._once(f"{what} {ref.text}", ref.span)
                found.append(ref.text)
        return found

    def _layout(self, statement: ast.LayoutDecl) -> None:
        nodes = self._refs(statement.nodes, "layout")
        attributes = self._read(statement.attrs, "layout", LayoutOptions.kinds())
        said = LayoutOptions.of_stated(attributes)
        if said.stages and len(said.stages) != said.pp * said.vpp:
            message = f"`stages` names {len(said.stages)} stages, and pp x vpp is {said.pp * said.vpp}"
            raise mistake("bad-layout", message, attributes["stages"].span)
        layout = Layout(**vars(said), span=statement.span)
        self.layouts |= dict.fromkeys(nodes, layout)

    def _engine(self, statement: ast.EngineDecl) -> None:
        nodes = self._refs(statement.nodes, "engine")
        name = statement.name.text
        if name not in self.engines:
            raise mistake(
                "unknown-engine", f"no engine is called `{name}`", statement.name.span, nearest(name, self.engines)
            )
        spec = self.engines[name]
        for ref in statement.nodes:
            if ref.text in nodes and (verb := self.graph.node(ref.text).verb) not in spec.verbs:
                can = [n for n, s in sorted(self.engines.items()) if verb in s.verbs]
                message = f"the engine `{name}` cannot {verb}"
                self.problems.tell(
                    "bad-value", message, ref.span, f"these can: {', '.join(f'`{c}`' for c in can)}" if can else ""
                )
        kinds = {k: kind for k, kind in EngineOptions.kinds().items() if k in (*spec.options, *EVERY)}
        values = self._read(statement.attrs, f"engine … = {name}", kinds)
        if "offload" in values:
            self._offload(nodes, values["offload"])
        options = {k: e.value for k, e in values.items()}
        if python := options.get("python"):
            options["python"] = str(self.folder(values["python"].span) / str(python))
        choice = EngineChoice(name, options, span=statement.span)
        self.chosen |= dict.fromkeys(nodes, choice)

    def _offload(self, nodes: Sequence[str], stated: Expr) -> None:
        """`optimizer` is for states whose worker has one, `weights` for those whose weights stay as they are."""
        for node in nodes:
            trained = any(n.worker == self.graph.node(node).worker for n in self.graph.verb("update"))
            if stated.value == "weights" and trained:
                message = (
                    f"the weights of `{node}` are trained: they leave the devices for a generation by "
                    "themselves, by the swap of resharding"
                )
            elif stated.value == "optimizer" and not trained:
                message = f"`{node}` has no optimizer"
            else:
                continue
            other = "optimizer" if trained else "weights"
            help = f"`offload = {other}`, or `all`, for what each state may have in host memory"
            self.problems.tell("bad-value", message, stated.span, help)
            return

    def _options(self, statement: ast.OptionsDecl) -> None:
        self._once(statement.kind, statement.span)
        match statement.kind:
            case "dock":
                attributes = self._read(statement.attrs, "dock", DockOptions.kinds())
                self.dock = replace(DockOptions.of_stated(attributes), span=statement.span)
            case "reshard":
                attributes = self._read(statement.attrs, "reshard", ReshardOptions.kinds())
                self.reshard = replace(ReshardOptions.of_stated(attributes), span=statement.span)
            case _:
                attributes = self._read(statement.attrs, "run", Run.kinds())
                run = replace(Run.of_stated(attributes), span=statement.span)
                resume = run.resume
                if resume and not is_url(resume):
                    resume = str(self.folder(attributes["resume"].span) / resume)
                self.run = replace(run, resume=resume)

    def _evaluate(self, statement: ast.EvaluateDecl) -> None:
        name = statement.name
        self._once(f"evaluate {name.text}", name.span, another_name(statement))
        self.evaluations[name.text] = lower_evaluation(statement, self.graph, self._read, self.problems)

    def _edge(self, statement: ast.EdgeDecl) -> None:
        if statement.kind == "reshard":
            raise mistake(
                "bad-value", "a deploy changes no resharding edge", statement.span, "state it in the algorithm"
            )
        attributes = self._read(statement.attrs, "sample edge", SampleEdgeAttributes.kinds())
        edges = {(e.src, e.dst): i for i, e in enumerate(self.graph.edges) if e.kind == "sample"}
        changed = list(self.graph.edges)
        for sources, targets in zip(statement.groups[:-1], statement.groups[1:], strict=True):
            for src in sources:
                for dst in targets:
                    with self.problems.catching():
                        for ref in (src, dst):
                            if ref.text not in self.nodes:
                                raise unknown_node(ref, self.nodes, [w.name for w in self.graph.workers])
                        if not {src.text, dst.text} <= {n.name for n in self.graph.nodes}:
                            raise TOLD
                        if (src.text, dst.text) not in edges:
                            message = f"the algorithm has no edge `{src.text} -> {dst.text}`"
                            raise mistake(
                                "unknown-name",
                                message,
                                src.span.to(dst.span),
                                "a deploy changes how rows move, not where to",
                            )
                        at = edges[src.text, dst.text]
                        changed[at] = replace(changed[at], attributes={**changed[at].attributes, **attributes})
        self.graph = replace(self.graph, edges=tuple(changed))


def _constant(value: object) -> Expr:
    kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
    return Expr(kind, value)  # type: ignore[arg-type]
