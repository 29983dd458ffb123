"""The folder of a run.

Invariant: a run never writes among another's results, and two never write into one folder at a time.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..diagnostics import Diagnostic, Fault
from ..plan import Plan
from . import checkpoint


def choose(plan: Plan, out: Path | str | None) -> Path:
    """The folder of this run; never one that holds another's results."""
    names = (Path("runs") / f"{plan.deploy.name}-{n}" for n in itertools.count(1))
    folder = Path(out) if out is not None else next(p for p in names if not p.exists())
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    what = ""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is there already and is not empty"
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = f"cannot be made: {nearest} is not a folder that can be written to"
    if what:
        help = "name another with --out"
        if folder.is_dir() and checkpoint.found(folder):
            help += f", or go on with the run in it: --resume {folder}"
        raise Fault(Diagnostic("bad-value", f"the output folder {folder} {what}", help=help))
    return folder


def make(plan: Plan, folder: Path, stated: bool) -> Path:
    """Makes the folder; where its name was ours to choose, another run that took it meanwhile keeps it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=stated)
            return folder
        except FileExistsError:
            folder = choose(plan, None)


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Two runs never write into one folder. The lock goes with the process, however it ends."""
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another run is writing into {out}"
            raise Fault(Diagnostic("bad-value", what, help="wait for its end, or name another folder with --out")) from None
        except OSError:
            pass  # a file system without locks: then nobody is kept out
        yield
    finally:
        os.close(handle)
