"""What a run needs before it starts: weights, tokenizer, data, packages, devices.

Invariant: what lacks is told all at once, with its line, before a process is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ...backends import ENGINES, packages
from ...checks import folders
from ...compiler.unready import unready
from ...diagnostics import Diagnostic, Fault
from ...files import hints
from ...files.paths import hub_name
from ...ir.plan import Plan
from ...model import presets
from ...model.architecture import Model
from ..data import dataset as data
from ..data.tokens import Tokens
from ..process import interpreters
from ..weights import saved
from .pool import check_machine


def check(plan: Plan) -> dict[str, data.Looked]:
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
                help = hints.tokenizer(model.path) if pattern == "tokenizer.json" else ""
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
            sizes[name] = data.check(item, plan) if able else data.Looked(len(data.read(item, plan.graph)))
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
    for file, target in (saved.links_out(folder) if folder.is_dir() else {}).items():
        what = f"`{file.relative_to(folder)}` in the model folder {model.path} is a link out of it, to {target}"
        help = "remove the link, or copy the file into the folder: a run saves weights with copies of the other files"
        yield Diagnostic("missing-file", what, model.span, help)


def _packages(plan: Plan) -> Iterator[Diagnostic]:
    """Engines that are not installed, each once, where it is named."""
    told, kind = set(), plan.cluster.device.kind
    for placement in interpreters.placed(plan):
        spec = ENGINES.get(placement.engine.name)
        needs = kind.packages(spec.needs) if spec and spec.build else ()
        missing = [p for p in needs if not packages.version(p)]
        if spec and missing and spec.name not in told:
            told.add(spec.name)
            what = f"the engine `{spec.name}` of `{placement.node}` needs {', '.join(missing)}, not installed here"
            span = placement.engine.span if placement.engine.span.line else plan.graph.node(placement.node).span
            yield Diagnostic(
                "not-installed", what, span, packages.installing(spec.name, missing, plan.cluster.device.backend)
            )


def _interpreters(plan: Plan) -> Iterator[Diagnostic]:
    """Of a cluster the probe says it for each host."""
    return iter(()) if os.environ.get("RAY_ADDRESS") else interpreters.check(plan)


def _unreadable(model: Model) -> Diagnostic | None:
    """What is wrong with a folder's tokenizer."""
    try:
        Tokens(model.path)
    except Exception as error:  # the library raises nothing more special
        help = hints.lfs(Path(model.path) / "tokenizer.json")
        return Diagnostic("missing-file", f"the tokenizer of {model.path} cannot be read: {error}", model.span, help)
    return None
