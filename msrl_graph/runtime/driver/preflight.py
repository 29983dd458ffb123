"""Checks before a run starts: weights, tokenizer, data, packages, devices.

Invariant: everything that is missing is reported together, each item with its line in the program, before a process
starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...backends import ENGINES, packages
from ...backends.divisibility import find_misfits
from ...backends.spec import EngineSpec
from ...checks import folders
from ...checks.stage import Check, PlanContext, When, run_checks
from ...compiler.unsupported import find_unsupported
from ...diagnostics import Diagnostic, Fault
from ...files import fix_commands
from ...files.weights import PATTERNS, candidate_weight_files
from ...ir.plan import Placement, Plan
from ...model import peft_folder
from ...model.architecture import Model
from ...model.models import suggest_weights
from ...sharding.layout import AXES, Layout
from ...trackers import find_tracker, is_file
from ..data import dataset_preview as data
from ..data.tokens import Tokens
from ..process import interpreters
from ..weights import tensor_files
from .process_pool import check_machine


def check_requirements(plan: Plan) -> dict[str, data.DatasetPreview]:
    """Check that the weights, tokenizers, data, packages and devices are available.

    Returns a preview of each data file. Raises Fault with everything that is missing.
    """
    context = PlanContext(ENGINES)
    problems = run_checks(SUPPORT, plan, context) or run_checks(MACHINE, plan, context)
    problems += run_checks(MODELS, plan, context, earlier=problems)
    previews = {}
    has_tokenizers = not problems  # data needs the models' tokenizers
    problems += run_checks(DATA, plan, context)
    for name, item in plan.deploy.data.items():
        if item.parts:
            continue
        try:
            previews[name] = data.check(item, plan) if has_tokenizers else data.count_rows(item, plan.graph)
        except Fault as fault:
            problems += fault.diagnostics
    if problems:
        raise Fault(*problems)
    if not os.environ.get("RAY_ADDRESS"):
        check_machine(plan)
    return previews


def _check_models(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    """Yield an error for each model that is not complete on this machine."""
    for model in plan.deploy.models.values():
        if model.initial and not peft_folder.find_files(model.initial.folder):
            names = " or ".join(peft_folder.WEIGHTS)
            message = f"the adapter's folder {model.initial.folder} holds no weights ({names})"
            yield Diagnostic("missing-file", message, model.span)
        if not model.path:
            message = f"`{model.name}` is a preset: its shape is known, its weights are not on this machine"
            yield Diagnostic("unknown-model", message, model.span, suggest_weights(model))
            continue
        if not candidate_weight_files(model.path):
            message = f"the model folder {model.path} holds no weights ({' or '.join(PATTERNS)})"
            yield Diagnostic("missing-file", message, model.span)
        if not (Path(model.path) / "tokenizer.json").exists():
            message = f"the model folder {model.path} holds no tokenizer.json"
            yield Diagnostic("missing-file", message, model.span, fix_commands.tokenizer(model.path))
        yield from _links(model)


def _links(model: Model) -> Iterator[Diagnostic]:
    """Yield an error for each symbolic link that leads out of a model's folder.

    Without the error, the run would read the file to which the link leads, and save the file's content with the trained
    model.
    """
    folder = Path(model.path)
    for file, target in (tensor_files.find_outside_links(folder) if folder.is_dir() else {}).items():
        message = f"`{file.relative_to(folder)}` in the model folder {model.path} is a link out of it, to {target}"
        help = "remove the link, or copy the file into the folder: a run saves weights with copies of the other files"
        yield Diagnostic("missing-file", message, model.span, help)


def _packages(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    """Yield an error for each engine whose packages are not installed.

    The error points to the place where the program names the engine. If the program does not name the engine, the error
    points to the layout that made the plan choose the engine.
    """
    by_engine: dict[str, list[Placement]] = {}
    for placement in interpreters.placements_of(plan):
        by_engine.setdefault(placement.engine.name, []).append(placement)
    for name, placements in by_engine.items():
        spec = ENGINES.get(name)
        if spec is None or not (missing := _missing_packages(plan, spec)):
            continue
        first = next(
            (candidate for candidate in placements if candidate.engine.span.line or _reason(candidate)), placements[0]
        )
        message = f"the engine `{name}` of `{first.node}` needs {', '.join(missing)}, not installed here"
        help = packages.make_install_hint(name, missing, plan.cluster.device.backend)
        layout = plan.deploy.layouts.get(first.node)
        reason = _reason(first)
        span = first.engine.span if first.engine.span.line else plan.graph.node(first.node).span
        if reason:
            message += f"; the plan chose it, since {reason}"
        if reason and layout is not None and layout.span.line:
            span = layout.span
            help = help + _suggest_layout(plan, first, layout)
        yield Diagnostic("not-installed", message, span, help)


def _trackers(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    """Yield an error for each tracker whose packages are not installed."""
    for name in plan.deploy.run.track:
        needs = () if is_file(name) else find_tracker(name).packages
        if missing := [package for package in needs if not packages.version(package)]:
            message = f"the tracker `{name}` needs {', '.join(missing)}, not installed here"
            yield Diagnostic("not-installed", message, plan.deploy.run.span, f"pip install {' '.join(missing)}")


def _missing_packages(plan: Plan, spec: EngineSpec) -> list[str]:
    """Return the packages of an engine that are not installed on this machine."""
    return packages.missing_packages(spec, plan.cluster.device.kind) if spec.build else []


def _reason(placement: Placement) -> str:
    """Return why the plan chose a node's engine: what the other engines lack.

    Returns "" if the program names the engine.
    """
    by, _, lacking = placement.engine.chosen.partition(": ")
    return lacking if by.startswith("the plan") else ""


def _suggest_layout(plan: Plan, placement: Placement, layout: Layout) -> str:
    """Suggest axes to remove from a layout, so that an installed engine supports it.

    An axis is, for example, `tp`. Returns "" if the removal of axes does not help.
    """
    node = plan.graph.node(placement.node)
    model = plan.model(placement.node)
    for spec in ENGINES.values():
        beyond = [axis for axis in AXES if getattr(layout, axis) > 1 and axis not in spec.capabilities.axes]
        ones: dict[str, Any] = dict.fromkeys(beyond, 1)
        rest = replace(layout, stages=(), **ones)
        able = (
            spec.build
            and spec.capabilities.chosen
            and node.verb in spec.verbs
            and not model.list_lacking(spec.capabilities.features)
        )
        zero = node.verb != "update" or layout.zero in spec.capabilities.zero
        if beyond and able and zero and not _missing_packages(plan, spec) and not any(find_misfits(model, spec, rest)):
            axes = " and ".join(f"`{axis}`" for axis in beyond)
            return f"; or leave {axes} out of the layout: `{spec.name}` runs it then"
    return ""


def _interpreters(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    """Yield an error for each pool whose Python interpreter does not fit the run.

    If the run is on a cluster, no error is yielded: cluster_probe.py checks the interpreters of each host.
    """
    return iter(()) if os.environ.get("RAY_ADDRESS") else interpreters.check_interpreters(plan)


def _check_tokenizers(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    """Yield an error for each model whose tokenizer cannot be read."""
    for model in plan.deploy.models.values():
        try:
            Tokens(model.path)
        except Exception as error:  # the library raises nothing more specific
            help = fix_commands.lfs(Path(model.path) / "tokenizer.json")
            message = f"the tokenizer of {model.path} cannot be read: {error}"
            yield Diagnostic("missing-file", message, model.span, help)


def _check_folders(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Return the errors of the models' folders.

    The compiler has already reported the warnings.
    """
    return [diagnostic for diagnostic in folders.check(plan, context) if diagnostic.severity == "error"]


def _check_source(plan: Plan, context: PlanContext) -> Iterator[Diagnostic]:
    if "source" not in plan.deploy.data:
        message = "the deploy names no data for the source"
        help = 'add: data source = "file.jsonl" { ... }'
        yield Diagnostic("missing-file", message, plan.deploy.span, help)


# The checks before a run, by stage. Those of the machine only run if this version supports the program.
SUPPORT = (Check(lambda plan, context: find_unsupported(plan)),)
MACHINE = (Check(_packages), Check(_trackers), Check(_interpreters))
MODELS = (
    Check(_check_models),
    Check(_check_tokenizers, When.CLEAN),
    Check(lambda plan, context: folders.check_unchanged(plan), When.CLEAN),
    Check(_check_folders, When.CLEAN),
)
DATA = (Check(_check_source),)
