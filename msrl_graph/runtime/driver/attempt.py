"""Checks and preparation of a run, before any process starts.

A working copy is a local folder for the content of a URL.

Invariant: this module starts no process. All errors that can be found without starting a process are reported together.
If the run does not start, the run's working copies are removed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ...compiler.unsupported import find_untested
from ...data.plan_paths import copy_to_host, make_absolute, pin_urls
from ...diagnostics import Diagnostic, Fault, Span
from ...diagnostics.quantities import plural
from ...diagnostics.surface import name_option
from ...files import urls
from ...files.urls import is_url
from ...ir.plan import Plan
from ...ir.run_options import RunOptions
from ..data import dataset_preview as data
from ..data import row_files as rows
from ..metrics.metrics_file import METRICS, read_valid_lines
from ..rank.loss_dry_run import try_terms
from ..weights import checkpoint
from . import environment_check, remote_folder, run_inputs
from .preflight import check_requirements
from .resume import find_resume_point
from .run_folder import choose_folder
from .run_inputs import NO_INPUTS, RunInputs


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    - `plan`: the plan, with the values that the options override.
    - `rows`: a preview of each data file (such as the file's number of rows). The key is the name of the data in the
      program.
    - `folder`: the run's folder. `stated`: whether the user named this folder.
    - `begin`: the checkpoint from which the run continues; None if the run starts from the beginning.
    - `manifest`: the manifest of the checkpoint `begin`, which lists the checkpoint's files and says how the checkpoint
      was written.
    - `warnings`: the warnings to print.
    - `url`: the URL to which the results are uploaded, if `folder` is only a working copy; otherwise "".
    - `copies`: all working copies, which `drop` removes.
    """

    plan: Plan
    options: RunOptions
    rows: dict[str, data.DatasetPreview]
    folder: Path
    stated: bool
    begin: Path | None
    manifest: checkpoint.Manifest | None
    warnings: list[Diagnostic]
    url: str = ""
    copies: tuple[Path, ...] = ()
    origin: str = ""  # the URL that `begin` comes from
    inputs: RunInputs = NO_INPUTS
    changed: tuple[str, ...] = ()  # changes since `begin` was written that affect the result

    def drop(self) -> None:
        """Remove the working copies of a run that is not started."""
        for copy in self.copies:
            shutil.rmtree(copy, ignore_errors=True)

    @property
    def continues_in_place(self) -> bool:
        """Whether the run adds its results to the folder of the run that it resumes."""
        return self.begin is not None and self.folder == self.begin.parent.parent

    def lines(self) -> list[str]:
        """Return lines of text that describe the run that would start."""
        plan = self.plan
        run = self.plan.deploy.run
        begin = (
            f"from iteration {self.manifest.iteration} ({self.origin or self.begin})"
            if self.manifest
            else "from the beginning"
        )
        bests = " and ".join(
            f"`{evaluation.title(evaluation.best)}`" for evaluation in plan.deploy.evaluations if evaluation.best
        )
        saved = f"a checkpoint every {run.save} iterations, keeping the newest {run.keep}" if run.save else ""
        saved = " and ".join(filter(None, (saved, f"the one with the best {bests}" if bests else "")))
        rows = ", ".join(f"{name} {preview.rows} rows" for name, preview in self.rows.items())
        trains = f"{run.iterations} iterations"
        if self.options.evaluate:
            trains = (
                f"evaluates {' and '.join(evaluation.data for evaluation in plan.deploy.evaluations)}, trains nothing,"
            )
            saved = ""
        left_out = [f"{name}: {preview}" for name, preview in self.rows.items() if preview.left_out]
        return [
            f"{plan.deploy.name}: {trains} {begin}, seed {run.seed}",
            f"on {plural(plan.cluster.nodes, 'host')} of "
            f"{plan.cluster.devices_per_node} {plan.cluster.device.resource}",
            *(
                f"{environment.pool}: by {environment.python}"
                for environment in plan.surroundings
                if environment.python
            ),
            *(
                f"{environment.pool}: {setting.name}={setting.value}, {setting.why}"
                for environment in plan.surroundings
                for setting in environment.settings
            ),
            f"data: {rows}",
            *left_out,
            *(f"changed since the checkpoint: {change}" for change in self.changed),
            f"{saved or 'no checkpoints'}; restarts after a process died: at most {run.restarts}; on NaN: {run.on_nan}",
            f"results would be in {self.url or self.folder}; nothing was started",
        ]


def prepare(plan: Plan, options: RunOptions = RunOptions()) -> PreparedRun:
    """Check all that can be checked before a process starts; return the prepared run.

    Raises Fault with all problems that were found.
    """
    copies: list[Path] = []
    try:
        return replace(_prepare_run(options.apply_to(plan), options, copies), copies=tuple(copies))
    except BaseException:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)
        raise


def _prepare_run(plan: Plan, options: RunOptions, copies: list[Path]) -> PreparedRun:
    out = options.out
    replay = str(options.replay or "")
    if options.evaluate and not plan.deploy.evaluations:
        message = f"`{plan.deploy.name}` has no `evaluate`, so there is nothing to do without training"
        help = "name data and the columns to report, in the deploy: evaluate DATA { report = COLUMN }"
        raise Fault(Diagnostic("bad-value", message, plan.deploy.span, help))
    plan = pin_urls(plan)
    local_plan = copy_to_host(plan)
    sizes = check_requirements(local_plan)
    warnings = [*find_untested(plan), *try_terms(plan), *environment_check.check(plan)]
    if any(diagnostic.severity == "error" for diagnostic in warnings):
        raise Fault(*warnings)
    for name, preview in sizes.items():
        warnings += preview.warnings(plan.deploy.data[name], plan.graph.rows[0] if name == "source" else 0)
    plan = make_absolute(plan)
    local_plan = make_absolute(local_plan)
    inputs = run_inputs.collect_inputs(local_plan, replay)
    target = str(options.resume or plan.deploy.run.resume)
    if not target:
        rows.check(plan, options.record, replay, 0)
        folder, url = _choose_folder(plan, options, copies)
        stated = out is not None
        return PreparedRun(plan, options, sizes, folder, stated, None, None, warnings, url, inputs=inputs)
    span = plan.deploy.run.span if not options.resume else replace(plan.deploy.run.span, line=0)
    fetched = remote_folder.bring(target, span, copies) if is_url(target) else None
    resume_point = find_resume_point(
        local_plan, str(fetched.folder) if fetched else target, span, inputs, trains=not options.evaluate
    )
    begin = resume_point.path
    manifest = resume_point.manifest
    home = begin.parent.parent
    newest = fetched.newest if fetched else begin == checkpoint.list_checkpoints(begin.parent.parent)[-1]
    in_place = out is None or urls.is_same_place(str(out), fetched.run if fetched else str(home))
    if options.evaluate:
        if in_place and out is not None:
            message = f"cannot write an evaluation into the folder of the run that it evaluates, {out}"
            raise Fault(Diagnostic("bad-value", message, help=f"name another folder with {name_option('out')}"))
        in_place = False
    if in_place and not newest and not options.overwrite:
        run = fetched.run if fetched else home
        message = f"the run in {run} has newer checkpoints than {begin.name}, which resuming from there would replace"
        help = f"name another folder for the results with {name_option('out')}"
        help += f", or replace them: {name_option('overwrite', True)}"
        raise Fault(Diagnostic("bad-checkpoint", message, span, help))
    if not options.evaluate:
        warnings += _check_lost_lines(home, begin, manifest, in_place, span)
    rows.check(plan, options.record, replay, manifest.iteration)
    folder, url = (home, fetched.run if fetched else "") if in_place else _choose_folder(plan, options, copies)
    if in_place and fetched:
        urls.check_writable(url)
    origin = urls.join(fetched.run, checkpoint.FOLDER, begin.name) if fetched else ""
    warnings += resume_point.warnings
    stated = in_place or out is not None
    common = (plan, options, sizes, folder, stated, begin, manifest, warnings, url)
    return PreparedRun(*common, origin=origin, inputs=inputs, changed=resume_point.changed)


def _check_lost_lines(
    run: Path, begin: Path, manifest: checkpoint.Manifest, in_place: bool, span: Span
) -> list[Diagnostic]:
    """Check that the metrics lines written before a checkpoint still exist.

    `run` is the folder of the run that wrote the checkpoint `begin`. The lines are in metrics.jsonl in this folder, or
    in a copy of the file in the checkpoint. Returns a warning if lines are missing. Raises Fault if lines are missing
    and the resumed run continues in the same folder (`in_place`).
    """
    if any(file.name == checkpoint.METRICS for file in manifest.files) or manifest.hosts:
        return []
    lines, damage = read_valid_lines(run / METRICS)
    if len(lines) >= manifest.lines:
        return []
    message = f"only {len(lines)} of the {manifest.lines} lines of metrics.jsonl that belong to the checkpoint {begin} "
    message += f"are left in {run} ({damage})" if damage else f"are left in {run}"
    message += "; the checkpoint was written by a version that kept no copy of them"
    if in_place:
        help = f"put the file back, or continue with the remaining lines in another folder: {name_option('out')}"
        raise Fault(Diagnostic("bad-checkpoint", message, span, help))
    return [Diagnostic("bad-checkpoint", message, span, "the run continues with these", "warning")]


def _choose_folder(plan: Plan, options: RunOptions, copies: list[Path]) -> tuple[Path, str]:
    """Choose the folder of a new run; return the folder and its URL.

    If the option `out` is a URL, the folder is a new local folder, whose files are uploaded to the URL. It is added to
    `copies`. If the option is not a URL, the returned URL is "".
    """
    if not is_url(str(options.out)):
        return choose_folder(plan, options.out, options.overwrite, str(options.replay or "")), ""
    url = str(options.out).rstrip("/")
    remote_folder.choose(url, options.overwrite)
    copies.append(remote_folder.make_working_copy(url))
    return copies[-1], url


__all__ = ["PreparedRun", "prepare"]
