"""Regular files of an untrusted folder, such as a downloaded model.

Invariant: only regular files inside the folder are read. The check is made on the open file, not on its path. So the
check also holds if another process changes a link in the folder at the same time.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class OutsideError(OSError):
    """An error for a file that is not a regular file inside its folder."""


def roots(folder: Path) -> list[Path]:
    """Return the real folders in which the files of a folder may be.

    The first result is the real path of the folder itself. For a snapshot in the Hugging Face cache, the second result
    is the folder `blobs` of the repository, because the files of a snapshot are links to files in `blobs`.
    """
    real = folder.resolve()
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]


def escape(file: Path, folder: Path) -> Path | None:
    """Return the target of a file that is a link out of its folder, else None."""
    real = file.resolve()
    return None if any(real.is_relative_to(root) for root in roots(folder)) else real


def open_inside(file: Path, folder: Path) -> BinaryIO:
    """Open a regular file inside a folder for reading.

    Raises OutsideError if the file is not regular or not inside the folder.
    """
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
