"""Text and messages as a model reads them, and tokens as text.

Invariant: text is encoded without special tokens. Messages are rendered by the chat template of the model that reads
them, and nothing is added to the rendered text. The same text gives the same tokens in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from ...analysis.sequences import is_tokens, sequences, source_worker
from ...data.characters import half_character
from ...data.chat import Messages, messages
from ...ir.graph import Node, Value
from ...ir.plan import Plan
from ...model.end_tokens import read_end_tokens
from ..process import shipped_files
from . import rendering
from .columns import Array, ColumnData, ragged
from .rendering import BadMessages
from .token_pieces import Pieces


class Tokens:
    """The tokenizer in a model's folder.

    `ends` are the tokens that end a response, or empty if no file of the folder names such a token. The first of `ends`
    is appended to a response that does not end with one of them. `variables` are set in the chat template.
    """

    def __init__(
        self, folder: str, tokenizer: Any = None, variables: Mapping[str, Value] = MappingProxyType({})
    ) -> None:
        self.folder = folder
        self.variables = dict(variables)
        self.tokenizer = tokenizer or _tokenizer(folder)
        self.pieces = Pieces(tokenizer) if tokenizer else _pieces(folder)
        self.ends = end_tokens(folder)

    def read(self, column: ColumnData, follows: bool = False) -> ColumnData:
        """Encode a text column that a model reads.

        A JSON list of messages is rendered as a prompt; other text is encoded without changes. `follows` means that
        other tokens precede each text in the model's input. Raises BadMessages and BadPieceError.
        """
        input_texts = [self.prompt_text(column.text(row)) for row in range(len(column))]
        return ragged(self.encode_after(input_texts) if follows else self.encode(input_texts), np.int32)

    def encode_responses(self, column: ColumnData) -> ColumnData:
        """Encode a text column of responses, each with an end token.

        Raises BadMessages if a row has messages, because this method does not know the text before them.
        """
        texts = [column.text(row) for row in range(len(column))]
        if any(map(messages, texts)):
            raise BadMessages("a column of `text` that is scored holds messages: declare it as tokens, `i32[<= n]`")
        return ragged(self.append_end_tokens(self.encode_after(texts)), np.int32)

    def append_end_tokens(self, responses: Sequence[Array]) -> list[Array]:
        """Append the end token to each response that has none, except to empty responses.

        Without end tokens, a model never learns to end a response.
        """
        ends = self.ends
        return [
            np.append(response, ends[:1]).astype(response.dtype)
            if len(response) and ends and response[-1] not in ends
            else response
            for response in responses
        ]

    def strip_end_token(self, text: str) -> str:
        """Return a response's text without the token that ends the response."""
        names = [end_text for end in self.ends if (end_text := self.tokenizer.id_to_token(end))]
        return next((text.removesuffix(name) for name in names if text.endswith(name)), text)

    def prompt_text(self, text: str) -> str:
        """Return `text` unchanged; if it is a JSON list of messages, render it as text.

        Raises BadMessages.
        """
        return self.prompt(conversation) if (conversation := messages(text)) else text

    def encode(self, texts: Sequence[str]) -> list[Array]:
        """Return the tokens of each text, encoded on its own."""
        return self.pieces.encode(texts)

    def shorten(self, text: str, tokens: int) -> str:
        """Cut off the end of a text that surely has more than `tokens` tokens.

        The result is a prefix that has more than `tokens` tokens, too. A text that may have fewer tokens is returned
        unchanged.
        """
        return self.pieces.shorten(text, tokens)

    def encode_after(self, texts: Sequence[str], before: Sequence[str] | None = None) -> list[Array]:
        """Return the tokens of each text, as the continuation of a preceding text.

        `before` has one preceding text for each of `texts`; None means that the preceding texts are not known. Raises
        BadPieceError.
        """
        return self.pieces.encode_after(texts, before)

    def decode(self, rows: Iterable[Array], special: bool = False) -> list[str]:
        """Return the text of each row of tokens.

        If `special` is true, the texts contain special tokens; if not, special tokens are left out.
        """
        texts: list[str] = self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=not special)
        return texts

    def chat(self) -> Any:
        """Return the transformers tokenizer of the model's folder, for user functions.

        Raises BadMessages if the tokenizer cannot be loaded.
        """
        return _chat(self.folder)

    def prompt(self, messages: Messages) -> str:
        """Render messages as text, followed by the text that asks for a response.

        Raises BadMessages.
        """
        return self.render(messages, True)

    def response(self, prompt: Messages, messages: Messages) -> str:
        """Return the text that a model must generate after `prompt` to write `messages`.

        It is the text that the chat template writes for `messages`, up to the end token if there is one. `messages` may
        begin with the messages of the prompt. Raises BadMessages.
        """
        conversation = messages if messages[: len(prompt)] == prompt else [*prompt, *messages]
        role = conversation[len(prompt)]["role"] if len(conversation) > len(prompt) else ""
        if prompt and role != "assistant":
            message = (
                f"the response begins with a turn of the `{role}`" if role else "the response has no turn of its own"
            )
            help = (
                "write what the `assistant` says, alone or after the prompt's messages exactly as the prompt has them"
            )
            raise BadMessages(message, help)
        prompt_text = self.prompt(prompt) if prompt else ""
        text = self.render(conversation, False)
        if not text.startswith(prompt_text):
            common = next((i for i, (a, b) in enumerate(zip(prompt_text, text, strict=False)) if a != b), len(text))
            message = (
                f"writes {text[common : common + 20]!r} with the response where the prompt alone has "
                f"{prompt_text[common : common + 20]!r}"
            )
            raise BadMessages(f"the chat template of {self.folder} {message}, so neither text is a prefix of the other")
        text = text[len(prompt_text) :]
        # After the end token, templates write more text, mostly a newline. A generation never gets to this text.
        shorter = text.rstrip()
        return (
            shorter
            if shorter.endswith(tuple(end_text for end in self.ends if (end_text := self.tokenizer.id_to_token(end))))
            else text
        )

    def render(self, messages: Messages, prompt: bool, **more: Any) -> str:
        """Render messages as text with the model's chat template.

        If `prompt` is true, the text that asks for a response is appended. `more` has further template variables, such
        as `tools`. Raises BadMessages.
        """
        if not rendering.template(self.folder):
            reason = "there is no chat_template.jinja, and no `chat_template` in tokenizer_config.json"
            raise BadMessages(f"the model folder {self.folder} has no chat template to render them: {reason}")
        text = rendering.render(self.folder, messages, prompt, {**self.variables, **more})
        if half := half_character(text):
            raise BadMessages(f"the output of the chat template of {self.folder} contains {half}")
        return text


def policy_tokens(plan: Plan, tokenizer: Any = None) -> Tokens:
    """Return the tokenizer that makes the tokens of the source."""
    return model_tokens(plan, _policy_folder(plan), tokenizer)


def model_tokens(plan: Plan, folder: str, tokenizer: Any = None) -> Tokens:
    """Return the tokenizer in the folder of a plan's model.

    The variables of the chat template that the program sets for data are those of the policy.
    """
    chat = next((source.options.chat for source in plan.deploy.data.values() if source.options.chat), ())
    return Tokens(folder, tokenizer, dict(chat or ()) if folder == _policy_folder(plan) else {})


def _policy_folder(plan: Plan) -> str:
    worker = source_worker(plan.graph)
    return plan.deploy.models[worker.model].path if worker is not None else ""


def tokenise_columns(plan: Plan, node: Node, columns: Mapping[str, ColumnData]) -> dict[str, ColumnData]:
    """Encode the text columns that a node's model reads; return all columns.

    Other columns are returned unchanged. The token that ends a response is appended to a text that the model scores.
    Raises BadMessages and BadPieceError.
    """
    node_sequences = sequences(plan.graph, node)
    order = (*node_sequences.context, *node_sequences.scored)
    names = [column for column in order if column in columns and plan.graph.column(column).element == "text"]
    if not names:
        return dict(columns)
    tokens = model_tokens(plan, plan.model(node.name).path)
    texts = {column: columns[column] for column in names}
    return {
        **columns,
        **{
            column: tokens.encode_responses(text_column)
            if column in node_sequences.scored
            else tokens.read(text_column, column != order[0])
            for column, text_column in texts.items()
        },
    }


def column_tokenizer(plan: Plan, column: str) -> Tokens:
    """Return the tokenizer with which a column's tokens were made.

    It is the tokenizer of the model that writes the column, or the policy's tokenizer if no model writes the column.
    """
    graph = plan.graph
    writer = graph.writer(column)
    worker = graph.worker(writer.worker) if writer.verb != "source" else None
    owner = worker if worker is not None and worker.kind != "function" else source_worker(graph)
    assert owner is not None
    return model_tokens(plan, plan.deploy.models[owner.model].path)


def node_tokenizer(plan: Plan, node: Node) -> Tokens:
    """Return the tokenizer for the tokens that a node reads or writes.

    It is the tokenizer of the first token column that the node reads, or else of the first token column that the node
    writes. If the node has no token column, it is the policy's tokenizer.
    """
    graph = plan.graph
    column = next(
        (name for name in (*node.reads, *node.writes) if is_tokens(graph, name)), graph.node("source").writes[0]
    )
    return column_tokenizer(plan, column)


@cache
def _tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shipped_files.find_copy(folder) / "tokenizer.json"))
    # Many files store their authors' padding and truncation settings; nothing is padded or truncated here.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@cache
def _pieces(folder: str) -> Pieces:
    return Pieces(_tokenizer(folder))


@cache
def _chat(folder: str) -> Any:
    """Load the transformers tokenizer of a model folder.

    Importing transformers takes seconds, so the import happens only when a caller needs this tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(shipped_files.find_copy(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadMessages(f"the tokenizer of {folder} cannot be loaded: {error}") from error


@cache
def end_tokens(folder: str) -> tuple[int, ...]:
    """Return the tokens with which the model in `folder` ends a response.

    The files of the folder name these tokens; the result is empty if no file names an end token. The end token of the
    tokenizer comes first.
    """
    ids, token = read_end_tokens(shipped_files.find_copy(folder))
    tokenizer_end = _tokenizer(folder).token_to_id(token) if token and len(ids) != 1 else None
    if not ids:
        return () if tokenizer_end is None else (tokenizer_end,)
    # If there are several end tokens, the tokenizer's own token is the one that ends a turn.
    return tuple(sorted(ids, key=lambda end: end != tokenizer_end))
