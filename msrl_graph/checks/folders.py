"""Checks that model folders are complete and that their files belong to one model.

Invariant: the checks run before any process starts, and read only files that exist on this machine. A folder with only
a config.json is enough for planning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ..analysis.sequences import bound, is_tokens, sequences
from ..diagnostics import Diagnostic, Fault
from ..ir.attributes import GenerateAttributes
from ..ir.plan import Plan
from ..model import models
from ..model.architecture import Model
from ..model.end_tokens import read_end_tokens
from ..model.sampling_settings import read_sampling
from . import adapter_folders, weights
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Check the folder of each model; diagnostics point at the model's statement."""
    folders = {name: model for name, model in plan.deploy.models.items() if model.path}
    vocabulary = {model.path: diagnostic for model in folders.values() if (diagnostic := _check_vocabulary(model))}
    too_short = [diagnostic for name in folders if (diagnostic := _check_positions(plan, name))]
    endless = [diagnostic for name in folders if (diagnostic := _check_end_tokens(plan, name))]
    return [
        *vocabulary.values(),
        *too_short,
        *endless,
        *(diagnostic for name in folders if (diagnostic := _check_sampling(plan, name))),
        *(diagnostic for model in folders.values() if (diagnostic := _check_type(model))),
        *weights.check(plan, {model.path for model in folders.values()} - vocabulary.keys()),
        *adapter_folders.check(plan),
    ]


def check_unchanged(plan: Plan) -> list[Diagnostic]:
    """Report model folders whose config.json has changed since the plan was made.

    A change is reported only if the tensors that config.json describes differ from the model's tensors in the plan, or
    if an adapter is another one.
    """
    diagnostics: list[Diagnostic] = []
    for model in plan.deploy.models.values():
        try:
            current = models.reload(model) if model.path else model
        except Fault as fault:
            diagnostics += fault.diagnostics
            continue
        if current.tensors != model.tensors:
            message = f"the config.json in {model.path} describes another model than the plan was made for"
            diagnostics.append(Diagnostic("unknown-model", message, model.span, "compile the program again"))
        elif current.initial != model.initial:
            message = f"{current.initial and current.initial.folder} has another adapter than the plan was made for"
            diagnostics.append(Diagnostic("unknown-model", message, model.span, "compile the program again"))
    return diagnostics


def _check_positions(plan: Plan, name: str) -> Diagnostic | None:
    """Report a model that does not support the longest sequence of one of its nodes.

    A model supports sequences up to its number of positions. `name` is the name of the model, and only nodes that use
    this model are checked. The length of a sequence does not include columns of text, since the length of a text is
    unknown.
    """
    model = plan.deploy.models[name]
    limit = models.find_position_limit(model)
    for node in plan.graph.nodes:
        if node.verb == "source" or plan.graph.worker(node.worker).model != name:
            continue
        read = sequences(plan.graph, node)
        context, scored = (
            [column for column in columns_read if is_tokens(plan.graph, column)]
            for columns_read in (read.context, read.scored)
        )  # the length of a text is unknown
        most = sum(bound(plan.graph, column) for column in context) + max(
            (bound(plan.graph, column) for column in scored), default=0
        )
        if most > limit:
            columns = " and ".join(f"`{column}`" for column in (*context, *scored))
            message = (
                f"`{node.name}` computes on up to {most:,} tokens, {columns}; `{model.name}` has {limit:,} positions"
            )
            help = "declare shorter columns, or name a model with more `max_position_embeddings`"
            return Diagnostic("unknown-model", message, model.span, help, related=((node.span, f"`{node.name}`"),))
    return None


def _check_end_tokens(plan: Plan, name: str) -> Diagnostic | None:
    """Warn of a model that generates, but whose files do not name an end token.

    `name` is the name of the model.
    """
    model = plan.deploy.models[name]
    graph = plan.graph
    folder = Path(model.path)
    generates = name in {graph.worker(node.worker).model for node in graph.verb("generate")}
    if not generates or not (folder / "tokenizer.json").is_file():
        return None
    try:
        if any(read_end_tokens(folder)):
            return None
    except (OSError, ValueError, RecursionError):  # the code that needs the file reports it
        return None
    message = f"no file in {model.path} names an end token, so every response has the maximum length"
    help = 'add `"eos_token_id": NUMBER` to its generation_config.json, or `eos_token` to its tokenizer_config.json'
    return Diagnostic("no-end-token", message, model.span, help, "warning")


def _check_sampling(plan: Plan, name: str) -> Diagnostic | None:
    """Report settings for sampling in a model's folder that no run uses.

    `name` is the name of the model. Settings that each of its generations states are not reported.
    """
    model = plan.deploy.models[name]
    nodes = [node for node in plan.graph.verb("generate") if plan.graph.worker(node.worker).model == name]
    try:
        settings = read_sampling(Path(model.path)) if nodes else {}
    except (OSError, ValueError, RecursionError):  # the code that needs the file reports it
        return None
    unused = {
        setting: value for setting, value in settings.items() if any(node.stated(setting) is None for node in nodes)
    }
    if not unused:
        return None
    known = {field.name for field in dataclasses.fields(GenerateAttributes)}
    node = nodes[0].name
    message = f"`{node}` does not use these settings of the generation_config.json of `{model.name}`: "
    message += _format_settings(unused)
    can_state = {setting: value for setting, value in unused.items() if setting in known}
    help = f"to sample with them, write `node {node} {{ {_format_settings(can_state)} }}`" if can_state else ""
    if without := [f"`{setting}`" for setting in unused if setting not in known]:
        help += f"{'; ' if help else ''}no program can state {', '.join(without)}: no update would compute the "
        help += "probabilities of such tokens"
    return Diagnostic("unused-setting", message, model.span, help, "hint")


def _format_settings(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def _check_type(model: Model) -> Diagnostic | None:
    """Report weights that are published in a type in which no engine trains."""
    if (published := models.find_published_type(model)) is None:
        return None
    message = (
        f"the weights of `{model.name}` are in {published}: the run converts them to {model.dtype}, and trains in it"
    )
    help = "" if model.dtype == "f32" else "to train in float32, write `{ dtype = f32 }` after the model's name"
    return Diagnostic("converted-weights", message, model.span, help, "hint")


def _check_vocabulary(model: Model) -> Diagnostic | None:
    """Report a tokenizer that produces tokens for which the model has no embedding.

    Special tokens are not checked, since texts rarely contain them.
    """
    known = models.read_token_texts(model.path, special=False) or {}
    beyond = [number for number in known if number >= model.vocabulary]
    if not beyond:
        return None
    token = min(beyond)
    message = (
        f"the tokenizer of `{model.name}` produces token {token:,}, {known[token]!r}; its `vocab_size` is "
        f"{model.vocabulary:,}"
    )
    return Diagnostic(
        "unknown-model",
        message,
        model.span,
        "tokenizer.json and weights must come from the same model: copy both again",
    )
