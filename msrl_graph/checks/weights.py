"""Checks of the weights in model folders, from the headers of the weight files.

Invariant: the checks read only the names, shapes and types of tensors from the weight files, and one value: the bias of
a score head.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic, Span
from ..files import fix_commands
from ..files.weights import INDEX, WHOLE, UnclearError, WeightFiles, weight_files
from ..ir.graph import Worker
from ..ir.plan import Plan
from ..model import models as model_files
from ..model.architecture import HEAD, Model

BIAS = "score.bias"
LOGITS = "lm_head.weight"
ANGLES = "rotary_emb.inv_freq"  # old folders hold it next to the weights of each layer
# Bytes per element, by the types that weights may have.
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
SCORING = "AutoModelForSequenceClassification with num_labels = 1"
Held = dict[str, tuple[Path, dict[str, Any]]]  # by tensor name: its file, and its entry in the header of the file


def check(plan: Plan, folders: Collection[str] | None = None) -> list[Diagnostic]:
    """Report weights that are missing or wrong in the folders of models.

    `folders` are the paths of the folders to check; None means all folders. Unused weights cause a warning, but only if
    the folder has no missing or wrong weights. A folder without any weights is not checked.
    """
    graph = plan.graph
    diagnostics = []
    users: dict[str, list[tuple[Worker, Model]]] = defaultdict(list)
    for worker in graph.workers:
        node = next((candidate for candidate in graph.nodes if candidate.worker == worker.name), None)
        model = plan.model(node.name) if node is not None and worker.kind != "function" else None
        if model is not None and model.path and (folders is None or model.path in folders):
            users[model.path].append((worker, model))
    updated = {node.worker for node in graph.verb("update")}
    for path, uses in users.items():
        stored = Held()
        span = uses[0][1].span
        file = Path(path)
        try:
            files = weight_files(path)
            for file, named in files.read.items():
                header = _read_header(file)
                stored |= {name: (file, entry) for name, entry in header.items() if named is None or name in named}
        except UnclearError as error:
            diagnostics.append(Diagnostic("missing-file", str(error), span, error.help))
            continue
        except (OSError, ValueError, RecursionError) as error:
            message = f"the weights in {file} cannot be read: {error}"
            diagnostics.append(
                Diagnostic("missing-file", message, span, fix_commands.lfs(file) or "copy the file again")
            )
            continue
        if files.read:
            wrong = [
                diagnostic
                for worker, model in uses
                for diagnostic in _check_worker(worker, model, stored, worker.name in updated)
            ]
            diagnostics += wrong or [
                *_warn_unread_files(files, span),
                *_warn_unused_weights(stored, [model for _, model in uses]),
            ]
    return diagnostics


def _warn_unread_files(files: WeightFiles, span: Span) -> list[Diagnostic]:
    """Warn of weight files that are in a model's folder but are not read."""
    if not files.unread:
        return []
    more = f" and {len(files.unread) - 1} more" if len(files.unread) > 1 else ""
    by = WHOLE if len(files.read) == 1 and next(iter(files.read)).name == WHOLE else INDEX
    message = f"{files.unread[0]}{more} {'are' if more else 'is'} not read: the model's weights are those of {by}"
    help = "move files that do not belong to the model to another folder"
    return [Diagnostic("unused-weight", message, span, help, "warning")]


def _warn_unused_weights(stored: Held, models: list[Model]) -> list[Diagnostic]:
    """Warn of stored weights that no model of a folder uses.

    Some unused weights are not reported, as in the library transformers:

    - the frequencies of rotary embeddings, which can be computed,
    - an output head that is tied to the embedding, or that a critic does not use,
    - weights that the model's family leaves out, such as a layer for multi-token prediction.
    """
    model = models[0]
    names = {name for member in models for name in member.shapes_in_files}
    names |= {BIAS, LOGITS} if any(member.scores for member in models) else {LOGITS} if model.tied else set()
    unread = model_files.list_unused_weights(model)
    unused = [
        name for name in stored if name not in names and not name.endswith(ANGLES) and not name.startswith(unread)
    ]
    if not unused:
        return []
    more = f" and {len(unused) - 1:,} more" if len(unused) > 1 else ""
    name = min(unused)
    message = f"{stored[name][0]} holds `{name}`{more}, which the config.json next to it does not describe"
    help = "config.json and weights must be of the same model: copy both again, or remove what is not the model's"
    return [Diagnostic("unused-weight", message, model.span, help, "warning")]


def _check_worker(worker: Worker, model: Model, stored: Held, updated: bool) -> list[Diagnostic]:
    wanted = (model.base or model).shapes_in_files
    missing = [name for name in wanted if name not in stored and not (name == HEAD and updated)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = (
            f"the weights in {model.path} hold no `{missing[0]}`{more}, which the {worker.kind} `{worker.name}` needs"
        )
        help = f"name a folder that {SCORING} saved"
        if missing[0] != HEAD:
            prefixes = fix_commands.tensor_names(model.path, stored, missing[0])
            help = prefixes or "name a folder with a language model's weights"
        return [Diagnostic("missing-file", message, model.span, help)]
    for name, shape in wanted.items():
        file, entry = stored.get(name, (Path(), {"shape": shape}))
        if entry["shape"] != shape:
            message = f"`{name}` in {file} has the shape {entry['shape']}, but `{worker.name}` needs {shape}"
            help = (
                f"name a folder that {SCORING} saved"
                if name == HEAD
                else "the folder's config.json belongs to another model"
            )
            return [Diagnostic("missing-file", message, model.span, help)]
        if entry.get("dtype", "F32") not in SIZES:
            message = f"`{name}` in {file} has the type {entry['dtype']}; weights must be {', '.join(SIZES)}"
            return [
                Diagnostic("missing-file", message, model.span, "name a folder with weights that are not quantized")
            ]
    if model.scores and BIAS in stored and any(_read_bytes(*stored[BIAS])):
        message = f"`{BIAS}` in {stored[BIAS][0]} is not zero, but `{worker.name}` has no bias"
        return [Diagnostic("missing-file", message, model.span, f"name a folder that {SCORING} saved")]
    return []


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the header entries of the tensors in a safetensors file, by tensor name.

    A safetensors file consists of the length of a JSON object in eight bytes, the JSON object, and the bytes of all
    tensors. Raises ValueError if the file is not a safetensors file or is incomplete.
    """
    if not file.is_file():
        raise ValueError("it is not a regular file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
        entries = json.loads(opened.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": shape, "data_offsets": [int(start), int(stop)]} if all(
                isinstance(extent, int) for extent in shape
            ):
                if not 0 <= start <= stop or stop - start != math.prod(shape) * SIZES.get(
                    dtype, (stop - start) / max(math.prod(shape), 1)
                ):
                    raise ValueError(f"the bytes of `{name}` do not match its shape")
            case _:
                raise ValueError(f"its header does not describe `{name}`")
        end = max(end, stop)
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end:,}, the file has {size:,}")
    return entries


def _read_bytes(file: Path, entry: dict[str, Any]) -> bytes:
    start, stop = entry["data_offsets"]
    with file.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little") + start)
        return opened.read(stop - start)
