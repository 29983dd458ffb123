"""What decides the result of a run beside its program: the files that it reads, as digests, and versions of packages.

Invariant: a file is compared by what it holds, never by its name, place or time: a model that was moved is the same
model. Small files are digested whole. Of a large one the size and sampled blocks are compared before a run, and all of
it is digested once a run beside the run (`Digesting`): what the samples do not show is reported then.
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

from ...files.weights import candidate_weight_files
from ...ir.plan import Plan
from ..process import host_facts, interpreters
from ..weights.tensor_files import beside
from . import user_modules

FILE = "inputs.json"  # within a run's folder
SMALL = host_facts.SAMPLED  # bytes of a file that is digested whole at once
_AT_ONCE = 8  # files that are sampled side by side: they wait for disks and networks
_CHUNK = 8 << 20
_NICE = 19  # of the thread that digests large files
_KEYS = 1 << 20  # bytes of a JSON file whose keys are compared one by one
_SHOWN = 60  # characters of a key's value that are kept as they are
# Keys of a model's JSON files that say who wrote them.
_WITHOUT_EFFECT = {"_name_or_path", "name_or_path", "transformers_version"}
_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
_TEMPLATE = "chat_template"  # whose change makes other prompts, and not another model


@dataclass(frozen=True)
class InputFile:
    """A file: its path here, its size, when it was last changed (nanoseconds), a digest of sampled blocks, the SHA-256
    of all of it ("": not known yet), and the values of a small JSON file's keys, or their digests."""

    path: str
    bytes: int
    changed: int
    sampled: str
    sha256: str = ""
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInputs:
    """`files` are called by what they are of, and their names below that: `model policy: config.json`."""

    files: dict[str, InputFile]
    versions: dict[str, str]


NO_INPUTS = RunInputs({}, {})


@dataclass(frozen=True)
class Differences:
    """In words: what makes another `model` of it, and what else has `changed`."""

    model: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


# Taking


def take(plan: Plan, replay: str = "") -> RunInputs:
    """The inputs of a plan whose files lie on this host (located.here)."""
    paths = dict(_paths(plan, replay))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        entries = dict(zip(paths, pool.map(_entry, paths.values()), strict=True))
    versions = dict(host_facts.versions(interpreters.packages(plan)))
    for python, command in interpreters.commands(plan).items():
        versions |= {f"{package} of {python}": has for package, has in host_facts.told(command)["found"].items()}
    return RunInputs(entries, versions)


def companions(folder: Path, name: str) -> dict[str, InputFile]:
    """Take the files of a model's folder other than its weights; `name` is the model's in the program."""
    return {f"model {name}: {file.relative_to(folder)}": _entry(file) for file in sorted(beside(folder))}


def _paths(plan: Plan, replay: str) -> Iterator[tuple[str, Path]]:
    for name, model in plan.deploy.models.items():
        if folder := Path(model.path) if model.path else None:
            for file in sorted({*candidate_weight_files(folder), *folder.glob("*.index.json"), *beside(folder)}):
                yield f"model {name}: {file.relative_to(folder)}", file
    for name, data in plan.deploy.data.items():
        yield f"data {name}", Path(data.path)
    code: dict[str, Path] = {}
    for path, of in sorted(user_modules.of_plan(plan).items()):
        name = f"code {os.path.relpath(path, of.absolute().parent)}"
        code[f"code {path}" if name in code else name] = path
    yield from code.items()
    for file in sorted(Path(replay).absolute().glob("rows/**/*.parquet")) if replay else ():
        yield f"replay {file.relative_to(Path(replay).absolute())}", file


def _entry(path: Path) -> InputFile:
    try:
        status = path.stat()
        sampled = host_facts.sampled(str(path))
        entry = InputFile(str(path), status.st_size, status.st_mtime_ns, sampled)
        if status.st_size <= SMALL:
            content = path.read_bytes()
            keys = _entries(content) if path.suffix == ".json" and status.st_size <= _KEYS else {}
            entry = replace(entry, sha256=hashlib.sha256(content).hexdigest(), keys=keys)
    except OSError:
        return InputFile(str(path), -1, 0, "")
    return entry


def _entries(content: bytes) -> dict[str, str]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return {key: _brief(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _brief(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# Keeping


def write(run: Path, inputs: RunInputs) -> None:
    """Writes the inputs into a run's folder. OSError where that fails."""
    partial = run / f".{FILE}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(inputs)))
    partial.rename(run / FILE)


def read(run: Path) -> dict[str, Any]:
    """What a run's folder says of its inputs, for a checkpoint's manifest; nothing where it says nothing."""
    try:
        found: dict[str, Any] = msgspec.json.decode((run / FILE).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return found


def recorded(content: Mapping[str, Any]) -> RunInputs | None:
    """The inputs that a manifest has; None where it is of a version that kept none."""
    try:
        return msgspec.convert(content, RunInputs) if content else None
    except msgspec.ValidationError:
        return None


# Comparing


def differences(before: RunInputs, now: RunInputs) -> Differences:
    """What has changed."""
    model: list[str] = []
    changed: list[str] = []
    for name in dict.fromkeys([*before.files, *now.files]):
        for kind, words in _file(name, before.files.get(name), now.files.get(name)):
            (model if kind else changed).append(words)
    for package in dict.fromkeys([*before.versions, *now.versions]):
        was = before.versions.get(package, "")
        has = now.versions.get(package, "")
        if was != has:
            changed.append(f"{package} was {was or 'not used'}, is {has or 'not used'}")
    return Differences(tuple(model), tuple(changed))


def data(taken: RunInputs) -> dict[str, str]:
    """The digests of sampled blocks of data files, by their names in the program."""
    return {n.removeprefix("data "): entry.sampled for n, entry in taken.files.items() if n.startswith("data ")}


def edited(taken: RunInputs) -> str:
    """What is no longer what it was when the run began, of the weights and data that each start reads anew, in words.
    Other files every start has as they were (shipping.py)."""
    for name, entry in taken.files.items():
        if not (name.startswith(("data ", "replay ")) or ".safetensors" in name or name.endswith(": config.json")):
            continue
        now = _entry(Path(entry.path))
        if not same(entry, now):
            what = "is gone" if now.bytes < 0 else "was changed after the run began"
            return f"{name} ({entry.path}) {what}"
    return ""


def _file(name: str, before: InputFile | None, now: InputFile | None) -> Iterator[tuple[bool, str]]:
    """Whether a difference of a file makes another model, and the difference in words."""
    decides = _is_model(name)
    if before is None or now is None:
        yield decides, f"{name} is {'new' if before is None else 'gone'}"
        return
    if same(before, now):
        return
    if not (before.keys and now.keys):
        yield decides, f"{name} holds something else ({_how(before, now)})"
        return
    for key in dict.fromkeys([*before.keys, *now.keys]):
        was = before.keys.get(key, "nothing")
        has = now.keys.get(key, "nothing")
        if was != has and key not in _WITHOUT_EFFECT:
            other = was.startswith("sha256:") or has.startswith("sha256:")
            words = f"{name}: {key} " + ("has another value" if other else f"was {was}, is {has}")
            yield decides and key != _TEMPLATE, words


def same(before: InputFile, now: InputFile) -> bool:
    """Whether a file holds the same, as far as both digests tell."""
    if before.sha256 and now.sha256:
        return before.sha256 == now.sha256
    return (before.bytes, before.sampled) == (now.bytes, now.sampled)


def _how(before: InputFile, now: InputFile) -> str:
    one = before.bytes
    two = now.bytes
    return f"{one:,} bytes, now {two:,}" if one != two else f"{one:,} bytes as before"


def _is_model(name: str) -> bool:
    """Whether a file is what a model is made of: weights, config, tokenizer."""
    kind, _, file = name.partition(": ")
    if not kind.startswith("model ") or not file:
        return False
    vocabulary = file.startswith(("vocab", "merges")) or file.endswith((".model", ".tiktoken"))
    return file == "config.json" or file in _TOKENIZER or vocabulary or ".safetensors" in file


# All of large files


class DigestThread:
    """A thread that digests large files whole, one after the other, after all that computes. `before` is what a resumed
    run has been told of them, `say` tells a person."""

    def __init__(self, run: Path, inputs: RunInputs, before: RunInputs | None, say: Callable[[str], None]) -> None:
        self.run = run
        self.inputs = inputs
        self.before = before
        self.say = say
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends it; what is not digested by then stays so."""
        self.over.set()
        self.thread.join()

    def _work(self) -> None:
        with suppress(OSError):  # Linux has a niceness for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for name, entry in self.inputs.files.items():
            if entry.sha256 or entry.bytes < 0:
                continue
            old = self.before.files.get(name) if self.before is not None else None
            if old is not None and old.sha256 and replace(old, sha256="") == entry:  # same place, size, time, samples
                whole = old.sha256
            else:
                whole = self._digest(Path(entry.path))
            if not whole:
                continue
            now = replace(entry, sha256=whole)
            self.inputs = replace(self.inputs, files={**self.inputs.files, name: now})
            with suppress(OSError):
                write(self.run, self.inputs)
            if old is not None and same(old, entry) and not same(old, now):
                self.say(
                    f"{name} ({entry.path}) is not the file that the resumed run began with: its size and sampled "
                    "blocks are the same, its SHA-256 is not"
                )

    def _digest(self, path: Path) -> str:
        """The SHA-256 of a file; "" where the run ends before."""
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    if self.over.is_set():
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
    "companions",
    "data",
    "differences",
    "edited",
    "read",
    "recorded",
    "take",
    "write",
]
