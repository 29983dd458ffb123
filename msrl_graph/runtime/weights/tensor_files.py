"""Files of tensors, and the other files of a model's folder.

Invariant: a written file has the mode that the umask gives, and a failure raises OSError, whichever library writes the
file. No file outside a model's folder is copied. Before a run, a link that leads out of the folder is an error, also
for weight files. Weight files themselves are not copied, but the weights that are trained from them are saved. When a
folder is copied later, links that lead out of the folder are left out.
"""

from __future__ import annotations

import json
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

# What is not copied from a model's folder: weights in any format, data, and the card of the original model. Everything
# else may be read by a tokenizer, whose files can have any name (vocab.txt, spiece.model, qwen.tiktoken, a Python
# module).
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
FOLDERS = ("additional_chat_templates",)  # folders that transformers reads for a tokenizer


def write_tensors(path: Path, named: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    If `metadata` is empty, None is passed to the library. With an empty dictionary and no tensors, the library would
    write a file that it cannot read again.
    """
    from safetensors.torch import save_file

    with _file_conventions(path):
        save_file(dict(named), path, metadata=dict(metadata) or None)


def write_arrays(path: Path, named: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, without importing torch."""
    from safetensors.numpy import save_file

    with _file_conventions(path):
        save_file(dict(named), path, metadata=dict(metadata) or None)


@contextmanager
def _file_conventions(path: Path) -> Iterator[None]:
    """Context in which a safetensors file is written like an ordinary file.

    A failure raises OSError, and the file gets the mode that the umask gives. Without this context, a full disk does
    not raise OSError, and only the owner may read the file.
    """
    from safetensors import SafetensorError

    path.touch()
    mode = path.stat().st_mode
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a model's folder, except its weights.

    These files are, for example, the configuration, the tokenizer and the generation settings.
    """
    for file in companion_files(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        # The mode is not copied: a cache's files may be read-only.
        with suppress(OutsideError), open_inside(file, source) as reader, copy.open("wb") as writer:
            shutil.copyfileobj(reader, writer)


def state_saved_type(folder: Path, dtype: str) -> None:
    """State the type of saved weights in a copy of the original config.json.

    The file is changed only if the original states a format in which no weights are saved: a quantization, or float16.
    `dtype` is torch's name of the type.
    """
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    is_quantized = config.pop("quantization_config", None) is not None
    if is_quantized or "float16" in (config.get("torch_dtype"), config.get("dtype")):
        config.pop("torch_dtype", None)
        file.write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def companion_files(source: Path) -> Iterator[Path]:
    """Yield the files of a model's folder, except weights and links out of the folder."""
    yield from (file for file in _list_companions(source) if escape(file, source) is None)


def find_outside_links(source: Path) -> dict[Path, Path]:
    """Return the links that lead out of a model's folder, with the links' targets.

    Only weight files, and the files that are copied with a model, are examined.
    """
    files = {*_list_companions(source), *candidate_weight_files(source)}
    return {file: target for file in sorted(files) if (target := escape(file, source))}


def _list_companions(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.name in FOLDERS and file.is_dir():
            yield from _list_companions(file)
        elif file.is_file() and not _is_left_out(file):
            yield file


def _is_left_out(file: Path) -> bool:
    return (
        file.suffix in WEIGHTS | DATA
        or file.name.endswith(".index.json")
        or file.name == CARD
        or file.name.startswith(".")
    )
