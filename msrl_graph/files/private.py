"""Folders and files of this user alone: made, opened and checked.

Invariant: a folder or file passes only if it is not a link, belongs to this process's user, and its mode denies
others the access to be prevented. What fails is refused with NotPrivate; it is never repaired and never used. A
folder of mode 0700 protects everything in it: others cannot enter it.

Only the last part of a path is checked. The folders above it must not let others rename their contents, as in /tmp
and /dev/shm (the sticky bit).
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

# What others must not be allowed: any access; writing; writing by users outside the group (a umask of 002 allows
# the group).
ANY = 0o077
WRITE = 0o022
OTHERS_WRITE = 0o002


class NotPrivate(OSError):
    """A path that fails a check; the message begins with the path."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.what = problem


def make_folder(path: Path) -> None:
    """Make a folder of mode 0700, or check an existing one.

    Raises OSError, NotPrivate.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_folder(path)


def check_folder(path: Path, mode: int = ANY) -> None:
    """Raise NotPrivate unless `path` is a folder of this user without `mode`'s bits."""
    os.close(open_folder(path, mode))


def open_folder(path: Path, mode: int = ANY) -> int:
    """Return a descriptor of a folder that passes the check. OSError, NotPrivate."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise NotPrivate(path, "is a link")
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivate(path, "is not a folder")
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(handle), mode)
    except NotPrivate:
        os.close(handle)
        raise
    return handle


def check_link(path: Path) -> None:
    """Raise NotPrivate for a link that is neither this user's nor root's.

    Raises OSError if nothing is there.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
        raise NotPrivate(path, f"is a link of another user (id {status.st_uid})")


def check_file(path: Path, mode: int = WRITE) -> None:
    """Raise NotPrivate unless `path` is a private regular file.

    It must belong to this user and have none of the bits of `mode`.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(path, "is a link" if stat.S_ISLNK(status.st_mode) else "is not a regular file")
    _check(path, status, mode)


def cache(*names: str) -> Path:
    """Return this user's folder of that name in the cache, made if needed.

    The cache is in XDG_CACHE_HOME. Later commands load what is stored there, so other users must not be able to
    write to it. If an old version or a loose umask allowed that, the permission is removed. Files that others have
    put there since belong to them, which `check_file` and `check_folder` detect. Raises OSError, NotPrivate.
    """
    # os.path.expanduser, since Path.home raises if there is no home.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("msrl_graph", *names):
        folder /= name
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        handle = open_folder(folder, mode=0)
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
            if mode & WRITE:
                os.fchmod(handle, mode & ~WRITE)
        finally:
            os.close(handle)
    return folder


def write(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read, whatever the umask.

    Raises FileExistsError if something is there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _check(path: Path, status: os.stat_result, mode: int) -> None:
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(path):
        raise NotPrivate(path, f"belongs to another user (id {status.st_uid})")
    if status.st_mode & mode:
        raise NotPrivate(path, f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o})")


def _owner_of_new_files(path: Path) -> int:
    """Return the user that the file system makes the owner of new files there.

    It differs from this process's user for root on NFS with root_squash, and in some containers.
    """
    import tempfile  # slow to load and seldom needed

    try:
        with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()
