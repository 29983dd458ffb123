"""Whether something is there, for paths that a user wrote.

Invariant: any text may stand where a path belongs. Path's own questions raise where a name is too long or holds a NUL; these say no.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112
