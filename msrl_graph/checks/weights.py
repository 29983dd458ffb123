"""Checks of the weights in model folders, from the headers of the weight files.

Invariant: the checks read only the names, shapes and types of tensors from the weight files, and one value: the bias of
a score head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ..diagnostics import Diagnostic, Span
from ..files import fix_commands
from ..files.weight_headers import UnreadableFile, read_bytes
from ..files.weights import UnclearError, WeightFiles, weight_files
from ..ir.graph import Worker
from ..ir.plan import Plan
from ..model import models as model_files
from ..model.architecture import HEAD, LOGITS, Model
from ..model.quantization import FolderWeight

BIAS = "score.bias"
ANGLES = "rotary_emb.inv_freq"  # old folders hold it next to the weights of each layer
SCORING = "AutoModelForSequenceClassification with num_labels = 1"
Held = dict[str, FolderWeight]


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
        span = uses[0][1].span
        try:
            files = weight_files(path)
            if not files.read:
                continue
            stored = model_files.read_folder_weights(uses[0][1])
        except UnclearError as error:
            diagnostics.append(Diagnostic("missing-file", str(error), span, error.help))
            continue
        except UnreadableFile as error:
            help = fix_commands.lfs(error.file) or error.help
            diagnostics.append(Diagnostic("missing-file", str(error), span, help))
            continue
        except OSError as error:
            diagnostics.append(Diagnostic("missing-file", f"the weights in {path} cannot be read: {error}", span))
            continue
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
    message = f"{files.unread[0]}{more} {'are' if more else 'is'} not read: the model's weights are those of "
    message += files.named_by
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
    message = f"{stored[name].values.file} holds `{name}`{more}, which the config.json next to it does not describe"
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
        if (weight := stored.get(name)) is None:
            continue
        if weight.problem:
            message = f"`{name}` in {weight.values.file} {weight.problem}"
            help = "copy the folder again, with all its weights and its config.json"
            return [Diagnostic("missing-file", message, model.span, help)]
        if [*weight.shape] != shape:
            message = f"`{name}` in {weight.values.file} has the shape {[*weight.shape]}, but `{worker.name}` needs "
            message += f"{shape}"
            help = (
                f"name a folder that {SCORING} saved"
                if name == HEAD
                else "the folder's config.json belongs to another model"
            )
            return [Diagnostic("missing-file", message, model.span, help)]
    if model.scores and BIAS in stored and any(read_bytes(stored[BIAS].values)):
        message = f"`{BIAS}` in {stored[BIAS].values.file} is not zero, but `{worker.name}` has no bias"
        return [Diagnostic("missing-file", message, model.span, f"name a folder that {SCORING} saved")]
    return []
