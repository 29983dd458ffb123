"""The folders of models: whether what lies in them is of one model, and enough for the program.

Invariant: only what is at hand is judged, before anything starts: a folder of a config.json alone can be planned with.
"""

from __future__ import annotations

from pathlib import Path

from ..diagnostics import Diagnostic, Fault
from ..ir.plan import Plan
from ..ir.sequences import bound, is_tokens, sequences
from ..model import models
from ..model.architecture import Model
from ..model.config import positions
from ..model.end_tokens import read_end_tokens
from . import weights


def check(plan: Plan) -> list[Diagnostic]:
    """What is wrong with each model, at its statement."""
    folders = {name: model for name, model in plan.deploy.models.items() if model.path}
    beyond = {m.path: told for m in folders.values() if (told := _vocabulary(m))}
    short = [told for name in folders if (told := _short(plan, name))]
    endless = [told for name in folders if (told := _endless(plan, name))]
    return [
        *beyond.values(),
        *short,
        *endless,
        *weights.check(plan, {m.path for m in folders.values()} - beyond.keys()),
    ]


def changed(plan: Plan) -> list[Diagnostic]:
    """Folders whose config.json is not, or no longer, of the model that was planned for."""
    found: list[Diagnostic] = []
    for model in plan.deploy.models.values():
        try:
            now = models.load("./", Path(model.path), model.dtype, model.span) if model.path else model
        except Fault as fault:
            found += fault.diagnostics
            continue
        if now.tensors != model.tensors:
            message = f"the config.json in {model.path} is of another model than the plan was made for"
            found.append(Diagnostic("unknown-model", message, model.span, "compile the program again"))
    return found


def _short(plan: Plan, name: str) -> Diagnostic | None:
    """A model that has fewer positions than the longest sequence that a node gives it may have tokens."""
    model = plan.deploy.models[name]
    has = positions(models.content(Path(model.path), model.name, model.span), model.family)
    for node in plan.graph.nodes:
        if node.verb == "source" or plan.graph.worker(node.worker).model != name:
            continue
        read = sequences(plan.graph, node)
        context, scored = (
            [c for c in cs if is_tokens(plan.graph, c)] for cs in (read.context, read.scored)
        )  # no text's length is known
        most = sum(bound(plan.graph, c) for c in context) + max((bound(plan.graph, c) for c in scored), default=0)
        if most > has:
            columns = " and ".join(f"`{c}`" for c in (*context, *scored))
            message = (
                f"`{node.name}` computes on up to {most:,} tokens, {columns}; `{model.name}` has {has:,} positions"
            )
            help = "declare shorter columns, or name a model with more `max_position_embeddings`"
            return Diagnostic("unknown-model", message, model.span, help, related=((node.span, f"`{node.name}`"),))
    return None


def _endless(plan: Plan, name: str) -> Diagnostic | None:
    """A model that generates, and of which no file names a token that ends a response."""
    model = plan.deploy.models[name]
    graph = plan.graph
    folder = Path(model.path)
    generates = name in {graph.worker(n.worker).model for n in graph.verb("generate")}
    if not generates or not (folder / "tokenizer.json").is_file():
        return None
    try:
        if any(read_end_tokens(folder)):
            return None
    except (OSError, ValueError, RecursionError):  # whatever needs the file reports it
        return None
    message = f"no file in {model.path} names an end token, so every response is as long as it may be"
    help = 'add `"eos_token_id": NUMBER` to its generation_config.json, or `eos_token` to its tokenizer_config.json'
    return Diagnostic("no-end-token", message, model.span, help, "warning")


def _vocabulary(model: Model) -> Diagnostic | None:
    """A tokenizer that makes tokens which the model has no embedding of; special ones, which texts hardly hold, are
    left alone."""
    known = models.tokens(model.path, special=False) or {}
    beyond = [number for number in known if number >= model.vocabulary]
    if not beyond:
        return None
    token = min(beyond)
    message = (
        f"the tokenizer of `{model.name}` makes token {token:,}, {known[token]!r}; its `vocab_size` is "
        f"{model.vocabulary:,}"
    )
    return Diagnostic("unknown-model", message, model.span, "a tokenizer.json is its weights' own: copy both again")
