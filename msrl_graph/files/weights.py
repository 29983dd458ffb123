"""Find the weight files of a model's folder by the rule of transformers.

Invariant: the weights are in `model.safetensors`, or else in the files that `model.safetensors.index.json` names. Of
each of these files only the tensors that the index assigns to it are read. No other file is read for weights.
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
    """A folder's weights are incomplete or ambiguous; `help` says what to do."""

    def __init__(self, what: str, help: str) -> None:
        super().__init__(what)
        self.help = help


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model.

    - `read`: the files in order, each with the names of the tensors to read from it (None: all).
    - `left`: other safetensors files in the folder, which are not read.
    """

    read: Mapping[Path, frozenset[str] | None]
    left: tuple[Path, ...] = ()


def weight_files(folder: Path | str) -> WeightFiles:
    """Find the weight files of a folder; empty if it has no safetensors files. Raises UnclearError and OSError."""
    present = sorted(Path(folder).glob("*.safetensors"))
    whole = Path(folder) / WHOLE
    index = Path(folder) / INDEX
    if whole in present:
        read: dict[Path, frozenset[str] | None] = {whole: None}
    elif index.is_file():
        read = {**_read_index(index)}
        if absent := [file.name for file in read if file not in present]:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UnclearError(
                f"{index} names {absent[0]}{more}, which {'is' if not more else 'are'} missing", COPY_AGAIN
            )
    elif present:
        what = f"{folder} holds {present[0].name}, but neither {WHOLE} nor {INDEX}, by which weights are found"
        raise UnclearError(what, "let transformers write the folder anew: `model.save_pretrained(folder)`")
    else:
        return WeightFiles({})
    return WeightFiles(read, tuple(file for file in present if file not in read))


def candidate_weight_files(folder: Path | str) -> list[Path]:
    """List the weight files of a folder; every safetensors file if `weight_files` rejects the folder."""
    try:
        return [*weight_files(folder).read]
    except (UnclearError, OSError):
        return sorted(Path(folder).glob("*.safetensors"))


def _read_index(index: Path) -> dict[Path, frozenset[str]]:
    """Read an index: its files, each with the names of its tensors."""
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        placed = said["weight_map"]
        names: dict[str, set[str]] = {}
        for tensor, file in placed.items():
            names.setdefault(file, set()).add(tensor)
        wrong = next((file for file in names if Path(file).name != file or not file.endswith(".safetensors")), None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError(f"{index} is not an index of weights: {type(error).__name__}", COPY_AGAIN) from error
    if wrong is not None or not names:
        what = f"names {wrong!r}, which is not a safetensors file in the same folder" if names else "names no tensor"
        raise UnclearError(f"{index} {what}", COPY_AGAIN)
    return {index.with_name(file): frozenset(names[file]) for file in sorted(names)}


__all__ = ["INDEX", "WHOLE", "UnclearError", "WeightFiles", "candidate_weight_files", "weight_files"]
