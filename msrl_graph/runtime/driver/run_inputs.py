"""Inputs that decide a run's result: digests of files, versions of packages.

Invariant: two versions of a file are compared by content, never by name, folder or time. So a model that was moved is
still the same model. The digest of a small file covers the whole file. For a large file, the size and sampled blocks
are compared before a run. During the run, `DigestThread` digests the whole file once, and reports a difference that the
samples do not show.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ...data.data_files import titled_paths
from ...files.weights import candidate_weight_files, is_weight_file
from ...ir.plan import Plan
from ...model import peft_folder
from ..process import host_facts, interpreters
from ..weights.tensor_files import companion_files
from . import user_modules

FILE = "inputs.json"  # within a run's folder
SMALL = host_facts.SAMPLED  # bytes up to which a file is digested completely at once
_AT_ONCE = 8  # files that are sampled in parallel: they wait for disks and networks
_CHUNK = 8 << 20
_NICE = 19  # niceness of the thread that digests large files
_KEYS = 1 << 20  # most bytes of a JSON file whose keys are compared one by one
_SHOWN = 60  # most characters of a key's value that is kept as it is
# Keys of a model's JSON files that only say who wrote the file.
_WITHOUT_EFFECT = {"_name_or_path", "name_or_path", "transformers_version", peft_folder.BASE, "peft_version"}
_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
_TEMPLATE = "chat_template"  # a change of it makes other prompts, not another model


@dataclass(frozen=True)
class InputFile:
    """A file that a run reads.

    - `path`: the path on this host.
    - `bytes`: the size; -1 if the file cannot be read.
    - `changed`: the modification time in nanoseconds.
    - `sampled`: a digest of blocks that are sampled from the file.
    - `sha256`: the SHA-256 of the whole file; "" if it is not known yet.
    - `keys`: for a small JSON file, the values of its keys. A long value is replaced by its digest.
    """

    path: str
    bytes: int
    changed: int
    sampled: str
    sha256: str = ""
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInputs:
    """Files and package versions that decide a run's result.

    A key of `files` names two things: the owner of the file, and the file itself. Example: `model policy: config.json`.
    `versions` has the version of each package.
    """

    files: dict[str, InputFile]
    versions: dict[str, str]


NO_INPUTS = RunInputs({}, {})


@dataclass(frozen=True)
class Differences:
    """Differences between the inputs of two runs, as texts.

    `model` has the differences after which a model counts as another model. `changed` has all other differences.
    """

    model: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


# Taking


def collect_inputs(plan: Plan, replay: str = "") -> RunInputs:
    """Collect the inputs that decide the result of a plan, from files on this host.

    In `plan`, URLs are already replaced by paths of local copies (`plan_paths.copy_to_host`). `replay` is the folder of
    the run whose responses are replayed, or "".
    """
    paths = dict(_paths(plan, replay))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        entries = dict(zip(paths, pool.map(_read_file, paths.values()), strict=True))
    versions = dict(host_facts.versions(interpreters.packages(plan)))
    for python, command in interpreters.commands(plan).items():
        versions |= {
            f"{package} of {python}": version
            for package, version in host_facts.query_interpreter(command)["found"].items()
        }
    return RunInputs(entries, versions)


def companions(folder: Path, name: str) -> dict[str, InputFile]:
    """Return the files in a model's folder that are not weights.

    `name` is the model's name in the program. The keys have the same form as the keys of `RunInputs.files`.
    """
    return {f"model {name}: {file.relative_to(folder)}": _read_file(file) for file in sorted(companion_files(folder))}


def _paths(plan: Plan, replay: str) -> Iterator[tuple[str, Path]]:
    for name, model in plan.deploy.models.items():
        if folder := Path(model.path) if model.path else None:
            for file in sorted(
                {*candidate_weight_files(folder), *folder.glob("*.index.json"), *companion_files(folder)}
            ):
                yield f"model {name}: {file.relative_to(folder)}", file
        if model.initial:
            folder = Path(model.initial.folder)
            for file in (folder / peft_folder.CONFIG, *peft_folder.find_files(folder)):
                yield f"adapter {name}: {file.name}", file
    for data in plan.deploy.data.values():
        yield from ((f"data {title}", path) for title, path in titled_paths(data).items())
    code: dict[str, Path] = {}
    for path, root in sorted(user_modules.plan_files(plan).items()):
        name = f"code {os.path.relpath(path, root.absolute().parent)}"
        code[f"code {path}" if name in code else name] = path
    yield from code.items()
    for file in sorted(Path(replay).absolute().glob("rows/**/*.parquet")) if replay else ():
        yield f"replay {file.relative_to(Path(replay).absolute())}", file


def _read_file(path: Path) -> InputFile:
    try:
        status = path.stat()
        sampled = host_facts.sampled_digest(str(path))
        entry = InputFile(str(path), status.st_size, status.st_mtime_ns, sampled)
        if status.st_size <= SMALL:
            content = path.read_bytes()
            keys = _read_keys(content) if path.suffix == ".json" and status.st_size <= _KEYS else {}
            entry = replace(entry, sha256=hashlib.sha256(content).hexdigest(), keys=keys)
    except OSError:
        return InputFile(str(path), -1, 0, "")
    return entry


def _read_keys(content: bytes) -> dict[str, str]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return {key: _shorten(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _shorten(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# Keeping


def write(run: Path, inputs: RunInputs) -> None:
    """Write the inputs into a run's folder. Raises OSError."""
    partial = run / f".{FILE}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(inputs)))
    partial.rename(run / FILE)


def read(run: Path) -> dict[str, Any]:
    """Read the inputs that `write` wrote into a run's folder; {} if there are none.

    The result is stored in the manifest of a checkpoint.
    """
    try:
        inputs: dict[str, Any] = msgspec.json.decode((run / FILE).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return inputs


def parse_inputs(content: Mapping[str, Any]) -> RunInputs | None:
    """Return the inputs in a checkpoint's manifest; None if the inputs are not valid."""
    try:
        return msgspec.convert(content, RunInputs) if content else None
    except msgspec.ValidationError:
        return None


# Comparing


def differences(before: RunInputs, now: RunInputs) -> Differences:
    """Return the differences between the inputs `before` and the inputs `now`."""
    model: list[str] = []
    changed: list[str] = []
    for name in dict.fromkeys([*before.files, *now.files]):
        for kind, text in _compare_file(name, before.files.get(name), now.files.get(name)):
            (model if kind else changed).append(text)
    for package in dict.fromkeys([*before.versions, *now.versions]):
        old_version = before.versions.get(package, "")
        new_version = now.versions.get(package, "")
        if old_version != new_version:
            changed.append(f"{package} was {old_version or 'not used'}, is {new_version or 'not used'}")
    return Differences(tuple(model), tuple(changed))


def data(inputs: RunInputs) -> dict[str, str]:
    """Return, by the name of each data file, a digest of the file's sampled blocks."""
    return {
        name.removeprefix("data "): entry.sampled for name, entry in inputs.files.items() if name.startswith("data ")
    }


def describe_edit(inputs: RunInputs) -> str:
    """Describe the first input that changed since the run began; "" if none changed.

    Only files that each restart of the run reads again are checked: weights, model configs, data and replayed rows. All
    other files were copied when the run began, and every restart uses these copies (shipping.py).
    """
    for name, entry in inputs.files.items():
        file = name.rpartition(": ")[2]
        if not (name.startswith(("data ", "replay ", "adapter ")) or is_weight_file(file) or file == "config.json"):
            continue
        now = _read_file(Path(entry.path))
        if not has_same_content(entry, now):
            event = "is gone" if now.bytes < 0 else "was changed after the run began"
            return f"{name} ({entry.path}) {event}"
    return ""


def _compare_file(name: str, before: InputFile | None, now: InputFile | None) -> Iterator[tuple[bool, str]]:
    """Yield (`decides`, text) for each difference between two versions of a file.

    `decides` is true if the difference makes the model count as another model.
    """
    decides = _is_model(name)
    if before is None or now is None:
        yield decides, f"{name} is {'new' if before is None else 'gone'}"
        return
    if has_same_content(before, now):
        return
    if not (before.keys and now.keys):
        yield decides, f"{name} has other content ({_describe_sizes(before, now)})"
        return
    for key in dict.fromkeys([*before.keys, *now.keys]):
        old_value = before.keys.get(key, "nothing")
        new_value = now.keys.get(key, "nothing")
        if old_value != new_value and key not in _WITHOUT_EFFECT:
            other = old_value.startswith("sha256:") or new_value.startswith("sha256:")
            text = f"{name}: {key} " + ("has another value" if other else f"was {old_value}, is {new_value}")
            yield decides and key != _TEMPLATE, text


def has_same_content(before: InputFile, now: InputFile) -> bool:
    """Return whether two versions of a file have the same content.

    The SHA-256 of the whole files are compared if both are known. Otherwise, the sizes and the sampled blocks are
    compared.
    """
    if before.sha256 and now.sha256:
        return before.sha256 == now.sha256
    return (before.bytes, before.sampled) == (now.bytes, now.sampled)


def _describe_sizes(before: InputFile, now: InputFile) -> str:
    old_bytes = before.bytes
    new_bytes = now.bytes
    return f"{old_bytes:,} bytes, now {new_bytes:,}" if old_bytes != new_bytes else f"{old_bytes:,} bytes as before"


def _is_model(name: str) -> bool:
    """Return whether a file is part of a model: weights, config, tokenizer, adapter.

    `name` is a key of `RunInputs.files`.
    """
    kind, _, file = name.partition(": ")
    if kind.startswith("adapter "):
        return True
    if not kind.startswith("model ") or not file:
        return False
    vocabulary = file.startswith(("vocab", "merges")) or file.endswith((".model", ".tiktoken"))
    return file == "config.json" or file in _TOKENIZER or vocabulary or is_weight_file(file)


# Complete digests of large files


class DigestThread:
    """A thread that digests large files completely, one after the other.

    The thread runs at the lowest priority. `before` are the recorded inputs of the run that is resumed; None if no run
    is resumed. `say` prints a message.
    """

    def __init__(self, run: Path, inputs: RunInputs, before: RunInputs | None, say: Callable[[str], None]) -> None:
        self.run = run
        self.inputs = inputs
        self.before = before
        self.say = say
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the thread; no SHA-256 is recorded for a file that is not read completely."""
        self.closed.set()
        self.thread.join()

    def _work(self) -> None:
        with suppress(OSError):  # Linux has a niceness for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for name, entry in self.inputs.files.items():
            if entry.sha256 or entry.bytes < 0:
                continue
            old = self.before.files.get(name) if self.before is not None else None
            if old is not None and old.sha256 and replace(old, sha256="") == entry:  # same place, size, time, samples
                sha256 = old.sha256
            else:
                sha256 = self._digest(Path(entry.path))
            if not sha256:
                continue
            now = replace(entry, sha256=sha256)
            self.inputs = replace(self.inputs, files={**self.inputs.files, name: now})
            with suppress(OSError):
                write(self.run, self.inputs)
            if old is not None and has_same_content(old, entry) and not has_same_content(old, now):
                self.say(
                    f"{name} ({entry.path}) is not the file that the resumed run began with: its size and sampled "
                    "blocks are the same, its SHA-256 is not"
                )

    def _digest(self, path: Path) -> str:
        """Return the SHA-256 of a file.

        Returns "" if the thread is closed before the end of the file, or if the file cannot be read.
        """
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    if self.closed.is_set():
                        return ""
                    digest.update(chunk)
        except OSError:
            return ""
        return digest.hexdigest()


__all__ = [
    "NO_INPUTS",
    "Differences",
    "DigestThread",
    "RunInputs",
    "collect_inputs",
    "companions",
    "data",
    "describe_edit",
    "differences",
    "parse_inputs",
    "read",
    "write",
]
