"""The files of a program's data: a file, a folder, or the matches of a glob.

Invariant: the files of some data, and their order, depend only on the names in the file system, so all processes read
the same rows in the same order. All files have one format; the format depends only on the ends of the names.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic, Fault
from ..files.paths import hub_name, is_file, is_folder
from ..files.urls import is_url
from ..files.urls import name as url_name
from ..ir.plan import DataSource

HUB = "hf://datasets/"  # the beginning of the path of data on the Hugging Face Hub
# The format of a file by the end of its name. `.json` is a list of objects, or one object per line.
FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    ".arrow": "arrow",
}
TEXT = ("json", "csv")
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
# The words for splits in the names of files, with the split that each word means.
SPLITS = {
    **{name: name for name in ("train", "test", "validation")},
    "training": "train",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    **dict.fromkeys(("valid", "val", "dev"), "validation"),
}
_WORD = re.compile(r"[^A-Za-z0-9]+")
_GLOB = re.compile(r"[*?\[]")
_SAVED = "state.json"  # the files that `save_to_disk` of the library datasets writes
_SAVED_SPLITS = "dataset_dict.json"
_METADATA = {_SAVED, _SAVED_SPLITS, "dataset_info.json", "dataset_infos.json"}


@dataclass(frozen=True)
class DataFile:
    """A file with rows; `compression` is the end of its name, or ""."""

    path: Path
    format: str
    compression: str = ""


@dataclass(frozen=True)
class Mistake:
    """What is wrong with the path of data, and what to write instead."""

    message: str
    help: str


def list_files(data: DataSource) -> list[DataFile]:
    """Return the files of some data on this host, in the order in which they are read.

    Raises Fault if there is none, or if it is not clear which files are meant.
    """
    paths, chosen = ([*map(Path, data.files)], True) if data.files else _find_paths(data)
    files = [file for path in paths if (file := _classify(path)) is not None]
    if not chosen:
        files = _of_split(data, files)
    if not files:
        raise Fault(Diagnostic("missing-file", f"there is no data file {data.path}", data.span))
    if len(ends := sorted({_end(file) for file in files})) > 1:
        message = f"{data.path} has files of several formats: {', '.join(ends)}"
        help = f"name those of one format: `{data.path.rstrip('/')}/*{ends[0]}`"
        raise Fault(Diagnostic("bad-data", message, data.span, help if is_folder(Path(data.path)) else ""))
    return files


def titled_paths(data: DataSource) -> dict[str, Path]:
    """Return the files of some data on this host, by title.

    A title is the name of the data, followed by the name of the file if there are several.

    The result is {} for a mixture, and for data at a URL.
    """
    if not data.path or (is_url(data.path) and not data.files):
        return {}
    try:
        paths = [file.path for file in list_files(data)]
    except Fault:  # reported where the rows are read
        return {data.name: Path(data.path)}
    if len(paths) == 1:
        return {data.name: paths[0]}
    root = os.path.commonpath(paths)
    return {f"{data.name}: {path.relative_to(root)}": path for path in paths}


def exists(path: str) -> bool:
    """Return whether a path is a file, a folder or a glob with a match here."""
    return is_file(Path(path)) or is_folder(Path(path)) or (_is_glob(path) and next(_expand(path), None) is not None)


def hub_dataset(target: str, path: str) -> str:
    """Return the name on the Hub that a program means with `target`, or "".

    `path` is the path that `target` would have as a file.
    """
    hub = hub_name(target)
    return hub if hub and not _format(target) and not exists(path) else ""


def find_mistake(target: str, path: str) -> Mistake | None:
    """Return what is wrong with the text of a path that a program names.

    `target` is the path as the program names it, and `path` is the path from here.
    """
    if not is_url(target) and is_folder(Path(path)):
        return None
    if _is_glob(target) and not is_url(target):
        end = target.rpartition("/")[2]
        return None if "." not in end or _format(end) or end.endswith("*") else _unknown_format(target)
    if not is_url(target) and target.endswith("/"):
        return None
    return None if _format(url_name(target) if is_url(target) else target) else _unknown_format(target)


def _unknown_format(target: str) -> Mistake:
    message = "data is a file of JSON, JSON lines, CSV, Parquet or Arrow, a folder, or a name on the Hugging Face Hub"
    ends = ", ".join(f"`{end}`" for end in FORMATS)
    return Mistake(
        message, f"the name of a file ends with {ends}; text may be compressed: `{'`, `'.join(COMPRESSIONS)}`"
    )


def _find_paths(data: DataSource) -> tuple[Sequence[Path], bool]:
    """Return the paths that may have rows, and whether the split is chosen."""
    path = Path(data.path)
    if is_file(path):
        return [path], True
    if _is_glob(data.path):
        return [*_expand(data.path)], True
    if not is_folder(path):
        if path.exists():  # reading a pipe would wait for a writer, and a pipe can be read only once
            message = f"the data file {path} cannot be read: it is not a regular file"
            raise Fault(Diagnostic("missing-file", message, data.span))
        return [], True
    if (path / _SAVED_SPLITS).is_file():
        splits = [str(name) for name in _read_json(data, path / _SAVED_SPLITS).get("splits", [])]
        path = path / choose_split(data, splits)
    elif (path / _SAVED).is_file() and data.options.split:
        choose_split(data, ())
    if (path / _SAVED).is_file():
        names = [str(item.get("filename", "")) for item in _read_json(data, path / _SAVED).get("_data_files", [])]
        return [path / Path(name).name for name in names], True
    found = (file for file in path.rglob("*") if not _is_hidden(file.relative_to(path)) and is_file(file))
    return sorted(found), False


def _of_split(data: DataSource, files: list[DataFile]) -> list[DataFile]:
    """Return the files of a folder that belong to the chosen split."""
    folder = Path(data.path)
    words = {file.path: {*_WORD.split(str(file.path.relative_to(folder)))} for file in files}
    wanted = data.options.split
    if wanted:
        chosen = [file for file in files if any(wanted in (word, SPLITS.get(word)) for word in words[file.path])]
        if not chosen and files:
            choose_split(data, sorted({SPLITS[word] for found in words.values() for word in found & SPLITS.keys()}))
        return chosen
    splits = {SPLITS[word] for found in words.values() for word in found & SPLITS.keys()}
    if len(splits) > 1:
        choose_split(data, sorted(splits))
    return files


def choose_split(data: DataSource, splits: Sequence[str]) -> str:
    """Return the split that the program names, or the only one. Raises Fault."""
    wanted = data.options.split
    if wanted in splits or (not wanted and len(splits) == 1):
        return wanted or splits[0]
    has = f"its splits are {', '.join(f'`{split}`' for split in splits)}" if splits else "its files name no split"
    if wanted:
        message = f"{data.path} has no split `{wanted}`"
        raise Fault(Diagnostic("bad-value", message, data.span, has))
    help = f'name one: `{{ split = "{splits[-1]}" }}`' if splits else ""
    raise Fault(Diagnostic("bad-value", f"{data.path} has several splits: {has}", data.span, help))


def _classify(path: Path) -> DataFile | None:
    """Return a file with its format; None for a file without rows."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    format = FORMATS.get(Path(path.name.removesuffix(compression)).suffix, "")
    return DataFile(path, format, compression) if format and (format in TEXT or not compression) else None


def _format(name: str) -> str:
    file = _classify(Path(name))
    return file.format if file is not None else ""


def _end(file: DataFile) -> str:
    return "".join((Path(file.path.name.removesuffix(file.compression)).suffix, file.compression))


def _is_glob(path: str) -> bool:
    return bool(_GLOB.search(path)) and not is_file(Path(path))


def _expand(path: str) -> Iterator[Path]:
    matches = glob.iglob(path, recursive=True)  # noqa: PTH207  # Path.glob takes no absolute pattern
    yield from sorted(Path(match) for match in matches if is_file(Path(match)))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts) or path.name in _METADATA


def _read_json(data: DataSource, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}, which `save_to_disk` has written, cannot be read: {error}"
        raise Fault(Diagnostic("bad-data", message, data.span)) from None
    return value if isinstance(value, dict) else {}
