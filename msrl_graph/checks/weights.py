"""What lies in the folders of weights, as the headers of their files have it.

Invariant: nothing but names and shapes is read, and one number: the bias of a head of scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..diagnostics import Diagnostic
from ..ir.graph import Worker
from ..ir.plan import Plan
from ..model.architecture import HEAD, Model
from ..sharding.layout import full

BIAS = "score.bias"
# Bytes of an element, by the types that weights may have.
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
SCORING = "AutoModelForSequenceClassification with num_labels = 1"


def lacking(plan: Plan, folders: Collection[str] | None = None) -> list[Diagnostic]:
    """What workers need and the folders of their models (some of them, or all) do not hold as they need it; a folder
    without any weights is left alone."""
    graph, found = plan.graph, []
    for worker in graph.workers:
        node = next((n for n in graph.nodes if n.worker == worker.name), None)
        model = plan.model(node.name) if node is not None and worker.kind != "function" else None
        if model is None or not model.path or (folders is not None and model.path not in folders):
            continue
        if any(Path(model.path).glob("*.safetensors")):
            found += _wrong(worker, model, any(n.worker == worker.name for n in graph.verb("update")))
    return found


def _wrong(worker: Worker, model: Model, updated: bool) -> list[Diagnostic]:
    there: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in sorted(Path(model.path).glob("*.safetensors")):
        try:
            there |= {name: (file, entry) for name, entry in _header(file).items()}
        except (OSError, ValueError, RecursionError) as error:
            return [
                Diagnostic(
                    "missing-file", f"the weights in {file} cannot be read: {error}", model.span, "copy the file anew"
                )
            ]
    wanted = [(name, [b for _, b in box]) for t in model.tensors for name, _, box in t.in_files(full(t.shape))]
    missing = [name for name, _ in wanted if name not in there and not (name == HEAD and updated)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = (
            f"the weights in {model.path} hold no `{missing[0]}`{more}, which the {worker.kind} "
            f"`{worker.name}` computes with"
        )
        help = (
            f"name a folder that {SCORING} saved"
            if missing[0] == HEAD
            else "name a folder with a language model's weights"
        )
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
