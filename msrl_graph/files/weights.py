"""The weight files of a model's folder, found by the same rule as in transformers.

Invariant: the weights are in the first of these files that exists: `model.safetensors`, the files that
`model.safetensors.index.json` names, `pytorch_model.bin`, the files that `pytorch_model.bin.index.json` names. From
each file that an index names, only the tensors that the index assigns to the file are read. No other file is read for
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WHOLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
# The formats in order of preference: the file of a whole model, its index, and a pattern of all files of the format.
FORMATS = ((WHOLE, INDEX, "*.safetensors"), (TORCH_WHOLE, TORCH_INDEX, "pytorch_model*.bin"))
PATTERNS = tuple(pattern for _, _, pattern in FORMATS)
COPY_AGAIN = "copy the model's folder again, with all files that its index names"


class UnclearError(ValueError):
    """An error for weight files that are incomplete or ambiguous.

    `help` says what the user can do.
    """

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model's folder.

    - `read`: the files in order, each with the names of the tensors to read from it (None: all tensors).
    - `unread`: other files in the folder that could be weights, but are not read. A second copy of the model in the
      format that transformers does not read is not listed.
    - `named_by`: the name of the file that decides what is read, a file of weights or an index.
    """

    read: Mapping[Path, frozenset[str] | None]
    unread: tuple[Path, ...] = ()
    named_by: str = ""


def weight_files(folder: Path | str) -> WeightFiles:
    """Find the weight files of a folder.

    The result has no files if the folder has no weights. Raises OSError, and UnclearError if the files are incomplete
    or ambiguous.
    """
    others: list[Path] = []
    for whole, index, pattern in FORMATS:
        present = sorted(Path(folder).glob(pattern))
        single = Path(folder) / whole
        if single in present:
            return WeightFiles(
                {single: None}, tuple(file for file in (*others, *present) if file != single), single.name
            )
        if (Path(folder) / index).is_file():
            files = _read_index(Path(folder) / index)
            if absent := [file.name for file in files if file not in present]:
                more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
                raise UnclearError(
                    f"{Path(folder) / index} names {absent[0]}{more}, which {'are' if more else 'is'} missing",
                    COPY_AGAIN,
                )
            return WeightFiles(files, tuple(file for file in (*others, *present) if file not in files), index)
        others += present
    if others:
        names = next((whole, index) for whole, index, pattern in FORMATS if others[0].match(pattern))
        message = f"{folder} holds {others[0].name}, but neither {names[0]} nor {names[1]}, which list the weights"
        raise UnclearError(message, "let transformers write the folder again: `model.save_pretrained(folder)`")
    return WeightFiles({})


def candidate_weight_files(folder: Path | str) -> list[Path]:
    """List the weight files of a folder.

    If the weight files are incomplete or ambiguous, or cannot be read, all files of the folder that could be weights
    are listed.
    """
    try:
        return [*weight_files(folder).read]
    except (UnclearError, OSError):
        return sorted(file for pattern in PATTERNS for file in Path(folder).glob(pattern))


def is_weight_file(name: str) -> bool:
    """Return whether a file has weights, or is an index of weights, by its name."""
    file = Path(name.removesuffix(".index.json"))
    return any(file.match(pattern) for pattern in PATTERNS)


def _read_index(index: Path) -> dict[Path, frozenset[str]]:
    """Return the files that an index names, each with the names of the file's tensors.

    Raises UnclearError if the index is malformed.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        placed = content["weight_map"]
        names: dict[str, set[str]] = {}
        for tensor, file in placed.items():
            names.setdefault(file, set()).add(tensor)
        pattern = next(pattern for _, name, pattern in FORMATS if name == index.name)
        invalid_file = next((file for file in names if Path(file).name != file or not Path(file).match(pattern)), None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError(f"{index} is not an index of weights: {type(error).__name__}", COPY_AGAIN) from error
    if invalid_file is not None or not names:
        problem = (
            f"names {invalid_file!r}, which is not a file `{pattern}` in the same folder"
            if names
            else "names no tensor"
        )
        raise UnclearError(f"{index} {problem}", COPY_AGAIN)
    return {index.with_name(file): frozenset(names[file]) for file in sorted(names)}


__all__ = [
    "PATTERNS",
    "UnclearError",
    "WeightFiles",
    "candidate_weight_files",
    "is_weight_file",
    "weight_files",
]
