"""Help for unreadable files of models and data: commands that make them readable.

Invariant: a function returns help only if it finds the cause in the files themselves. Each command is run by a test.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

POINTER = b"version https://git-lfs"
SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def lfs(file: Path | str) -> str:
    """Return how to fetch a file that is a Git LFS pointer; "" for any other file."""
    path = Path(file)
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            return ""
        with path.open("rb") as opened:
            pointer = opened.read(len(POINTER)) == POINTER
    except OSError:
        return ""
    return f"it is a pointer of Git LFS: fetch the file with `git -C {path.parent} lfs pull`" if pointer else ""


def tokenizer(folder: Path | str) -> str:
    """Return how to create the missing tokenizer.json in a model's folder."""
    slow = next((name for name in SLOW_TOKENIZERS if (Path(folder) / name).is_file()), "")
    if not slow:
        return "copy the tokenizer.json of the model into the folder"
    command = f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
    return f"let transformers write it from {slow}, in Python: `from transformers import AutoTokenizer; {command}`"


def tensor_names(folder: Path | str, present: Collection[str], missing: str) -> str:
    """Return how to rename the tensors in a model's folder so that `missing` is found.

    `missing` is the name of a tensor, and `present` has the names of the tensors in the folder. Returns "" unless the
    names in the folder have a wrong prefix.
    """
    short_name = missing.removeprefix("model.")
    if f"module.{missing}" in present:
        name = 'k.removeprefix("module.")'
    elif short_name != missing and short_name in present:
        name = 'k if k.startswith("lm_head.") else "model." + k'
    else:
        return ""
    cause = "its tensors have other prefixes than transformers writes"
    file = Path(folder) / "model.safetensors"
    if not file.is_file():
        return f"{cause}: load the weights in Python and write the folder again with `model.save_pretrained(folder)`"
    rename = f'save_file({{{name}: v for k, v in load_file("{file}").items()}}, "{file}", {{"format": "pt"}})'
    return f"{cause}: rename them in Python: `from safetensors.torch import load_file, save_file; {rename}`"


__all__ = ["lfs", "tensor_names", "tokenizer"]
