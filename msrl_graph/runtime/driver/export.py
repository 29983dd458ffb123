"""`--export`: the weights of a checkpoint as Hugging Face folders. No process is started.

Invariant: only a sound checkpoint is exported, and only with the config and the tokenizer of the model that it was
trained from. What is there already is never written over.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ...compiler.loading import load
from ...diagnostics import NOWHERE, Diagnostic, Fault, nearest
from ...files.paths import is_folder
from ...files.urls import is_url
from ...ir.plan import Plan
from ...ir.plan_paths import absolute, here
from ...model.architecture import Model
from ..weights import checkpoint, hf_export
from ..weights.checkpoint import CheckpointSource, CorruptCheckpoint, Manifest
from . import remote_folder, run_inputs
from .resume import differences, find_checkpoint, model_shapes

FOLDER = "exported"  # within a run's folder


@dataclass(frozen=True)
class ExportedWeights:
    """What was written: a folder for each worker, and what a person should know about it."""

    folders: dict[str, Path]
    warnings: tuple[Diagnostic, ...] = ()


def export(target: str, program: Plan | None = None, worker: str = "", to: str = "") -> ExportedWeights:
    """Write the weights of the checkpoint that `target` names: of all trained workers into folders below `to`, or of
    one `worker` into `to`.

    Which models they are is said by `program`, else by the plan in the run's folder. Raises Fault.
    """
    copies: list[Path] = []
    try:
        brought = remote_folder.bring(target, NOWHERE, copies, "export") if is_url(target) else None
        path, manifest = find_checkpoint(str(brought.folder) if brought else target, NOWHERE, "export")
        plan = program or _plan_of(path, target)
        workers = _workers(path, manifest, plan, worker)
        folders = {name: _free(_folder(path, name, worker, to, target)) for name in workers}
        plan = here(absolute(plan), data=False)
        models = {name: _model(plan, name, path, manifest) for name in workers}
        warnings = [w for name in workers for w in _compared(models[name], plan, name, path, manifest)]
        source = CheckpointSource(path, manifest)
        for name in workers:
            _write(source, name, models[name], folders[name])
        return ExportedWeights(folders, tuple(warnings))
    finally:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)


def _refuse(what: str, help: str = "", code: str = "bad-checkpoint") -> Fault:
    return Fault(Diagnostic(code, what, help=help))


def _plan_of(path: Path, target: str) -> Plan:
    """The plan in the folder of a checkpoint's run."""
    file = path.parent.parent / remote_folder.PLAN
    again = f"name the program of the run: msrl-run PROGRAM --export {target}"
    try:
        return load(file.read_bytes(), str(file))
    except OSError as error:
        what = f"which model the checkpoint {path} is of is in {file}, which cannot be read: {error.strerror}"
        raise _refuse(what, again, "missing-file") from None
    except Fault as fault:
        raise Fault(*(replace(d, help=again) for d in fault.diagnostics)) from None


def _workers(path: Path, manifest: Manifest, plan: Plan, worker: str) -> list[str]:
    """The workers to export, in the order of the checkpoint's files."""
    pieces = (piece.name.split("/") for file in manifest.files for piece in file.pieces)
    saved = list(dict.fromkeys(name for name, kind, *_ in pieces if kind == "weights"))
    has = " and ".join(f"`{name}`" for name in saved)
    if not saved:
        raise _refuse(f"the checkpoint {path} holds no weights")
    if worker and worker not in saved:
        what = f"the checkpoint {path} holds no weights of `{worker}`, but of {has}"
        raise _refuse(what, nearest(worker, saved) or f"export one of them: --worker {saved[0]}", "unknown-name")
    if other := [name for name in saved if name not in plan.graph.weighty]:
        what = f"the checkpoint {path} holds weights of `{other[0]}`, which `{plan.graph.name}` does not train"
        raise _refuse(what, "name the program of the run: msrl-run PROGRAM --export CHECKPOINT")
    return [worker] if worker else saved


def _folder(path: Path, name: str, worker: str, to: str, target: str) -> Path:
    if to:
        return Path(to).absolute() if worker else Path(to).absolute() / name
    if is_url(target) or path.parent.name != checkpoint.FOLDER:
        where = "is at a URL" if is_url(target) else "is not in the folder of a run"
        raise _refuse(
            f"the checkpoint {target} {where}: where to export to must be named", "add --to FOLDER", "bad-value"
        )
    return path.parent.parent / FOLDER / path.name / name


def _free(folder: Path) -> Path:
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return folder
        what = "is there already and is not empty" if folder.is_dir() else "is a file"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise _refuse(f"the folder to export to, {folder}, {what}", "remove it, or name another one: --to", "bad-value")


def _model(plan: Plan, worker: str, path: Path, manifest: Manifest) -> Model:
    """The model of a worker, which is the one that the checkpoint is of."""
    model = plan.model(plan.graph.sharing(worker)[0].name)
    name = plan.graph.worker(worker).model
    there = manifest.program.get("models", {}).get(name)
    if other := differences({"models": {name: there}}, {"models": {name: model_shapes(plan)[name]}}):
        raise _refuse(f"the checkpoint {path} is of another program: {'; '.join(other)}", "name the run's own program")
    if not model.path or not is_folder(Path(model.path)):
        what = (
            f"the config and the tokenizer of `{worker}` come from its model's folder, and "
            f"{model.path or model.name} is not a folder on this machine"
        )
        help = "bring it back, or say where it is now, in the program: msrl-run PROGRAM --export CHECKPOINT"
        raise _refuse(what, help, "missing-file")
    return model


def _compared(model: Model, plan: Plan, worker: str, path: Path, manifest: Manifest) -> list[Diagnostic]:
    """Warnings about files of the model's folder that are not what they were; Fault where they make another model."""
    name = plan.graph.worker(worker).model
    before = run_inputs.recorded(manifest.inputs)
    if before is None:
        return []
    now = run_inputs.companions(Path(model.path), name)
    of_model = {key: e for key, e in before.files.items() if key.startswith(f"model {name}: ")}
    was = {key: e for key, e in of_model.items() if ".safetensors" not in key}
    found = run_inputs.differences(run_inputs.RunInputs(was, {}), run_inputs.RunInputs(now, {}))
    if found.model:
        what = f"the checkpoint {path} is of another model: {'; '.join(found.model)}"
        raise _refuse(what, "bring back what the run began with, or name the program that says where it is")
    if not found.changed:
        return []
    what = f"the folder of the model has changed since the checkpoint {path} was written: {'; '.join(found.changed)}"
    help = f"what is exported has the files as they are now in {model.path}"
    return [Diagnostic("changed-program", what, help=help, severity="warning")]


def _write(source: CheckpointSource, worker: str, model: Model, folder: Path) -> None:
    path = source.path
    names = {f"{worker}/weights/{tensor.name}" for tensor in model.tensors}
    files = {file for name in names for file, _ in source.pieces.get(name, ())}
    if absent := sorted(file for file in files if not (path / file).is_file()):
        raise _refuse(
            f"the checkpoint {path} has {absent[0]} on another host ({len(absent)} of its {len(files)} files of "
            f"`{worker}` are not on this one)",
            "copy the files of all hosts into this folder, and export again",
        )
    try:
        weights = hf_export.read_weights(source, worker, model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        hf_export.write_folder(model, weights, folder)
    except CorruptCheckpoint as error:
        raise _refuse(f"the checkpoint {path} cannot be used: {error}") from None
    except OSError as error:
        what = f"the folder {folder} cannot be written: {error.strerror or error}"
        raise _refuse(what, "name another one: --to", "bad-value") from None


__all__ = ["FOLDER", "ExportedWeights", "export"]
