"""Checks of paths that a user wrote.

Invariant: any text may be given as a path. Path's own methods raise for a name that is too long or holds a NUL;
these functions return False.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# A name on the Hugging Face Hub: an owner and a repository. Paths next to a program are not written like this.
_HUB = re.compile(r"(?:hf://|https://huggingface\.co/)?(?:datasets/)?([A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*)/?")


def hub_name(target: str) -> str:
    """Return the Hub name that a text may be, `Qwen/Qwen2.5-7B`; "" for a path."""
    match = _HUB.fullmatch(target)
    return match[1] if match and not match[1].endswith((".jsonl", ".parquet")) else ""


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112
