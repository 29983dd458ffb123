"""Whether something is there, for paths that a user wrote.

Invariant: any text may stand where a path belongs. Path's own questions raise where a name is too long or holds a NUL;
these say no.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# A name on the Hugging Face Hub: an owner and a repository, as no path beside a program is written.
_HUB = re.compile(r"(?:hf://|https://huggingface\.co/)?(?:datasets/)?([A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*)/?")


def hub_name(target: str) -> str:
    """The Hub's name that a text may be, `Qwen/Qwen2.5-7B`; "" for a path."""
    found = _HUB.fullmatch(target)
    return found[1] if found and not found[1].endswith((".jsonl", ".parquet")) else ""


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112
