"""Checks that folders of adapters are complete.

Invariant: the checks read only headers of weight files. A plan needs no weights, so a folder without them is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..diagnostics import Diagnostic
from ..files import fix_commands
from ..files.weight_headers import UnreadableFile
from ..ir.graph import Worker
from ..ir.plan import Plan
from ..model import peft_folder
from ..model.architecture import HEAD, Model
from ..model.lora_settings import Lora
from ..model.models import read_token_texts
from ..sharding.layout import full_box

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"


def check(plan: Plan) -> list[Diagnostic]:
    """Check the folder of each adapter; diagnostics point at the model's statement."""
    diagnostics: list[Diagnostic] = []
    read = set[tuple[str, bool]]()
    for worker in plan.graph.workers:
        nodes = plan.graph.nodes_of(worker.name) if worker.kind != "function" else ()
        for model in [plan.model(node.name) for node in nodes][:1]:
            if model.initial and (key := (model.initial.folder, model.scores)) not in read:
                read.add(key)
                diagnostics += _check_weights(worker, model, model.initial)
                diagnostics += _report_unused_files(model, model.initial)
    return diagnostics


def _report_unused_files(model: Model, initial: Lora) -> Iterator[Diagnostic]:
    """Report a tokenizer or chat template of the folder that differs from the model's."""
    own, theirs = (Path(folder) for folder in (initial.folder, model.path))
    tokens = read_token_texts(str(own))
    unused = [TOKENIZER] if model.path and tokens and tokens != read_token_texts(model.path) else []
    if model.path and (own / TEMPLATE).is_file():
        same = (theirs / TEMPLATE).is_file() and (own / TEMPLATE).read_bytes() == (theirs / TEMPLATE).read_bytes()
        unused += [] if same else [TEMPLATE]
    if unused:
        names = " and ".join(unused)
        message = f"the {names} in {own} {'differ' if len(unused) > 1 else 'differs'} from the model's in {theirs}, "
        message += "which the run uses"
        help = f"to use the adapter's, copy {names} into a copy of the model's folder, and name it as `base`"
        yield Diagnostic("unused-setting", message, model.span, help, "hint")


def _check_weights(worker: Worker, model: Model, initial: Lora) -> Iterator[Diagnostic]:
    """Report weights of an adapter that are missing, wrong or unknown."""
    try:
        files = peft_folder.find_files(initial.folder)
        stored = peft_folder.read_weights(initial.folder)
    except UnreadableFile as error:
        yield Diagnostic("missing-file", str(error), model.span, fix_commands.lfs(error.file) or error.help)
        return
    wanted = {
        name: [stop for _, stop in box]
        for tensor in model.tensors
        if tensor.role == "adapter"
        for name, _, box in tensor.in_files(full_box(tensor.shape))
    }
    shapes = wanted | ({HEAD: [1, model.hidden]} if model.scores else {})
    help = f"let PEFT or a run write the folder again, with {peft_folder.CONFIG} and the weights of one adapter"
    for file in files:
        if missing := [name for name in wanted if name not in stored]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            message = f"{file} has no `{missing[0]}`{more}, which the adapter of `{worker.name}` needs"
            yield Diagnostic("missing-file", message, model.span, help)
        for name, weight in stored.items():
            if name not in shapes:
                message = f"{file} has `{name}`, which the adapter of `{worker.name}` does not have"
            elif weight.problem:
                message = f"`{name}` in {file} {weight.problem}"
            elif [*weight.shape] != shapes[name]:
                shape = [*weight.shape]
                message = f"`{name}` in {file} has the shape {shape}, but `{worker.name}` needs {shapes[name]}"
            else:
                continue
            yield Diagnostic("missing-file", message, model.span, help)
            break
