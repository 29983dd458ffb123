"""Checks of paths that a user wrote.

Invariant: the functions accept any text as a path. For a name that is too long or contains a NUL, methods of `Path`
raise an error, but `is_file` and `is_folder` return False.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# A name on the Hugging Face Hub: an owner and a repository. A path such as `./folder` does not match.
_HUB = re.compile(r"(?:hf://|https://huggingface\.co/)?(?:datasets/)?([A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*)/?")


def hub_name(target: str) -> str:
    """Return the Hugging Face Hub name of the model that a text may mean, or "".

    For example, the function returns `Qwen/Qwen2.5-7B` for `https://huggingface.co/Qwen/Qwen2.5-7B`. A file name such
    as `data/train.jsonl` is not a Hub name.
    """
    match = _HUB.fullmatch(target)
    return match[1] if match and not match[1].endswith((".jsonl", ".parquet")) else ""


def is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112
