"""Regular files of an untrusted folder, such as a downloaded model.

Invariant: only regular files inside the folder are read, even if links in it change meanwhile: the check is made on
the open file, not on its path.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class OutsideError(OSError):
    """A file that is not a regular file inside its folder."""


def roots(folder: Path) -> list[Path]:
    """Return the real folders that a folder's files may be in.

    They are the folder itself and, for a snapshot in the Hugging Face cache, the repository's blobs, which its
    files link to.
    """
    real = folder.resolve()
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]


def escape(file: Path, folder: Path) -> Path | None:
    """Return where a file leads to outside its folder; None if it stays inside."""
    real = file.resolve()
    return None if any(real.is_relative_to(root) for root in roots(folder)) else real


def open_inside(file: Path, folder: Path) -> BinaryIO:
    """Open a regular file inside a folder for reading. Raises OutsideError otherwise."""
    # Without O_NONBLOCK a pipe without a writer would block the caller.
    handle = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        real = Path(os.readlink(f"/proc/self/fd/{handle.fileno()}"))  # noqa: PTH115 (a Path would resolve further)
        inside = any(real.is_relative_to(root) for root in roots(folder))
        if not inside or not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
            raise OutsideError(f"{file} is not a regular file inside {folder}")
    except BaseException:
        handle.close()
        raise
    return handle
