"""Files of tensors, and what lies beside the weights in a model's folder.

Invariant: what is written has the mode that the umask gives, and a failure is an OSError, whichever library writes.
Nothing outside a model's folder is copied out of it: links that lead out are refused before a run, and left out after.
Weights are not copied, but what is trained from them is saved, so that their links are refused too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files.untrusted_folder import OutsideError, escape, open_inside
from ...files.weights import candidate_weight_files

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# What is not copied of a model's folder: weights in whatever form, data that lie there too, and what tells of the model
# as it was. Of all else nobody can say that no tokenizer reads it: their files have any name (vocab.txt, spiece.model,
# qwen.tiktoken, a module in Python).
WEIGHTS = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".npz",
    ".tflite",
}
DATA = {".jsonl", ".parquet", ".arrow"}
CARD = "README.md"
FOLDERS = ("additional_chat_templates",)  # those that transformers reads of a tokenizer


def tensors(path: Path, named: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file. (With {} for its metadata the library writes one that it cannot read, where there are
    no tensors.)"""
    from safetensors.torch import save_file

    with _as_files_are(path):
        save_file(dict(named), path, metadata=dict(metadata) or None)


def arrays(path: Path, named: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, without torch."""
    from safetensors.numpy import save_file

    with _as_files_are(path):
        save_file(dict(named), path, metadata=dict(metadata) or None)


@contextmanager
def _as_files_are(path: Path) -> Iterator[None]:
    """To safetensors a full disk is no OSError, and a file is for its owner alone."""
    from safetensors import SafetensorError

    path.touch()
    mode = path.stat().st_mode
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def companions(source: Path, target: Path) -> None:
    """Copies all of a model's folder but its weights: what its config, its tokenizer and its generation are read
    from."""
    for file in beside(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        # Not its mode: a cache's files may be read-only.
        with suppress(OutsideError), open_inside(file, source) as given, copy.open("wb") as taken:
            shutil.copyfileobj(given, taken)


def beside(source: Path) -> Iterator[Path]:
    """The files of a model's folder but its weights, without links that lead out of it."""
    yield from (file for file in _listed(source) if escape(file, source) is None)


def links_out(source: Path) -> dict[Path, Path]:
    """Return where links in a model's folder lead outside it, for its weights and what would be copied with them."""
    files = {*_listed(source), *candidate_weight_files(source)}
    return {file: target for file in sorted(files) if (target := escape(file, source))}


def _listed(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.name in FOLDERS and file.is_dir():
            yield from _listed(file)
        elif file.is_file() and not _is_left(file):
            yield file


def _is_left(file: Path) -> bool:
    return (
        file.suffix in WEIGHTS | DATA
        or file.name.endswith(".index.json")
        or file.name == CARD
        or file.name.startswith(".")
    )
