"""Text and messages as a model reads them, and its tokens as text.

Invariant: text is encoded without special tokens; messages are rendered by the chat template of the model that reads
them, and what the template writes is all that is added. The same text gives the same tokens in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from ...data.characters import half_character
from ...data.chat import Messages, messages
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import is_tokens, sequences, speaker
from ...model.end_tokens import read_end_tokens
from ..process import shipped_files
from . import rendering
from .columns import Array, ColumnData, ragged
from .rendering import BadMessages
from .token_pieces import Pieces


class Tokens:
    """The tokenizer of a model's folder. `ends` are the tokens that end a response, first the one that is appended
    where none does; none where the folder names none."""

    def __init__(self, folder: str, tokenizer: Any = None) -> None:
        self.folder = folder
        self.tokenizer = tokenizer or _tokenizer(folder)
        self.pieces = Pieces(tokenizer) if tokenizer else _pieces(folder)
        self.ends = ends(folder)

    def read(self, column: ColumnData, follows: bool = False) -> ColumnData:
        """The tokens of a text column, row by row: of a JSON list of messages those of the prompt that it makes, of
        other text its own; `follows`: other tokens come before them. Raises BadMessages, BadPieceError."""
        asked = [self.asked(column.text(row)) for row in range(len(column))]
        return ragged(self.following(asked) if follows else self.encode(asked), np.int32)

    def ended(self, column: ColumnData) -> ColumnData:
        """The tokens of a text column whose texts are responses: each as it is, and what ends a response where nothing
        does. Raises BadMessages, since what comes before them is not known here."""
        found = [column.text(row) for row in range(len(column))]
        if any(map(messages, found)):
            raise BadMessages("a column of `text` that is scored holds messages: declare it as tokens, `i32[<= n]`")
        return ragged(self.closed(self.following(found)), np.int32)

    def closed(self, responses: Sequence[Array]) -> list[Array]:
        """Responses with the token that ends them, the empty ones aside: without it a model never learns to end."""
        ends = self.ends
        return [
            np.append(r, ends[:1]).astype(r.dtype) if len(r) and ends and r[-1] not in ends else r for r in responses
        ]

    def unended(self, text: str) -> str:
        """A text of a response, without the token that ends it."""
        names = [t for e in self.ends if (t := self.tokenizer.id_to_token(e))]
        return next((text.removesuffix(name) for name in names if text.endswith(name)), text)

    def asked(self, text: str) -> str:
        """What `read` encodes for a text. Raises BadMessages."""
        return self.prompt(found) if (found := messages(text)) else text

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of each text, as it is."""
        return self.pieces.encode(texts)

    def beginning(self, text: str, tokens: int) -> str:
        """The text, or a beginning of it that has more than so many tokens, so that the text itself has more too."""
        return self.pieces.beginning(text, tokens)

    def following(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Array]:
        """The tokens of each text, which comes after the text `before` it; None: it is not known. Raises
        BadPieceError."""
        return self.pieces.following(texts, before)

    def decode(self, rows: Iterable[Array], special: bool = False) -> list[str]:
        """The text of each row of tokens, with or without its special tokens."""
        texts: list[str] = self.tokenizer.decode_batch([r.tolist() for r in rows], skip_special_tokens=not special)
        return texts

    def chat(self) -> Any:
        """The same as a tokenizer of transformers, for functions of the user's. Raises BadMessages."""
        return _chat(self.folder)

    def prompt(self, messages: Messages) -> str:
        """The text that asks for a response to these messages. Raises BadMessages."""
        return self.rendered(messages, True)

    def response(self, prompt: Messages, messages: Messages) -> str:
        """What the template writes of `messages` after `prompt`, up to the end token where it writes one: the text that
        a generation would have written. `messages` may begin with those of the prompt. Raises BadMessages."""
        whole = messages if messages[: len(prompt)] == prompt else [*prompt, *messages]
        role = whole[len(prompt)]["role"] if len(whole) > len(prompt) else ""
        if prompt and role != "assistant":
            what = f"the response begins with a turn of the `{role}`" if role else "the response has no turn of its own"
            help = (
                "write what the `assistant` says, alone or after the prompt's messages exactly as the prompt has them"
            )
            raise BadMessages(what, help)
        before = self.prompt(prompt) if prompt else ""
        text = self.rendered(whole, False)
        if not text.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text))
            what = (
                f"writes {text[same : same + 20]!r} with the response where the prompt alone has "
                f"{before[same : same + 20]!r}"
            )
            raise BadMessages(f"the chat template of {self.folder} {what}, so that none is the beginning of the other")
        text = text[len(before) :]
        # Templates go on after the end token, most with a newline, which no generation reaches.
        shorter = text.rstrip()
        return (
            shorter if shorter.endswith(tuple(t for e in self.ends if (t := self.tokenizer.id_to_token(e)))) else text
        )

    def rendered(self, messages: Messages, prompt: bool, **more: Any) -> str:
        """The text of messages, with what asks for a response after them where it is a `prompt`; `more` is for the
        template, as `tools`. Raises BadMessages."""
        if not rendering.template(self.folder):
            what = "there is no chat_template.jinja, and no `chat_template` in tokenizer_config.json"
            raise BadMessages(f"the model folder {self.folder} has no chat template to render them: {what}")
        text = rendering.render(self.folder, messages, prompt, more)
        if half := half_character(text):
            raise BadMessages(f"there is {half} in what the chat template of {self.folder} writes")
        return text


def tokenised(plan: Plan, node: Node, columns: Mapping[str, ColumnData]) -> dict[str, ColumnData]:
    """The columns of some rows, those of text that the node's model reads as its tokens, a text that it scores with the
    token that ends a response. Raises BadMessages, BadPieceError."""
    read = sequences(plan.graph, node)
    order = (*read.context, *read.scored)
    names = [c for c in order if c in columns and plan.graph.column(c).element == "text"]
    if not names:
        return dict(columns)
    tokens = Tokens(plan.model(node.name).path)
    texts = {c: columns[c] for c in names}
    return {
        **columns,
        **{c: tokens.ended(t) if c in read.scored else tokens.read(t, c != order[0]) for c, t in texts.items()},
    }


def of_column(plan: Plan, column: str) -> Tokens:
    """The tokenizer that a column's tokens are of: its writer's, and the policy's where that is no model."""
    graph = plan.graph
    writer = graph.writer(column)
    worker = graph.worker(writer.worker) if writer.verb != "source" else None
    owner = worker if worker is not None and worker.kind != "function" else speaker(graph)
    assert owner is not None
    return Tokens(plan.deploy.models[owner.model].path)


def of_node(plan: Plan, node: Node) -> Tokens:
    """The tokenizer of the first column of tokens that a node reads, else of the first that it writes, else the
    policy's."""
    graph = plan.graph
    found = next((c for c in (*node.reads, *node.writes) if is_tokens(graph, c)), graph.node("source").writes[0])
    return of_column(plan, found)


@cache
def _tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shipped_files.found(folder) / "tokenizer.json"))
    # Many files store how their authors padded and cut batches; here nothing is padded or cut.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@cache
def _pieces(folder: str) -> Pieces:
    return Pieces(_tokenizer(folder))


@cache
def _chat(folder: str) -> Any:
    """Its import costs seconds, so it is left to those who ask."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(shipped_files.found(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadMessages(f"the tokenizer of {folder} cannot be loaded: {error}") from error


@cache
def ends(folder: str) -> tuple[int, ...]:
    """The tokens that end a response of the model in a folder, as its files name them; first the one of its
    tokenizer. None where no file names one."""
    ids, token = read_end_tokens(shipped_files.found(folder))
    own = _tokenizer(folder).token_to_id(token) if token and len(ids) != 1 else None
    if not ids:
        return () if own is None else (own,)
    # Of several, the tokenizer's own is the one that ends a turn.
    return tuple(sorted(ids, key=lambda end: end != own))
