"""What lies in the folders of weights, as the headers of their files have it.

Invariant: nothing but names and shapes is read, and one number: the bias of a head of scores.
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
from ..model.architecture import HEAD, Model
from ..sharding.layout import full

BIAS = "score.bias"
LOGITS = "lm_head.weight"
ANGLES = "rotary_emb.inv_freq"  # which old folders hold beside each layer's weights
# Bytes of an element, by the types that weights may have.
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
SCORING = "AutoModelForSequenceClassification with num_labels = 1"
Held = dict[str, tuple[Path, dict[str, Any]]]  # by name its file, and what that file's header says of it


def check(plan: Plan, folders: Collection[str] | None = None) -> list[Diagnostic]:
    """What workers need and the folders of their models (some of them, or all) do not hold as they need it, and where
    nothing is wrong a warning of what nobody computes with; a folder without any weights is left alone."""
    graph = plan.graph
    found = []
    users: dict[str, list[tuple[Worker, Model]]] = defaultdict(list)
    for worker in graph.workers:
        node = next((n for n in graph.nodes if n.worker == worker.name), None)
        model = plan.model(node.name) if node is not None and worker.kind != "function" else None
        if model is not None and model.path and (folders is None or model.path in folders):
            users[model.path].append((worker, model))
    updated = {n.worker for n in graph.verb("update")}
    for path, those in users.items():
        there = Held()
        span = those[0][1].span
        file = Path(path)
        try:
            files = weight_files(path)
            for file, named in files.read.items():
                header = _header(file)
                there |= {name: (file, entry) for name, entry in header.items() if named is None or name in named}
        except UnclearError as error:
            found.append(Diagnostic("missing-file", str(error), span, error.help))
            continue
        except (OSError, ValueError, RecursionError) as error:
            what = f"the weights in {file} cannot be read: {error}"
            found.append(Diagnostic("missing-file", what, span, fix_commands.lfs(file) or "copy the file again"))
            continue
        if files.read:
            wrong = [d for worker, model in those for d in _wrong(worker, model, there, worker.name in updated)]
            found += wrong or [*_left(files, span), *_unread(there, [model for _, model in those])]
    return found


def _left(files: WeightFiles, span: Span) -> list[Diagnostic]:
    """Files with weights that are none of the model's."""
    if not files.left:
        return []
    more = f" and {len(files.left) - 1} more" if len(files.left) > 1 else ""
    by = WHOLE if len(files.read) == 1 and next(iter(files.read)).name == WHOLE else INDEX
    what = f"{files.left[0]}{more} {'are' if more else 'is'} not read: the model's weights are those of {by}"
    help = "move to another folder what is not the model's"
    return [Diagnostic("unused-weight", what, span, help, "warning")]


def _unread(there: Held, models: list[Model]) -> list[Diagnostic]:
    """Weights that none of the models of a folder has. As transformers, it tells nothing of what can be computed, of a
    head that is tied or that a critic leaves, and of the layer of multi-token prediction (Model)."""
    model = models[0]
    names = {name for m in models for t in (*m.tensors, *m.fixed) for name, _, _ in t.in_files(full(t.shape))}
    names |= {BIAS, LOGITS} if any(m.scores for m in models) else {LOGITS} if model.tied else set()
    ahead = f"model.layers.{model.layers}." if model.family == "deepseek_v3" else ANGLES
    left = [n for n in there if n not in names and not n.endswith(ANGLES) and not n.startswith(ahead)]
    if not left:
        return []
    more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
    name = min(left)
    what = f"{there[name][0]} holds `{name}`{more}, which nothing computes with: the config.json beside it has no such"
    help = "a config.json is its weights' own: copy both again, or take out what is not the model's"
    return [Diagnostic("unused-weight", what, model.span, help, "warning")]


def _wrong(worker: Worker, model: Model, there: Held, updated: bool) -> list[Diagnostic]:
    tensors = (*model.tensors, *model.fixed)
    wanted = [(name, [b for _, b in box]) for t in tensors for name, _, box in t.in_files(full(t.shape))]
    missing = [name for name, _ in wanted if name not in there and not (name == HEAD and updated)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = (
            f"the weights in {model.path} hold no `{missing[0]}`{more}, which the {worker.kind} "
            f"`{worker.name}` computes with"
        )
        help = f"name a folder that {SCORING} saved"
        if missing[0] != HEAD:
            prefixes = fix_commands.tensor_names(model.path, there, missing[0])
            help = prefixes or "name a folder with a language model's weights"
        return [Diagnostic("missing-file", what, model.span, help)]
    for name, shape in wanted:
        file, entry = there.get(name, (Path(), {"shape": shape}))
        if entry["shape"] != shape:
            what = f"`{name}` in {file} has the shape {entry['shape']}, where `{worker.name}` takes {shape}"
            help = (
                f"name a folder that {SCORING} saved"
                if name == HEAD
                else "the folder's config.json is of another model"
            )
            return [Diagnostic("missing-file", what, model.span, help)]
        if entry.get("dtype", "F32") not in SIZES:
            what = f"`{name}` in {file} is of the type {entry['dtype']}; weights are {', '.join(SIZES)}"
            return [Diagnostic("missing-file", what, model.span, "name a folder with weights that are not quantized")]
    if model.scores and BIAS in there and any(_bytes(*there[BIAS])):
        what = f"`{BIAS}` in {there[BIAS][0]} is not zero, and `{worker.name}` has no bias"
        return [Diagnostic("missing-file", what, model.span, f"name a folder that {SCORING} saved")]
    return []


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file, by name: an object's length in eight bytes, the object, then all tensors'
    bytes. Raises ValueError: it is none, or not whole."""
    if not file.is_file():
        raise ValueError("it is not a regular file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"its header has {length:,} bytes, the file {size:,}")
        found = json.loads(opened.read(length))
    if not isinstance(found, dict):
        raise ValueError("its header is no JSON object")
    found.pop("__metadata__", None)
    end = 0
    for name, entry in found.items():
        match entry:
            case {"dtype": str(dtype), "shape": shape, "data_offsets": [int(start), int(stop)]} if all(
                isinstance(n, int) for n in shape
            ):
                if not 0 <= start <= stop or stop - start != math.prod(shape) * SIZES.get(
                    dtype, (stop - start) / max(math.prod(shape), 1)
                ):
                    raise ValueError(f"the bytes of `{name}` are not those of its shape")
            case _:
                raise ValueError(f"its header does not describe `{name}`")
        end = max(end, stop)
    if 8 + length + end != size:
        raise ValueError(f"its tensors end at byte {8 + length + end:,}, the file has {size:,}")
    return found


def _bytes(file: Path, entry: dict[str, Any]) -> bytes:
    start, stop = entry["data_offsets"]
    with file.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little") + start)
        return opened.read(stop - start)
