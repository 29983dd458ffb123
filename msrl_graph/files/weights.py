"""The weight files of a model's folder, found by the same rule as in transformers.

Invariant: the weights are in `model.safetensors`. If `model.safetensors` does not exist, the weights are in the files
that `model.safetensors.index.json` names. From each of these files, only the tensors that the index assigns to the file
are read. No other file is read for weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
    - `unread`: other safetensors files in the folder, which are not read.
    """

    read: Mapping[Path, frozenset[str] | None]
    unread: tuple[Path, ...] = ()


def weight_files(folder: Path | str) -> WeightFiles:
    """Find the weight files of a folder.

    The result has no files if the folder has no safetensors files. Raises OSError, and UnclearError if the files are
    incomplete or ambiguous.
    """
    present = sorted(Path(folder).glob("*.safetensors"))
    single = Path(folder) / WHOLE
    index = Path(folder) / INDEX
    if single in present:
        files: dict[Path, frozenset[str] | None] = {single: None}
    elif index.is_file():
        files = {**_read_index(index)}
        if absent := [file.name for file in files if file not in present]:
            others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UnclearError(
                f"{index} names {absent[0]}{others}, which {'is' if not others else 'are'} missing", COPY_AGAIN
            )
    elif present:
        message = f"{folder} holds {present[0].name}, but neither {WHOLE} nor {INDEX}, which list the weights"
        raise UnclearError(message, "let transformers write the folder again: `model.save_pretrained(folder)`")
    else:
        return WeightFiles({})
    return WeightFiles(files, tuple(file for file in present if file not in files))


def candidate_weight_files(folder: Path | str) -> list[Path]:
    """List the weight files of a folder.

    If the weight files are incomplete or ambiguous, or cannot be read, all safetensors files of the folder are listed.
    """
    try:
        return [*weight_files(folder).read]
    except (UnclearError, OSError):
        return sorted(Path(folder).glob("*.safetensors"))


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
        invalid_file = next(
            (file for file in names if Path(file).name != file or not file.endswith(".safetensors")), None
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError(f"{index} is not an index of weights: {type(error).__name__}", COPY_AGAIN) from error
    if invalid_file is not None or not names:
        problem = (
            f"names {invalid_file!r}, which is not a safetensors file in the same folder"
            if names
            else "names no tensor"
        )
        raise UnclearError(f"{index} {problem}", COPY_AGAIN)
    return {index.with_name(file): frozenset(names[file]) for file in sorted(names)}


__all__ = ["INDEX", "WHOLE", "UnclearError", "WeightFiles", "candidate_weight_files", "weight_files"]
