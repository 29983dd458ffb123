"""What a run needs before it starts: weights, tokenizer, data, packages, devices.

Invariant: what lacks is told all at once, with its line, before a process is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...backends import ENGINES, packages
from ...backends.divisibility import misfits
from ...backends.spec import EngineSpec
from ...checks import folders
from ...compiler.unsupported import unready
from ...diagnostics import Diagnostic, Fault
from ...files import fix_commands
from ...files.paths import hub_name
from ...ir.plan import Placement, Plan
from ...model import presets
from ...model.architecture import Model
from ...sharding.layout import AXES, Layout
from ..data import dataset as data
from ..data.tokens import Tokens
from ..process import interpreters
from ..weights import tensor_files
from .process_pool import check_machine


def check(plan: Plan) -> dict[str, data.DatasetPreview]:
    """What must be there to run: weights, tokenizer, data. What there is in each data file; `Fault` with all that is
    missing."""
    found = unready(plan) or [*_packages(plan), *_interpreters(plan)]
    for model in plan.deploy.models.values():
        if not model.path:
            what = f"`{model.name}` is a preset: its shape is known, its weights are not on this machine"
            hub = hub_name(model.name)
            help = presets.download(hub) if hub else 'name a folder: model policy = "./my-model"'
            found.append(Diagnostic("unknown-model", what, model.span, help))
            continue
        for pattern in ("*.safetensors", "tokenizer.json"):
            if not list(Path(model.path).glob(pattern)):
                what = f"the model folder {model.path} holds no {pattern}"
                help = fix_commands.tokenizer(model.path) if pattern == "tokenizer.json" else ""
                found.append(Diagnostic("missing-file", what, model.span, help))
        found += _links(model)
    if not found:
        found = [d for model in plan.deploy.models.values() if (d := _unreadable(model))]
    if not found:
        found = folders.changed(plan) or [d for d in folders.check(plan) if d.severity == "error"]
    if "source" not in plan.deploy.data:
        found.append(
            Diagnostic(
                "missing-file",
                "the deploy names no data for the source",
                plan.deploy.span,
                'add: data source = "file.jsonl" { ... }',
            )
        )
    sizes, able = {}, not found  # data needs the models' tokenizers
    for name, item in plan.deploy.data.items():
        try:
            sizes[name] = data.check(item, plan) if able else data.DatasetPreview(len(data.read(item, plan.graph)))
        except Fault as fault:
            found += fault.diagnostics
    if found:
        raise Fault(*found)
    if not os.environ.get("RAY_ADDRESS"):
        check_machine(plan)
    return sizes


def _links(model: Model) -> Iterator[Diagnostic]:
    """Links that lead out of a model's folder: their content would be copied or trained, and saved."""
    folder = Path(model.path)
    for file, target in (tensor_files.links_out(folder) if folder.is_dir() else {}).items():
        what = f"`{file.relative_to(folder)}` in the model folder {model.path} is a link out of it, to {target}"
        help = "remove the link, or copy the file into the folder: a run saves weights with copies of the other files"
        yield Diagnostic("missing-file", what, model.span, help)


def _packages(plan: Plan) -> Iterator[Diagnostic]:
    """Engines that are not installed, each once: where it is named, else at the layout that only it can run."""
    by_engine: dict[str, list[Placement]] = {}
    for placement in interpreters.placed(plan):
        by_engine.setdefault(placement.engine.name, []).append(placement)
    for name, placements in by_engine.items():
        spec = ENGINES.get(name)
        if spec is None or not (missing := _missing(plan, spec)):
            continue
        first = next((p for p in placements if p.engine.span.line or _reason(p)), placements[0])
        what = f"the engine `{name}` of `{first.node}` needs {', '.join(missing)}, not installed here"
        help = packages.installing(name, missing, plan.cluster.device.backend)
        layout = plan.deploy.layouts.get(first.node)
        reason = _reason(first)
        span = first.engine.span if first.engine.span.line else plan.graph.node(first.node).span
        if reason:
            what += f"; the plan chose it, since {reason}"
        if reason and layout is not None and layout.span.line:
            span = layout.span
            help = help + _otherwise(plan, first, layout)
        yield Diagnostic("not-installed", what, span, help)


def _missing(plan: Plan, spec: EngineSpec) -> list[str]:
    """The packages of an engine that are not installed here."""
    needs = plan.cluster.device.kind.packages(spec.needs) if spec.build else ()
    return [package for package in needs if not packages.version(package)]


def _reason(placement: Placement) -> str:
    """What other engines lack, where the plan chose an engine for that; else ""."""
    by, _, lacking = placement.engine.chosen.partition(": ")
    return lacking if by.startswith("the plan") else ""


def _otherwise(plan: Plan, placement: Placement, layout: Layout) -> str:
    """The axes to leave out of a layout so that an engine runs it which is installed; "" where that is not all."""
    node = plan.graph.node(placement.node)
    model = plan.model(placement.node)
    for spec in ENGINES.values():
        beyond = [axis for axis in AXES if getattr(layout, axis) > 1 and axis not in spec.axes]
        ones: dict[str, Any] = dict.fromkeys(beyond, 1)
        rest = replace(layout, stages=(), **ones)
        able = spec.build and spec.chosen and node.verb in spec.verbs and model.family in spec.families
        zero = node.verb != "update" or layout.zero in spec.zero
        if beyond and able and zero and not _missing(plan, spec) and not any(misfits(model, spec, rest)):
            axes = " and ".join(f"`{axis}`" for axis in beyond)
            return f"; or leave {axes} out of the layout: `{spec.name}` runs it then"
    return ""


def _interpreters(plan: Plan) -> Iterator[Diagnostic]:
    """Of a cluster the probe says it for each host."""
    return iter(()) if os.environ.get("RAY_ADDRESS") else interpreters.check(plan)


def _unreadable(model: Model) -> Diagnostic | None:
    """What is wrong with a folder's tokenizer."""
    try:
        Tokens(model.path)
    except Exception as error:  # the library raises nothing more special
        help = fix_commands.lfs(Path(model.path) / "tokenizer.json")
        return Diagnostic("missing-file", f"the tokenizer of {model.path} cannot be read: {error}", model.span, help)
    return None
