"""Folders and files that only this user can access.

Invariant: a folder or file passes a check only if it meets three conditions:

- It is not a link.
- It belongs to the user of this process.
- Its mode denies other users the kind of access that the check names.

If a path fails a check, the function raises NotPrivate. It neither repairs nor uses the path. A folder of mode 0700
protects everything in it, because other users cannot enter it.

Only the last component of a path is checked. The folders above must prevent other users from renaming the contents, as
the sticky bit does for /tmp and /dev/shm.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

# Permission bits that a mode must not have: any access of other users; writing by other users; writing by users
# outside the group (with a umask of 002, new files can be written by the group).
ANY = 0o077
WRITE = 0o022
OTHERS_WRITE = 0o002


class NotPrivate(OSError):
    """An error for a path that fails a check; the message begins with the path."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path
        self.what = problem


def make_folder(path: Path) -> None:
    """Make a folder of mode 0700; if the folder exists, check that it is private.

    Raises OSError, and NotPrivate if the existing folder fails the check.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_folder(path)


def check_folder(path: Path, mode: int = ANY) -> None:
    """Raise NotPrivate unless `path` is a folder of this user.

    The folder's mode must have none of the permission bits in `mode`. By default, these bits are all permissions of the
    group and of others.
    """
    os.close(open_folder(path, mode))


def open_folder(path: Path, mode: int = ANY) -> int:
    """Check a folder as `check_folder` does, and return an open file descriptor of it.

    Raises OSError, and NotPrivate if the folder fails the check.
    """
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
    """Raise NotPrivate if a path is a link whose owner is neither this user nor root.

    Raises OSError if the path does not exist.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
        raise NotPrivate(path, f"is a link of another user (id {status.st_uid})")


def check_file(path: Path, mode: int = WRITE) -> None:
    """Raise NotPrivate unless `path` is a private regular file.

    The file must belong to this user, and its mode must have none of the permission bits in `mode`.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(path, "is a link" if stat.S_ISLNK(status.st_mode) else "is not a regular file")
    _check(path, status, mode)


def cache(*names: str) -> Path:
    """Return the folder `msrl_graph/NAME/…` of this user's cache; make it if missing.

    The cache is the folder XDG_CACHE_HOME, by default ~/.cache. Later commands load what is stored in the returned
    folder, so other users must not be able to write to it. If the mode of an existing folder allows other users to
    write, this permission is removed. Files that other users wrote before still belong to those users, so `check_file`
    and `check_folder` detect such files. Raises OSError, NotPrivate.
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
    """Write a new file that only this user can read and write, whatever the umask is.

    Raises FileExistsError if the path exists.
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
    """Return the id of the user who owns files that this process makes next to `path`.

    The owner can differ from the user of this process: for root on NFS with root_squash, and in some containers.
    """
    import tempfile  # slow to load and seldom needed

    try:
        with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()
