"""The checkpoint that a run resumes, and later changes that affect the result.

Invariant: a damaged checkpoint is refused. A checkpoint of another algorithm or model is refused. All other changes
that affect the result are listed in one warning. Layouts and the locations of files never affect the result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ... import noise
from ...algorithms import library
from ...data.data_files import titled_paths
from ...diagnostics import Diagnostic, Fault, Span
from ...diagnostics.surface import name_option
from ...files.paths import is_folder
from ...ir.attributes import UpdateAttributes
from ...ir.data_options import DataOptions
from ...ir.plan import DataSource, Plan
from ..weights import checkpoint
from ..weights.checkpoint import Manifest
from . import run_inputs
from .run_folder import name_older
from .run_inputs import RunInputs

MODEL = ("family", "hidden", "layers", "stack", "vocabulary", "tied", "dtype")
SHOWN = 20  # the most differences that the warning lists
_SIZE = re.compile(r"data\.\w+\.bytes ")
_CALL = re.compile(r"(?:.*/)?([^/]+\.py:\w+)")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run is resumed.

    `changed` describes each change that affects the run's result and was made after the checkpoint was written.
    """

    path: Path
    manifest: Manifest
    changed: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


def find_resume_point(
    plan: Plan, target: str, span: Span, now: RunInputs | None = None, trains: bool = True
) -> ResumePoint:
    """Find the checkpoint to resume from, and check that it fits the plan.

    `target` is the folder of a checkpoint or of a run. `now` has digests of the plan's files in their present state. If
    `now` is None, files are not compared. If `trains` is true, the run continues from the checkpoint. If `trains` is
    false, the run only evaluates the checkpoint. Raises Fault if the checkpoint is damaged or belongs to another
    program.
    """
    path, manifest = find_checkpoint(target, span)
    if trains and manifest.iteration > plan.deploy.run.iterations:
        excess = (
            f"the checkpoint {path} is of {manifest.iteration} iterations, but the run has only "
            f"{plan.deploy.run.iterations}"
        )
        help = "state more iterations, or resume from an older checkpoint"
        raise Fault(Diagnostic("bad-checkpoint", excess, span, help))
    help = f"restore what the run began with, or start another run, without {name_option('resume')}"
    other = differences(manifest.program, program(plan))
    if foreign := [difference for difference in other if difference.startswith(("models.", "algorithm.name "))]:
        message = f"the checkpoint {path} is of another program: {'; '.join(foreign)}"
        raise Fault(Diagnostic("bad-checkpoint", message, span, help))
    before = run_inputs.parse_inputs(manifest.inputs)
    if before is not None and now is not None:
        changes = run_inputs.differences(before, now)
        if changes.model:
            message = f"the checkpoint {path} is of another model: {'; '.join(changes.model)}"
            raise Fault(Diagnostic("bad-checkpoint", message, span, help))
        # The data are compared by what they hold.
        other = [*(difference for difference in other if not _SIZE.match(difference)), *changes.changed]
    if not other:
        return ResumePoint(path, manifest, (), ())
    shown = "; ".join(other[:SHOWN]) + (f"; and {len(other) - SHOWN} more" if len(other) > SHOWN else "")
    message = f"inputs that decide the result have changed since the checkpoint {path} was written: {shown}"
    help = (
        "the run continues with everything as it is now" if trains else "it is evaluated with everything as it is now"
    )
    return ResumePoint(
        path, manifest, tuple(other), (Diagnostic("changed-program", message, span, help, severity="warning"),)
    )


def find_checkpoint(target: str, span: Span, use: str = "resume") -> tuple[Path, Manifest]:
    """Find the checkpoint that a flag names; return its folder and its manifest.

    `target` is the folder of a checkpoint or of a run. For a run, the newest checkpoint is returned. `use` is the name
    of the command-line flag: "resume" or "export". Raises Fault if there is no intact checkpoint.
    """
    path = Path(target).absolute()

    def refuse(message: str, help: str = "") -> Fault:
        return Fault(Diagnostic("bad-checkpoint", message, span, help))

    if not is_folder(path):
        raise refuse(f"there is no folder {path} to {use} from")
    run = path.parent.parent if path.parent.name == checkpoint.FOLDER else path
    copied_out = use == "export" and (path / checkpoint.MANIFEST).is_file()  # out of its run's folder
    if path == run and not copied_out:
        if not checkpoint.list_checkpoints(run):
            raise refuse(
                f"the run in {run} has saved no checkpoint",
                "set `save` in `run { }`: the number of iterations between checkpoints",
            )
        path = checkpoint.list_checkpoints(run)[-1]
    try:
        return path, checkpoint.verify(path)
    except checkpoint.CorruptCheckpoint as error:
        older = checkpoint.find_newest(run)
        if older is None:
            help = "no other checkpoint of this run is intact"
            help += (
                ": start a new run; `run { keep = 3 }` keeps more checkpoints to go back to" if use == "resume" else ""
            )
        else:
            help = f"{older[0]} is intact: {name_older(older[0], use)}"
        raise refuse(f"the checkpoint {path} cannot be used: {error}", help) from None


def program(plan: Plan) -> dict[str, Any]:
    """Return everything in a plan that affects the result of a run.

    The values are the algorithm, the shapes of the models, the seed, the version of the random streams, the data, and
    what the run does when it finds a NaN. If a learning-rate schedule depends on the number of iterations, the result
    also contains the number of iterations.
    """
    models = model_shapes(plan)
    data = {name: _describe_data(dataset) for name, dataset in plan.deploy.data.items()}
    settings: dict[str, Any] = _without_spans(
        msgspec.to_builtins({"algorithm": plan.graph, "models": models, "data": data})
    )
    run = plan.deploy.run
    decides: dict[str, Any] = {"seed": run.seed, "random_streams": noise.VERSION, "on_nan": run.on_nan}
    if scheduled := [node.name for node in plan.graph.verb("update") if _is_scheduled(UpdateAttributes.of(node))]:
        decides[f"iterations, which the learning rate of {' and '.join(scheduled)} is scheduled over,"] = run.iterations
    return settings | decides


def model_shapes(plan: Plan) -> dict[str, Any]:
    """Return, for each model of a plan, the properties that identify the model.

    Weights are not part of these properties.
    """
    shapes: dict[str, Any] = {
        name: {field: getattr(model, field) for field in MODEL}
        | {"tensors": len(model.weights)}
        | ({"adapter": str(model.initial)} if model.initial else {})
        for name, model in plan.deploy.models.items()
    }
    return {name: _without_spans(msgspec.to_builtins(shape)) for name, shape in shapes.items()}


def _is_scheduled(update: UpdateAttributes) -> bool:
    """Return whether an update's learning rate depends on the run's number of steps."""
    if update.rate.kind != "call":
        return False
    known = library().get(("schedule", str(update.rate.value)))
    return known is None or ("last" in known[0].fills and "steps" not in update.rate.keys)


def _describe_data(data: DataSource) -> dict[str, Any]:
    if data.parts:
        return {"parts": data.parts}
    options = {name: getattr(data.options, name) for name in data.options.list_changed(DataOptions.declared())}
    sizes = [path.stat().st_size for path in titled_paths(data).values() if path.is_file()]
    return {"fields": data.fields, "bytes": sum(sizes)} | ({"options": options} if options else {})


def _without_spans(value: Any) -> Any:
    """Remove the spans (positions in the program's text) from a nested value."""
    if isinstance(value, dict):
        return {key: _without_spans(item) for key, item in value.items() if key != "span"}
    return [_without_spans(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Describe the differences between two results of the function `program`.

    `where` is the dotted name of the compared values, for messages. Two of the user's Python functions count as equal
    if only the folders of their files differ.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            difference
            for key in keys
            for difference in differences(before.get(key), now.get(key), f"{where}.{key}" if where else str(key))
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        named = [item.get("name", i) if isinstance(item, dict) else i for i, item in enumerate(now)]
        return [
            difference
            for name, old, new in zip(named, before, now, strict=True)
            for difference in differences(old, new, f"{where}.{name}")
        ]
    if before == now or (_is_call(before) and _is_call(now) and _call_name(before) == _call_name(now)):
        return []
    return [f"{where} was {_shorten(before)}, is {_shorten(now)}"]


def _is_call(value: Any) -> bool:
    return isinstance(value, str) and _CALL.fullmatch(value) is not None


def _call_name(value: str) -> str:
    return _CALL.sub(r"\1", value)


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


__all__ = ["ResumePoint", "differences", "find_checkpoint", "find_resume_point", "model_shapes", "program"]
