"""The folder of a run.

Invariant: a run never writes among another's results, unless it is asked to replace them, and then removes nothing but
what runs make and nothing that it reads; two never write into one folder at a time.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...diagnostics import Diagnostic, Fault
from ...files import private
from ...files.untrusted_folder import escape
from ...ir.plan import Plan
from ..data import row_files as rows
from ..weights import checkpoint
from . import run_inputs

DRIVER_MODULE = "msrl_graph.runtime.driver.driver"  # the module that a driver's process runs
ORPHAN = 15.0  # seconds that a driver is left to end after its supervisor

# All that a run makes in its folder.
MADE = (
    "logs",
    "plan.json",
    run_inputs.FILE,
    "metrics.jsonl",
    "curve.png",
    "tensorboard",
    "trace.json",
    "memory.json",
    "weights",
    "exported",
    checkpoint.FOLDER,
    rows.FOLDER,
    rows.EVALUATED,
)


def choose(plan: Plan, out: Path | str | None, overwrite: bool = False, replay: str = "") -> Path:
    """The folder of this run; never one that holds another's results, unless they are to be replaced and the run reads
    none of them."""
    try:
        return _chosen(plan, out, overwrite, replay)
    except OSError as error:  # a name that is too long, a folder that none may look into
        raise _unfit(out, error) from None


def _chosen(plan: Plan, out: Path | str | None, overwrite: bool, replay: str) -> Path:
    names = (Path("runs") / f"{plan.deploy.name}-{n}" for n in itertools.count(1))
    folder = Path(out) if out is not None else next(p for p in names if not p.exists())
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    what = ""
    help = "name another with --out"
    if folder.exists() and not folder.is_dir():
        what = "is a file"
    elif folder.exists() and any(folder.iterdir()):
        ran = (folder / "logs" / "driver.log").is_file()
        if overwrite and ran:
            return _replaced(plan, folder, replay)
        what = "is there already and is not empty" + (
            "; it holds no results of a run, which --overwrite would replace" if overwrite else ""
        )
        if ran and checkpoint.found(folder):
            help += f", go on with the run in it: --resume {folder}, or replace its results: --overwrite"
        elif ran:
            help += ", or replace the results in it: --overwrite"
    elif overwrite and out is None:
        raise Fault(
            Diagnostic(
                "bad-value",
                "--overwrite replaces the results in a folder, and none is named",
                help="name it with --out",
            )
        )
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = f"cannot be made: {nearest} is not a folder that can be written to"
    if what:
        raise Fault(Diagnostic("bad-value", f"the output folder {folder} {what}", help=help))
    return folder


def _unfit(folder: Path | str | None, error: OSError) -> Fault:
    """What the system says of a folder that it does not give."""
    what = f"the output folder {folder or 'under runs'} cannot be made: {error.strerror}"
    return Fault(Diagnostic("bad-value", what, help="name another with --out"))


def _replaced(plan: Plan, folder: Path, replay: str) -> Path:
    """A folder whose results are to be replaced; `Fault` where the run reads some of them."""
    made = [(folder / name).resolve() for name in MADE]
    reads = [*(m.path for m in plan.deploy.models.values()), *(d.path for d in plan.deploy.data.values())]
    reads += [str(Path(replay) / rows.FOLDER)] if replay else []
    for path in (Path(r).resolve() for r in reads if r):
        if any(path == m or m in path.parents for m in made):
            what = f"--overwrite would remove {path}, which the run reads"
            raise Fault(Diagnostic("bad-value", what, help="name another folder with --out"))
    return folder


def clear(folder: Path, begin: Path | None) -> None:
    """Removes the results of a run; of one that goes on from its own checkpoint `begin` only the newer checkpoints."""
    newer = [p for p in checkpoint.found(folder) if begin and int(p.name) > int(begin.name)]
    for path in newer if begin else (folder / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def make(plan: Plan, folder: Path, stated: bool) -> Path:
    """Makes the folder; where its name was ours to choose, another run that took it meanwhile keeps it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=stated)
            return folder
        except FileExistsError as error:
            if stated:
                raise _unfit(folder, error) from None
            folder = choose(plan, None)
        except OSError as error:  # as under /proc, which seems to be one that can be written to
            raise _unfit(folder, error) from None


def check_own(out: Path) -> None:
    """Fault for an output folder that another user could change while the run writes into it.

    That user could lay links there, and so have the run write over any file of its own user. A link to the folder is
    followed if it is this user's or root's.
    """
    try:
        private.check_link(out)
        private.check_folder(out.resolve(), private.OTHERS_WRITE)
    except private.NotPrivate as error:
        what = f"the output folder {out} {error.what}, who could lead elsewhere what the run writes"
        help = f"chmod o-w {out}" if error.what.startswith("is open") else "name another with --out"
        raise Fault(Diagnostic("bad-value", what, help=help)) from None
    except OSError as error:
        raise _unfit(out, error) from None


def check_links(out: Path) -> None:
    """Raise Fault if a link leads out of an output folder from a place that the run writes to.

    No run makes one, so somebody else has, as in a folder that was copied from a stranger. Checkpoints are written
    under new names, so what else lies beside them is nobody's concern.
    """
    for path in (out / name for name in MADE):
        inner = path.rglob("*") if path.is_dir() and path.name != checkpoint.FOLDER else ()
        for link in (p for p in (path, *inner) if p.is_symlink()):
            if target := escape(link, out):
                what = f"{link} is a link to {target}, where the run would write"
                help = f"remove the link: rm {shlex.quote(str(link))}; or name another folder with --out"
                raise Fault(Diagnostic("bad-value", what, help=help))


def check_free(out: Path) -> None:
    """Raise Fault if another run has written into an output folder since it was chosen."""
    if any((out / name).exists() for name in MADE):
        what = f"another run has written into {out} meanwhile"
        raise Fault(Diagnostic("bad-value", what, help="name another folder with --out"))


@contextmanager
def lock(out: Path) -> Iterator[int]:
    """Two runs never write into one folder. The lock is held by the descriptor that is given, and goes with the last
    process that has it, however it ends: the supervisor, and its driver."""
    handle = os.open(out, os.O_RDONLY)
    until = time.monotonic() + ORPHAN
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A driver whose supervisor was killed ends by itself.
                if not any(map(_supervises, who := holders(out))) and time.monotonic() < until:
                    time.sleep(0.1)
                    continue
                by = f" (process {' and '.join(map(str, who))})" if who else ""
                what = f"another run is writing into {out}{by}"
                help = f"wait for its end{', or end it' if who else ''}, or name another folder with --out"
                raise Fault(Diagnostic("bad-value", what, help=help)) from None
            except OSError:
                break  # a file system without locks: then nobody is kept out
        yield handle
    finally:
        os.close(handle)


def holders(out: Path) -> list[int]:
    """The processes that hold the lock of a folder, of those that this one may look at."""
    found = []
    here = out.stat()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):
                if any(_same(handle, here) for handle in (process / "fd").iterdir()):
                    found.append(int(process.name))
    return found


def _same(handle: Path, folder: os.stat_result) -> bool:
    """Whether a process's descriptor is of a folder, and has a lock."""
    try:
        facts = handle.parent.parent / "fdinfo" / handle.name
        return os.path.samestat(handle.stat(), folder) and "FLOCK" in facts.read_text(encoding="ascii")
    except OSError:
        return False


def _supervises(pid: int) -> bool:
    """Whether a process that has a run's folder open is another run's supervisor.

    A driver is not: it ends with its supervisor. Nor is a process that is ending: its memory goes before its
    descriptors, so for a moment it has no command line.
    """
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return bool(line) and DRIVER_MODULE.encode() not in line
    return False
