"""A run before it is started: all of it that can be known to be wrong, told at once.

Invariant: nothing is started here, and what is fetched of a run at a URL goes again where the run is not to be.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from ...compiler.unsupported import untried
from ...diagnostics import Diagnostic, Fault, Span
from ...emit.humanize import many
from ...files import urls
from ...files.urls import is_url
from ...ir.plan import Plan
from ...ir.plan_paths import absolute, here, pinned
from ..data import dataset as data
from ..data import row_files as rows
from ..metrics.recorder import METRICS, whole_lines
from ..rank.loss_dry_run import tried
from ..weights import checkpoint
from . import environment_check, remote_folder, run_inputs
from .preflight import check
from .resume import resumed
from .run_folder import choose
from .run_inputs import NO_INPUTS, RunInputs


@dataclass(frozen=True)
class WatchOptions:
    """How a run is watched, apart from what it computes."""

    measure: bool = False  # memory, at each instruction of an iteration
    verbose: bool = False  # what the processes print, as they print it
    record: bool = False  # the rows of each iteration are written into the run's folder
    replay: str = ""  # the folder of a recorded run, whose responses are taken in place of generated ones
    overwrite: bool = False  # results of an earlier run in the folder are replaced
    nice: int = 0  # by how much the processes that compute are nicer than what starts them
    watch: bool = False  # there is a page of it
    metrics: int | None = None  # at which port Prometheus finds its metrics, 0: at a free one
    evaluate: bool = False  # its evaluations alone, once: nothing is trained, no weights are written


PLAIN = WatchOptions()


@dataclass(frozen=True)
class PreparedRun:
    """A run that could start: its folder (`stated`: by the user), where it begins, and what is to be told about it.
    Where the folder is a working copy, `url` is whose; `copies` are all that were made."""

    plan: Plan
    rows: dict[str, data.DatasetPreview]
    folder: Path
    stated: bool
    begin: Path | None
    manifest: checkpoint.Manifest | None
    warnings: list[Diagnostic]
    url: str = ""
    copies: tuple[Path, ...] = ()
    origin: str = ""  # the URL that `begin` is from
    inputs: RunInputs = NO_INPUTS
    changed: tuple[str, ...] = ()  # what has changed since `begin` was written, and decides the result
    evaluates: bool = False  # and nothing else

    def drop(self) -> None:
        """Removes the working copies of a run that is not started."""
        for copy in self.copies:
            shutil.rmtree(copy, ignore_errors=True)

    @property
    def goes_on(self) -> bool:
        """Whether the results are added to those of the run that is resumed."""
        return self.begin is not None and self.folder == self.begin.parent.parent

    def lines(self) -> list[str]:
        """What would run."""
        plan = self.plan
        run = self.plan.deploy.run
        begin = (
            f"from iteration {self.manifest.iteration} ({self.origin or self.begin})"
            if self.manifest
            else "from the beginning"
        )
        bests = " and ".join(f"`{e.title(e.best)}`" for e in plan.deploy.evaluations if e.best)
        saved = f"a checkpoint every {run.save} iterations, the newest {run.keep} kept" if run.save else ""
        saved = " and ".join(filter(None, (saved, f"the one with the best {bests}" if bests else "")))
        rows = ", ".join(f"{name} {found.rows} rows" for name, found in self.rows.items())
        trains = f"{run.iterations} iterations"
        if self.evaluates:
            trains = f"evaluates {' and '.join(e.data for e in plan.deploy.evaluations)}, trains nothing,"
            saved = ""
        left_out = [f"{name}: {found}" for name, found in self.rows.items() if found.out]
        return [
            f"{plan.deploy.name}: {trains} {begin}, seed {run.seed}",
            f"on {many(plan.cluster.nodes, 'host')} of {plan.cluster.devices_per_node} {plan.cluster.device.resource}",
            *(f"{s.pool}: by {s.python}" for s in plan.surroundings if s.python),
            *(f"{s.pool}: {x.name}={x.value}, {x.why}" for s in plan.surroundings for x in s.settings),
            f"data: {rows}",
            *left_out,
            *(f"changed since the checkpoint: {what}" for what in self.changed),
            f"{saved or 'no checkpoints'}; processes that die are started anew {run.restarts} times; a wrong number: "
            f"{run.on_nan}",
            f"results would be in {self.url or self.folder}; nothing was started",
        ]


def prepare(plan: Plan, out: Path | str | None = None, resume: str = "", options: WatchOptions = PLAIN) -> PreparedRun:
    """Everything that can be checked without starting a process; `Fault` for what is wrong."""
    copies: list[Path] = []
    try:
        return replace(_prepared(plan, out, resume, options, copies), copies=tuple(copies))
    except BaseException:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)
        raise


def _prepared(
    plan: Plan, out: Path | str | None, resume: str, options: WatchOptions, copies: list[Path]
) -> PreparedRun:
    if options.evaluate and not plan.deploy.evaluations:
        what = f"`{plan.deploy.name}` has no `evaluate`, so there is nothing to do without training"
        help = "name data and the columns to report, in the deploy: evaluate DATA { report = COLUMN }"
        raise Fault(Diagnostic("bad-value", what, plan.deploy.span, help))
    plan = pinned(plan)
    copied = here(plan)
    sizes, warnings = check(copied), [*untried(plan), *tried(plan), *environment_check.check(plan)]
    if any(d.severity == "error" for d in warnings):
        raise Fault(*warnings)
    for name, found in sizes.items():
        warnings += found.doubts(plan.deploy.data[name], plan.graph.rows[0] if name == "source" else 0)
    plan = absolute(plan)
    copied = absolute(copied)
    read = run_inputs.take(copied, options.replay)
    target = resume or plan.deploy.run.resume
    if not target:
        rows.check(plan, options.record, options.replay, 0)
        folder, url = _chosen(plan, out, options, copies)
        stated = out is not None
        return PreparedRun(
            plan, sizes, folder, stated, None, None, warnings, url, inputs=read, evaluates=options.evaluate
        )
    span = plan.deploy.run.span if not resume else replace(plan.deploy.run.span, line=0)
    brought = remote_folder.bring(target, span, copies) if is_url(target) else None
    whose = resumed(copied, str(brought.folder) if brought else target, span, read, trains=not options.evaluate)
    begin = whose.path
    manifest = whose.manifest
    home = begin.parent.parent
    newest = brought.newest if brought else begin == checkpoint.found(begin.parent.parent)[-1]
    stays = out is None or urls.same(str(out), brought.run if brought else str(home))
    if options.evaluate:
        if stays and out is not None:
            what = f"an evaluation is not written into the folder of the run that it evaluates, {out}"
            raise Fault(Diagnostic("bad-value", what, help="name another folder with --out"))
        stays = False
    if stays and not newest and not options.overwrite:
        run = brought.run if brought else home
        what = f"the run in {run} has newer checkpoints than {begin.name}, which going on from there would replace"
        help = "name another folder for the results with --out, or replace them: --overwrite"
        raise Fault(Diagnostic("bad-checkpoint", what, span, help))
    if not options.evaluate:
        warnings += _lost_lines(home, begin, manifest, stays, span)
    rows.check(plan, options.record, options.replay, manifest.iteration)
    folder, url = (home, brought.run if brought else "") if stays else _chosen(plan, out, options, copies)
    if stays and brought:
        urls.writable(url)
    origin = urls.under(brought.run, checkpoint.FOLDER, begin.name) if brought else ""
    warnings += whose.warnings
    stated = stays or out is not None
    known = (plan, sizes, folder, stated, begin, manifest, warnings, url)
    return PreparedRun(*known, origin=origin, inputs=read, changed=whose.changed, evaluates=options.evaluate)


def _lost_lines(run: Path, begin: Path, manifest: checkpoint.Manifest, stays: bool, span: Span) -> list[Diagnostic]:
    """A warning where lines of metrics.jsonl are missing of which the checkpoint has no copy; Fault where the run is to
    add to them."""
    if any(f.name == checkpoint.METRICS for f in manifest.files) or manifest.hosts:
        return []
    lines, wrong = whole_lines(run / METRICS)
    if len(lines) >= manifest.lines:
        return []
    what = (
        f"of the {manifest.lines} lines of metrics.jsonl that belong to the checkpoint {begin}, {len(lines)} are left "
    )
    what += f"in {run} ({wrong})" if wrong else f"in {run}"
    what += "; the checkpoint was written by a version that kept no copy of them"
    if stays:
        help = "put the file back, or go on with the lines that are left in another folder: --out"
        raise Fault(Diagnostic("bad-checkpoint", what, span, help))
    return [Diagnostic("bad-checkpoint", what, span, "the run goes on with these", "warning")]


def _chosen(plan: Plan, out: Path | str | None, options: WatchOptions, copies: list[Path]) -> tuple[Path, str]:
    """The folder of a run that begins, and the URL whose working copy it is."""
    if not is_url(str(out)):
        return choose(plan, out, options.overwrite, options.replay), ""
    url = str(out).rstrip("/")
    remote_folder.choose(url, options.overwrite)
    copies.append(remote_folder.working(url))
    return copies[-1], url


__all__ = ["PLAIN", "PreparedRun", "WatchOptions", "prepare"]
