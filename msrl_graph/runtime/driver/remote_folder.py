"""A run's folder at a URL: a working copy on the driver's host, and uploads.

A working copy is a local folder for the content of a URL.

Invariant: the content at the URL is authoritative, so each start of a run makes a new working copy. A checkpoint
becomes visible at the URL only when all of its files are uploaded, because its manifest is uploaded last
(distributed_checkpoint.py). The working copy is removed when all of its content is at the URL. If an upload fails, the
working copy is kept, and a message names its folder.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...diagnostics import Diagnostic, Fault, Span
from ...diagnostics.surface import name_option
from ...files import private, urls
from ..metrics import tracking
from ..weights import checkpoint
from .run_folder import MADE, name_older

METRICS = "metrics.jsonl"
PLAN = "plan.json"


@dataclass(frozen=True)
class FetchedCheckpoint:
    """A checkpoint fetched from a URL.

    `run` is the URL of the checkpoint's run. `folder` is the checkpoint's folder in a working copy. `newest` says
    whether the checkpoint is the newest one of its run.
    """

    run: str
    folder: Path
    newest: bool


def make_working_copy(url: str) -> Path:
    """Create an empty folder for a working copy of the content at a URL."""
    return Path(tempfile.mkdtemp(prefix=f"{urls.name(url)}-", dir=private.cache("runs")))


def choose(url: str, overwrite: bool) -> None:
    """Check that a run can write its results to a URL.

    Raises Fault if the URL is not writable or not empty. With `overwrite`, the URL may contain the results of a run.
    """
    urls.check_writable(url)
    with urls.report_errors(url):
        names = urls.names(url)
    ran = bool({"logs", METRICS} & set(names))
    if names and not (ran and overwrite):
        message = f"the output folder {url} exists and is not empty"
        help = f"name another with {name_option('out')}"
        if checkpoint.FOLDER in names:
            help += f", resume the run in it: {name_option('resume', url)}"
        if ran:
            help += f", or replace the results in it: {name_option('overwrite', True)}"
        raise Fault(Diagnostic("bad-value", message, help=help))


def clear(url: str) -> None:
    """Remove the results of a run at a URL; raise Fault if the removal fails."""
    try:
        urls.remove(url, MADE)
    except OSError as error:
        raise Fault(Diagnostic("bad-value", f"the results at {url} cannot be replaced: {error}")) from None


def bring(target: str, span: Span, copies: list[Path], use: str = "resume") -> FetchedCheckpoint:
    """Fetch a checkpoint from a URL into a new working copy.

    `target` is the URL of a checkpoint or of a run. For a run, the newest checkpoint is fetched. The metrics and the
    plan of the run are also fetched. The working copy is added to `copies`. `use` is the command-line flag for which
    the user passed the URL: "resume" or "export". Raises Fault if there is no intact checkpoint.
    """
    above, _, last = target.rstrip("/").rpartition("/")
    is_checkpoint = checkpoint.is_folder_name(last) and urls.name(above) == checkpoint.FOLDER
    run = above.rpartition("/")[0] if is_checkpoint else target.rstrip("/")

    def refuse(message: str, help: str = "") -> Fault:
        return Fault(Diagnostic("bad-checkpoint", message, span, help))

    with urls.report_errors(target, span):
        saved = checkpoint.list_at_url(urls.join(run, checkpoint.FOLDER))
    if not saved:
        help = "set `save` in `run { }`: the number of iterations between checkpoints"
        raise refuse(f"the run in {run} has saved no checkpoint", help)
    chosen = last if run != target.rstrip("/") else saved[-1]
    url = urls.join(run, checkpoint.FOLDER, chosen)
    listing = urls.list_remote(url, folder=True, span=span)
    copies.append(copy := make_working_copy(run))
    folder = copy / checkpoint.FOLDER / chosen
    folder.parent.mkdir()
    with urls.report_errors(url, span):
        urls.fetch(url, listing.files, folder)
        for name in {METRICS, PLAN} & set(urls.names(run)):
            urls.fetch(run, {name: None}, copy / "of")
            (copy / "of" / name).rename(copy / name)
            (copy / "of").rmdir()
        tracked = urls.join(run, tracking.FOLDER)
        if tracking.ID in urls.names(tracked):
            urls.fetch(tracked, {tracking.ID: None}, copy / tracking.FOLDER)
    try:
        manifest = checkpoint.verify(folder)
        lost = next((file.name for file in manifest.files if file.name not in listing.files), "")
        if lost:
            raise checkpoint.CorruptCheckpoint(f"its file {lost} is missing")
    except checkpoint.CorruptCheckpoint as error:
        older = [number for number in saved if int(number) < int(chosen)]
        previous = urls.join(run, checkpoint.FOLDER, older[-1]) if older else ""
        help = f"try the one before: {name_older(previous, use)}" if previous else ""
        if use == "resume" and not previous:
            help = "start a new run"
        raise refuse(f"the checkpoint {url} cannot be used: {error}", help) from None
    return FetchedCheckpoint(run, folder, chosen == saved[-1])


def finish(copy: Path, url: str) -> None:
    """Upload the files of a run that has ended, and remove the run's working copy.

    If the newest checkpoint is not complete at the URL, the working copy is kept. Raises OSError if an upload fails.
    """
    urls.send(copy, url, [name for name in MADE if name != checkpoint.FOLDER])
    checkpoints = checkpoint.list_checkpoints(copy)
    with urls.report_errors(url):
        is_complete = not checkpoints or checkpoint.MANIFEST in urls.names(
            urls.join(url, checkpoint.FOLDER, checkpoints[-1].name)
        )
    if is_complete:
        shutil.rmtree(copy, ignore_errors=True)
