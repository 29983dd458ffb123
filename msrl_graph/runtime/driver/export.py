"""`--export`: writes the weights of a checkpoint as Hugging Face folders.

Invariant: no process is started. Only an intact checkpoint is exported. The exported folder gets the config and the
tokenizer of the model from which the checkpoint was trained. Existing files are never overwritten.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ...compiler.loading import load
from ...data.plan_paths import copy_to_host, make_absolute
from ...diagnostics import NOWHERE, Diagnostic, Fault, nearest
from ...diagnostics.surface import by_surface, name_option
from ...files.paths import is_folder
from ...files.urls import is_url
from ...files.weights import is_weight_file
from ...ir.plan import Plan
from ...model.architecture import Model
from ..weights import checkpoint, hf_export
from ..weights.checkpoint import CheckpointSource, CorruptCheckpoint, Manifest
from . import remote_folder, run_inputs
from .resume import differences, find_checkpoint, model_shapes

FOLDER = "exported"  # within a run's folder


@dataclass(frozen=True)
class ExportedWeights:
    """Result of an export: a folder for each worker, and warnings."""

    folders: dict[str, Path]
    warnings: tuple[Diagnostic, ...] = ()


def export(
    target: str, program: Plan | None = None, worker: str = "", to: str = "", merged: bool = False
) -> ExportedWeights:
    """Write the weights of a checkpoint as Hugging Face folders.

    `target` is the folder or URL of a checkpoint or of a run. For a run, the newest checkpoint is exported. By default,
    all trained workers are exported, each into its own folder below `to`. With `worker`, only this worker is exported,
    into `to` itself. If `to` is empty, the weights are written below the folder `exported` of the run. The plan
    `program` names the models of the workers. If `program` is None, the plan in the run's folder is used. An adapter is
    written alone, or `merged` into the weights of its model. Raises Fault.
    """
    copies: list[Path] = []
    try:
        fetched = remote_folder.bring(target, NOWHERE, copies, "export") if is_url(target) else None
        path, manifest = find_checkpoint(str(fetched.folder) if fetched else target, NOWHERE, "export")
        plan = program or _load_plan(path, target)
        workers = _select_workers(path, manifest, plan, worker)
        folders = {name: _check_free(_target_folder(path, name, worker, to, target)) for name in workers}
        plan = copy_to_host(make_absolute(plan), data=False)
        models = {name: _find_model(plan, name, path, manifest) for name in workers}
        warnings = [warning for name in workers for warning in _compare_files(models[name], plan, name, path, manifest)]
        source = CheckpointSource(path, manifest)
        for name in workers:
            _write_folder(source, name, models[name], folders[name], merged)
        return ExportedWeights(folders, tuple(warnings))
    finally:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)


def _refuse(message: str, help: str = "", code: str = "bad-checkpoint") -> Fault:
    return Fault(Diagnostic(code, message, help=help))


def _name_export(target: str = "CHECKPOINT") -> str:
    """Return how to export a checkpoint with the models of a program."""
    return by_surface(
        command_line=f"msrl-run PROGRAM {name_option('export', target)}",
        python=f"export({target}, plan=compile(PROGRAM))",
    )


def _load_plan(path: Path, target: str) -> Plan:
    """Load the plan from the folder of the run that wrote the checkpoint `path`."""
    file = path.parent.parent / remote_folder.PLAN
    again = f"name the program of the run: {_name_export(target)}"
    try:
        return load(file.read_bytes(), str(file))
    except OSError as error:
        message = f"the checkpoint {path} needs the models in {file}, which cannot be read: {error.strerror}"
        raise _refuse(message, again, "missing-file") from None
    except Fault as fault:
        raise Fault(*(replace(diagnostic, help=again) for diagnostic in fault.diagnostics)) from None


def _select_workers(path: Path, manifest: Manifest, plan: Plan, worker: str) -> list[str]:
    """Return the names of the workers to export, in their order in the checkpoint.

    If `worker` is empty, the result has every worker that has weights in the checkpoint.
    """
    pieces = (piece.name.split("/") for file in manifest.files for piece in file.pieces)
    saved = list(dict.fromkeys(name for name, kind, *_ in pieces if kind == "weights"))
    has = " and ".join(f"`{name}`" for name in saved)
    if not saved:
        raise _refuse(f"the checkpoint {path} holds no weights")
    if worker and worker not in saved:
        message = f"the checkpoint {path} holds no weights of `{worker}`, but of {has}"
        raise _refuse(
            message, nearest(worker, saved) or f"export one of them: {name_option('worker', saved[0])}", "unknown-name"
        )
    if other := [name for name in saved if name not in plan.graph.changing_workers]:
        message = f"the checkpoint {path} holds weights of `{other[0]}`, which `{plan.graph.name}` does not train"
        raise _refuse(message, f"name the program of the run: {_name_export()}")
    return [worker] if worker else saved


def _target_folder(path: Path, name: str, worker: str, to: str, target: str) -> Path:
    if to:
        return Path(to).absolute() if worker else Path(to).absolute() / name
    if is_url(target) or path.parent.name != checkpoint.FOLDER:
        where = "is at a URL" if is_url(target) else "is not in the folder of a run"
        raise _refuse(
            f"the checkpoint {target} {where}: name the folder to export to",
            f"add {name_option('to', 'FOLDER')}",
            "bad-value",
        )
    return path.parent.parent / FOLDER / path.name / name


def _check_free(folder: Path) -> Path:
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return folder
        problem = "exists and is not empty" if folder.is_dir() else "is a file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise _refuse(
        f"the folder to export to, {folder}, {problem}",
        f"remove it, or name another one: {name_option('to')}",
        "bad-value",
    )


def _find_model(plan: Plan, worker: str, path: Path, manifest: Manifest) -> Model:
    """Check that a checkpoint was trained from a worker's model; return the model."""
    model = plan.model(plan.graph.sharing(worker)[0].name)
    name = plan.graph.worker(worker).model
    shapes = manifest.program.get("models", {}).get(name)
    if other := differences({"models": {name: shapes}}, {"models": {name: model_shapes(plan)[name]}}):
        raise _refuse(f"the checkpoint {path} is of another program: {'; '.join(other)}", "name the run's own program")
    if not model.path or not is_folder(Path(model.path)):
        message = (
            f"the config and the tokenizer of `{worker}` come from its model's folder, and "
            f"{model.path or model.name} is not a folder on this machine"
        )
        help = f"restore it, or name its new place in the program: {_name_export()}"
        raise _refuse(message, help, "missing-file")
    return model


def _compare_files(model: Model, plan: Plan, worker: str, path: Path, manifest: Manifest) -> list[Diagnostic]:
    """Return warnings about model files that changed after a checkpoint was written.

    Files with weights are not compared. Raises Fault if a change turns the model into another model.
    """
    name = plan.graph.worker(worker).model
    before = run_inputs.parse_inputs(manifest.inputs)
    if before is None:
        return []
    now = run_inputs.companions(Path(model.path), name)
    of_model = {key: entry for key, entry in before.files.items() if key.startswith(f"model {name}: ")}
    was = {key: entry for key, entry in of_model.items() if not is_weight_file(key.rpartition(": ")[2])}
    changes = run_inputs.differences(run_inputs.RunInputs(was, {}), run_inputs.RunInputs(now, {}))
    if changes.model:
        message = f"the checkpoint {path} is of another model: {'; '.join(changes.model)}"
        raise _refuse(message, "restore what the run began with, or name the program that has its place")
    if not changes.changed:
        return []
    message = (
        f"the folder of the model has changed since the checkpoint {path} was written: {'; '.join(changes.changed)}"
    )
    help = f"the export uses the files as they are now in {model.path}"
    return [Diagnostic("changed-program", message, help=help, severity="warning")]


def _write_folder(source: CheckpointSource, worker: str, model: Model, folder: Path, merged: bool) -> None:
    path = source.path
    names = {f"{worker}/weights/{tensor.name}" for tensor in model.saved}
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
        hf_export.write_folder(model, weights, folder, merged)
    except CorruptCheckpoint as error:
        raise _refuse(f"the checkpoint {path} cannot be used: {error}") from None
    except OSError as error:
        message = f"the folder {folder} cannot be written: {error.strerror or error}"
        raise _refuse(message, f"name another one: {name_option('to')}", "bad-value") from None


__all__ = ["FOLDER", "ExportedWeights", "export"]
