"""The folder of a run.

Invariant: a run never writes into a folder with another run's results, unless the user asks to replace these results.
In this case, the run removes only files that runs create, and never a file that the run itself reads. Two runs never
write into one folder at the same time.
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

from ...data.data_files import titled_paths
from ...diagnostics import Diagnostic, Fault
from ...diagnostics.surface import by_surface, name_option
from ...files import private
from ...files.untrusted_folder import escape
from ...ir.plan import Plan
from ..data import row_files as rows
from ..weights import checkpoint
from . import run_inputs

DRIVER_MODULE = "msrl_graph.runtime.driver.driver"  # the module that a driver's process runs
ORPHAN = 15.0  # seconds for a driver to end after its supervisor

# Everything that a run makes in its folder.
MADE = (
    "logs",
    "plan.json",
    run_inputs.FILE,
    "metrics.jsonl",
    "curve.png",
    "tensorboard",
    "trackers",
    "trace.json",
    "memory.json",
    "weights",
    "exported",
    checkpoint.FOLDER,
    rows.FOLDER,
    rows.EVALUATED,
)


def choose_folder(plan: Plan, out: Path | str | None, overwrite: bool = False, replay: str = "") -> Path:
    """Choose the folder of a run: `out`, or a new folder under runs/.

    The folder must be new or empty, with one exception: with `overwrite`, the folder may contain the results of another
    run, if this run reads none of these results. `replay` is the folder of a run whose rows this run reads, or "".
    Raises Fault if `out` does not meet these conditions.
    """
    try:
        return _choose(plan, out, overwrite, replay)
    except OSError as error:  # the name is too long, or a folder may not be read
        raise _creation_fault(out, error) from None


def _choose(plan: Plan, out: Path | str | None, overwrite: bool, replay: str) -> Path:
    names = (Path("runs") / f"{plan.deploy.name}-{number}" for number in itertools.count(1))
    folder = Path(out) if out is not None else next(path for path in names if not path.exists())
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    problem = ""
    help = f"name another with {name_option('out')}"
    if folder.exists() and not folder.is_dir():
        problem = "is a file"
    elif folder.exists() and any(folder.iterdir()):
        ran = (folder / "logs" / "driver.log").is_file()
        if overwrite and ran:
            return _check_replaceable(plan, folder, replay)
        problem = "exists and is not empty" + (
            f"; it holds no results of a run, which {name_option('overwrite', True)} would replace" if overwrite else ""
        )
        if ran and checkpoint.list_checkpoints(folder):
            help += f", resume the run in it: {name_option('resume', folder)}"
            help += f", or replace its results: {name_option('overwrite', True)}"
        elif ran:
            help += f", or replace the results in it: {name_option('overwrite', True)}"
    elif overwrite and out is None:
        raise Fault(
            Diagnostic(
                "bad-value",
                f"{name_option('overwrite', True)} replaces the results in a folder, and none is named",
                help=f"name it with {name_option('out')}",
            )
        )
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK):
        problem = f"cannot be made: {nearest} is not a writable folder"
    if problem:
        raise Fault(Diagnostic("bad-value", f"the output folder {folder} {problem}", help=help))
    return folder


def name_older(place: Path | str, use: str = "resume") -> str:
    """Name the options that use an older checkpoint; `use` is "resume" or "export"."""
    if use == "export":
        return by_surface(command_line=name_option("export", place), python=f"export({place})")
    replace = name_option("overwrite", True)
    return (
        f"{name_option('resume', place)}, with {name_option('out')} another folder, or {replace} to replace newer ones"
    )


def _creation_fault(folder: Path | str | None, error: OSError) -> Fault:
    """Return the error for an output folder that cannot be created."""
    message = f"the output folder {folder or 'under runs'} cannot be made: {error.strerror}"
    return Fault(Diagnostic("bad-value", message, help=f"name another with {name_option('out')}"))


def _check_replaceable(plan: Plan, folder: Path, replay: str) -> Path:
    """Check that a run may replace the results in a folder; return the folder.

    Raises Fault if the run reads some of these results, for example as a model, or as rows to replay. `replay` is the
    folder of the run whose rows are replayed, or "".
    """
    results = [(folder / name).resolve() for name in MADE]
    reads = [
        *(folder for model in plan.deploy.models.values() for folder in model.folders),
        *(str(path) for dataset in plan.deploy.data.values() for path in titled_paths(dataset).values()),
    ]
    reads += [str(Path(replay) / rows.FOLDER)] if replay else []
    for path in (Path(read_path).resolve() for read_path in reads if read_path):
        if any(path == result or result in path.parents for result in results):
            message = f"{name_option('overwrite', True)} would remove {path}, which the run reads"
            raise Fault(Diagnostic("bad-value", message, help=f"name another folder with {name_option('out')}"))
    return folder


def clear_results(folder: Path, begin: Path | None) -> None:
    """Remove the results in a run's folder.

    If the run resumes from the checkpoint `begin` in this folder, only the checkpoints that are newer than `begin` are
    removed.
    """
    newer = [
        checkpoint_path
        for checkpoint_path in checkpoint.list_checkpoints(folder)
        if begin and int(checkpoint_path.name) > int(begin.name)
    ]
    for path in newer if begin else (folder / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def make_folder(plan: Plan, folder: Path, stated: bool) -> Path:
    """Create the folder of a run.

    `stated` says whether the user named the folder. If the user did not name it, and another run has meanwhile created
    a folder of this name, the next free name is used.
    """
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=stated)
            return folder
        except FileExistsError as error:
            if stated:
                raise _creation_fault(folder, error) from None
            folder = choose_folder(plan, None)
        except OSError as error:  # as under /proc, which looks writable
            raise _creation_fault(folder, error) from None


def check_own(out: Path) -> None:
    """Raise Fault if another user could change the folder while the run writes.

    Another user could place links in the folder. The run would follow the links and could overwrite any file of the
    user who started the run. If `out` itself is a link, the link must belong to this user or to root.
    """
    try:
        private.check_link(out)
        private.check_folder(out.resolve(), private.OTHERS_WRITE)
    except private.NotPrivate as error:
        message = f"the output folder {out} {error.what}, who could redirect what the run writes"
        help = f"chmod o-w {out}" if error.what.startswith("is open") else f"name another with {name_option('out')}"
        raise Fault(Diagnostic("bad-value", message, help=help)) from None
    except OSError as error:
        raise _creation_fault(out, error) from None


def check_links(out: Path) -> None:
    """Raise Fault if a link in an output folder leads out of the folder.

    Only paths to which the run writes are checked. A run never creates a link out of its folder, so another person has
    created the link, for example in a folder that was copied from a stranger. Files in the folder of checkpoints are
    not checked, because checkpoints are written under new names.
    """
    for path in (out / name for name in MADE):
        inner = path.rglob("*") if path.is_dir() and path.name != checkpoint.FOLDER else ()
        for link in (candidate for candidate in (path, *inner) if candidate.is_symlink()):
            if target := escape(link, out):
                message = f"{link} is a link to {target}, where the run would write"
                help = f"remove the link: rm {shlex.quote(str(link))}; or name another folder with "
                help += name_option("out")
                raise Fault(Diagnostic("bad-value", message, help=help))


def check_free(out: Path) -> None:
    """Raise Fault if another run has written into `out` since `out` was chosen."""
    if any((out / name).exists() for name in MADE):
        message = f"another run has written into {out} meanwhile"
        raise Fault(Diagnostic("bad-value", message, help=f"name another folder with {name_option('out')}"))


@contextmanager
def lock_folder(out: Path) -> Iterator[int]:
    """Lock a folder, so that two runs never write into it at the same time.

    Yields the descriptor that holds the lock. The supervisor and its driver both have this descriptor. The lock ends
    when both processes have ended, for any reason. Raises Fault if another run holds the lock.
    """
    handle = os.open(out, os.O_RDONLY)
    until = time.monotonic() + ORPHAN
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A driver whose supervisor was killed ends by itself.
                if not any(map(_supervises, pids := holders(out))) and time.monotonic() < until:
                    time.sleep(0.1)
                    continue
                owners = f" (process {' and '.join(map(str, pids))})" if pids else ""
                message = f"another run is writing into {out}{owners}"
                help = f"wait for its end{', or end it' if pids else ''}, or name another folder with "
                help += name_option("out")
                raise Fault(Diagnostic("bad-value", message, help=help)) from None
            except OSError:
                break  # a file system without locks: then no run is kept out
        yield handle
    finally:
        os.close(handle)


def holders(out: Path) -> list[int]:
    """Return the process ids of other processes that hold the lock of a folder.

    The result does not contain processes that this process has no permission to inspect.
    """
    pids = []
    here = out.stat()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):
                if any(_holds_lock(handle, here) for handle in (process / "fd").iterdir()):
                    pids.append(int(process.name))
    return pids


def _holds_lock(handle: Path, folder: os.stat_result) -> bool:
    """Return whether a process's file descriptor refers to `folder` and holds a lock.

    `handle` is the path of the descriptor in /proc.
    """
    try:
        facts = handle.parent.parent / "fdinfo" / handle.name
        return os.path.samestat(handle.stat(), folder) and "FLOCK" in facts.read_text(encoding="ascii")
    except OSError:
        return False


def _supervises(pid: int) -> bool:
    """Return whether the process `pid`, which locks a run's folder, is a supervisor.

    Every process that locks the folder counts as a supervisor, with two exceptions: a driver, which ends when its
    supervisor ends, and a process that is ending. A process that is ending has no command line, because its memory is
    released before its descriptors.
    """
    with suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return bool(line) and DRIVER_MODULE.encode() not in line
    return False
