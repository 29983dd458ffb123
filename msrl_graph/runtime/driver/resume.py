"""Whose a checkpoint is: what a run is resumed from, and what has changed since it was written.

Invariant: a damaged checkpoint, and one of another algorithm or model, is refused; whatever else decides the result and
has changed is listed in one warning. Where things are, and how they are laid out, decides nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ... import noise
from ...algorithms import library
from ...diagnostics import Diagnostic, Fault, Span
from ...files.paths import is_folder
from ...ir.attributes import UpdateAttributes
from ...ir.plan import Plan
from ..weights import checkpoint
from ..weights.checkpoint import Manifest
from . import run_inputs
from .run_inputs import RunInputs

MODEL = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "tied", "dtype")
SHOWN = 20  # differences that the warning lists
_SIZE = re.compile(r"data\.\w+\.bytes ")
_CALL = re.compile(r"(?:.*/)?([^/]+\.py:\w+)")


@dataclass(frozen=True)
class ResumePoint:
    """What a run is resumed from, and in words what has `changed` since that decides the result."""

    path: Path
    manifest: Manifest
    changed: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]


def resumed(plan: Plan, target: str, span: Span, now: RunInputs | None = None, trains: bool = True) -> ResumePoint:
    """The checkpoint that `target` names, a checkpoint's folder or a run's; Fault where it is unsound or another's.
    `now`: the inputs of the plan; `trains`: the run goes on from it."""
    path, manifest = find_checkpoint(target, span)
    if trains and manifest.iteration > plan.deploy.run.iterations:
        done = (
            f"the checkpoint {path} is of {manifest.iteration} iterations, the run is to have "
            f"{plan.deploy.run.iterations}"
        )
        help = "state more iterations, or resume from an older checkpoint"
        raise Fault(Diagnostic("bad-checkpoint", done, span, help))
    help = "bring back what the run began with, or begin another run, without --resume"
    other = differences(manifest.program, program(plan))
    if foreign := [d for d in other if d.startswith(("models.", "algorithm.name "))]:
        what = f"the checkpoint {path} is of another program: {'; '.join(foreign)}"
        raise Fault(Diagnostic("bad-checkpoint", what, span, help))
    before = run_inputs.recorded(manifest.inputs)
    if before is not None and now is not None:
        found = run_inputs.differences(before, now)
        if found.model:
            what = f"the checkpoint {path} is of another model: {'; '.join(found.model)}"
            raise Fault(Diagnostic("bad-checkpoint", what, span, help))
        # The data are compared by what they hold.
        other = [*(d for d in other if not _SIZE.match(d)), *found.changed]
    if not other:
        return ResumePoint(path, manifest, (), ())
    shown = "; ".join(other[:SHOWN]) + (f"; and {len(other) - SHOWN} more" if len(other) > SHOWN else "")
    what = f"what decides the result has changed since the checkpoint {path} was written: {shown}"
    help = "the run goes on with everything as it is now" if trains else "it is evaluated with everything as it is now"
    return ResumePoint(
        path, manifest, tuple(other), (Diagnostic("changed-program", what, span, help, severity="warning"),)
    )


def find_checkpoint(target: str, span: Span, use: str = "resume") -> tuple[Path, Manifest]:
    """Find the checkpoint that `target` names; of a run the newest. `use` is the flag that names it. Raises Fault."""
    path = Path(target).absolute()

    def refuse(what: str, help: str = "") -> Fault:
        return Fault(Diagnostic("bad-checkpoint", what, span, help))

    if not is_folder(path):
        raise refuse(f"there is no folder {path} to {use} from")
    run = path.parent.parent if path.parent.name == checkpoint.FOLDER else path
    copied_out = use == "export" and (path / checkpoint.MANIFEST).is_file()  # of its run's folder
    if path == run and not copied_out:
        if not checkpoint.found(run):
            raise refuse(
                f"the run in {run} has saved no checkpoint",
                "state `save` in `run { }`: a checkpoint every so many iterations",
            )
        path = checkpoint.found(run)[-1]
    try:
        return path, checkpoint.sound(path)
    except checkpoint.CorruptCheckpoint as error:
        older = checkpoint.newest(run)
        if older is None:
            help = "no other of this run is sound"
            help += ": begin anew; `run { keep = 3 }` keeps more of them to go back to" if use == "resume" else ""
        else:
            help = f"{older[0]} is sound: --{use} {older[0]}"
            help += ", with --out another folder, or --overwrite for what is newer" if use == "resume" else ""
        raise refuse(f"the checkpoint {path} cannot be used: {error}", help) from None


def program(plan: Plan) -> dict[str, Any]:
    """All of a plan that decides the result of a run: the algorithm, the models' shapes, the seed, the version of the
    streams that draw by it, the data, what a wrong number does, and under a schedule of the learning rate how many
    iterations it is for."""
    models = model_shapes(plan)
    data = {name: {"fields": d.fields, "bytes": _size(d.path)} for name, d in plan.deploy.data.items()}
    found: dict[str, Any] = _bare(msgspec.to_builtins({"algorithm": plan.graph, "models": models, "data": data}))
    run = plan.deploy.run
    decides: dict[str, Any] = {"seed": run.seed, "random_streams": noise.VERSION, "on_nan": run.on_nan}
    if scheduled := [n.name for n in plan.graph.verb("update") if _is_scheduled(UpdateAttributes.of(n))]:
        decides[f"iterations, which the learning rate of {' and '.join(scheduled)} is scheduled over,"] = run.iterations
    return found | decides


def model_shapes(plan: Plan) -> dict[str, Any]:
    """What makes two models of a plan the same, but for their weights."""
    return {
        name: {f: getattr(m, f) for f in MODEL} | {"tensors": len(m.tensors)} for name, m in plan.deploy.models.items()
    }


def _is_scheduled(update: UpdateAttributes) -> bool:
    """Whether the learning rate depends on the last step of the run."""
    if update.rate.kind != "call":
        return False
    known = library().get(("schedule", str(update.rate.value)))
    return known is None or ("last" in known[0].fills and "steps" not in update.rate.keys)


def _size(path: str) -> int:
    return Path(path).stat().st_size if Path(path).is_file() else 0


def _bare(value: Any) -> Any:
    """Without the places in the text."""
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if k != "span"}
    return [_bare(v) for v in value] if isinstance(value, (list, tuple)) else value


def differences(there: Any, here: Any, where: str = "") -> list[str]:
    """What differs between two programs, in words. Of a function in a file its folder does not count."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(k for k in here if k not in there)]
        return [d for k in keys for d in differences(there.get(k), here.get(k), f"{where}.{k}" if where else str(k))]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        named = [x.get("name", i) if isinstance(x, dict) else i for i, x in enumerate(here)]
        return [d for n, a, b in zip(named, there, here, strict=True) for d in differences(a, b, f"{where}.{n}")]
    if there == here or (_is_call(there) and _is_call(here) and _called(there) == _called(here)):
        return []
    return [f"{where} was {_shown(there)}, is {_shown(here)}"]


def _is_call(value: Any) -> bool:
    return isinstance(value, str) and _CALL.fullmatch(value) is not None


def _called(value: str) -> str:
    return _CALL.sub(r"\1", value)


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


__all__ = ["ResumePoint", "differences", "find_checkpoint", "model_shapes", "program", "resumed"]
