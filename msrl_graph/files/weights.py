"""Which files of a model's folder hold its weights, as transformers has it.

Invariant: they are `model.safetensors`, or else the files that `model.safetensors.index.json` names, and of each file
the tensors that the index has in it. No other file is read for weights, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ANEW = "copy the model's folder anew, with all files that its index names"


class UnclearError(ValueError):
    """It is not clear, or not all there, what a folder's weights are; `help` says what to do."""

    def __init__(self, what: str, help: str) -> None:
        super().__init__(what)
        self.help = help


@dataclass(frozen=True)
class WeightFiles:
    """The files with a model's weights, in their order, each with the names of the tensors that are read from it (None:
    all), and other files of weights that lie there and are `left`."""

    read: Mapping[Path, frozenset[str] | None]
    left: tuple[Path, ...] = ()


def weight_files(folder: Path | str) -> WeightFiles:
    """Those of a folder; none where it has no safetensors at all. Raises UnclearError, and OSError."""
    there = sorted(Path(folder).glob("*.safetensors"))
    whole, index = Path(folder) / WHOLE, Path(folder) / INDEX
    if whole in there:
        read: dict[Path, frozenset[str] | None] = {whole: None}
    elif index.is_file():
        read = {**_named(index)}
        if absent := [file.name for file in read if file not in there]:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UnclearError(f"{index} names {absent[0]}{more}, which {'is' if not more else 'are'} not there", ANEW)
    elif there:
        what = f"{folder} holds {there[0].name}, but neither {WHOLE} nor {INDEX}, by which weights are found"
        raise UnclearError(what, "let transformers write the folder anew: `model.save_pretrained(folder)`")
    else:
        return WeightFiles({})
    return WeightFiles(read, tuple(file for file in there if file not in read))


def files_of(folder: Path | str) -> list[Path]:
    """The files with a folder's weights; all that may be, where `weight_files` refuses it."""
    try:
        return [*weight_files(folder).read]
    except (UnclearError, OSError):
        return sorted(Path(folder).glob("*.safetensors"))


def _named(index: Path) -> dict[Path, frozenset[str]]:
    """The files that an index names, each with the tensors that it has there."""
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        placed = said["weight_map"]
        names: dict[str, set[str]] = {}
        for tensor, file in placed.items():
            names.setdefault(file, set()).add(tensor)
        wrong = next((file for file in names if Path(file).name != file or not file.endswith(".safetensors")), None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnclearError(f"{index} is no index of weights: {type(error).__name__}", ANEW) from error
    if wrong is not None or not names:
        what = f"names {wrong!r}, which is no file of safetensors beside it" if names else "names no tensor"
        raise UnclearError(f"{index} {what}", ANEW)
    return {index.with_name(file): frozenset(names[file]) for file in sorted(names)}


__all__ = ["INDEX", "WHOLE", "UnclearError", "WeightFiles", "files_of", "weight_files"]
