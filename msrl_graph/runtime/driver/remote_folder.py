"""A run's folder at a URL: the run writes into a working copy on the driver's host, and what is whole goes up.

Invariant: what lies at the URL is what counts, so each start has a working copy of its own; a checkpoint is seen there
only when all of it is there, since its manifest goes up last (distributed_checkpoint.py). The working copy goes when
all that is in it lies at the URL; else it stays, and is told of.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...diagnostics import Diagnostic, Fault, Span
from ...files import private, urls
from ..weights import checkpoint
from .run_folder import MADE

METRICS = "metrics.jsonl"
PLAN = "plan.json"


@dataclass(frozen=True)
class FetchedCheckpoint:
    """A checkpoint from a URL: the URL of its run, its folder in a working copy of that, and whether it is the
    newest."""

    run: str
    folder: Path
    newest: bool


def working(url: str) -> Path:
    """A new working copy."""
    return Path(tempfile.mkdtemp(prefix=f"{urls.name(url)}-", dir=private.cache("runs")))


def choose(url: str, overwrite: bool) -> None:
    """`Fault` for a URL that cannot be written to, or that holds results which are not to be replaced."""
    urls.writable(url)
    with urls.told(url):
        there = urls.names(url)
    ran = bool({"logs", METRICS} & set(there))
    if there and not (ran and overwrite):
        what = f"the output folder {url} is there already and is not empty"
        help = "name another with --out"
        if checkpoint.FOLDER in there:
            help += f", go on with the run in it: --resume {url}"
        if ran:
            help += ", or replace the results in it: --overwrite"
        raise Fault(Diagnostic("bad-value", what, help=help))


def clear(url: str) -> None:
    """Removes the results of a run. Raises Fault."""
    try:
        urls.remove(url, MADE)
    except OSError as error:
        raise Fault(Diagnostic("bad-value", f"the results at {url} cannot be replaced: {error}")) from None


def bring(target: str, span: Span, copies: list[Path], use: str = "resume") -> FetchedCheckpoint:
    """The checkpoint that a URL names, a checkpoint's or a run's, with the metrics and the plan of its run, in a
    working copy, which `copies` hears of. `use` is the flag that names it. Raises Fault."""
    above, _, last = target.rstrip("/").rpartition("/")
    of_run = checkpoint.is_named(last) and urls.name(above) == checkpoint.FOLDER
    run = above.rpartition("/")[0] if of_run else target.rstrip("/")

    def refuse(what: str, help: str = "") -> Fault:
        return Fault(Diagnostic("bad-checkpoint", what, span, help))

    with urls.told(target, span):
        there = checkpoint.at_url(urls.under(run, checkpoint.FOLDER))
    if not there:
        help = "state `save` in `run { }`: a checkpoint every so many iterations"
        raise refuse(f"the run in {run} has saved no checkpoint", help)
    chosen = last if run != target.rstrip("/") else there[-1]
    url = urls.under(run, checkpoint.FOLDER, chosen)
    found = urls.look(url, folder=True, span=span)
    copies.append(copy := working(run))
    folder = copy / checkpoint.FOLDER / chosen
    folder.parent.mkdir()
    with urls.told(url, span):
        urls.fetch(url, found.files, folder)
        for name in {METRICS, PLAN} & set(urls.names(run)):
            urls.fetch(run, {name: None}, copy / "of")
            (copy / "of" / name).rename(copy / name)
            (copy / "of").rmdir()
    try:
        manifest = checkpoint.sound(folder)
        lost = next((f.name for f in manifest.files if f.name not in found.files), "")
        if lost:
            raise checkpoint.CorruptCheckpoint(f"its file {lost} is missing")
    except checkpoint.CorruptCheckpoint as error:
        older = [n for n in there if int(n) < int(chosen)]
        go = urls.under(run, checkpoint.FOLDER, older[-1]) if older else ""
        help = f"try the one before: --{use} {go}" if go else ""
        if use == "resume":
            help = f"{help}, with --out another folder, or --overwrite for what is newer" if go else "begin anew"
        raise refuse(f"the checkpoint {url} cannot be used: {error}", help) from None
    return FetchedCheckpoint(run, folder, chosen == there[-1])


def finish(copy: Path, url: str) -> None:
    """Puts up what a run has left, and removes its working copy where its newest checkpoint is there too. OSError where
    something cannot be put up."""
    urls.send(copy, url, [name for name in MADE if name != checkpoint.FOLDER])
    kept = checkpoint.found(copy)
    with urls.told(url):
        there = not kept or checkpoint.MANIFEST in urls.names(urls.under(url, checkpoint.FOLDER, kept[-1].name))
    if there:
        shutil.rmtree(copy, ignore_errors=True)
