"""A model's chat template, applied to conversations with the policy.

Invariant: text that the policy drew is never tokenized again. A request that continues a conversation has exactly the
drawn tokens, followed by new tokens. The new tokens encode the text that the template writes after the drawn text. Some
templates write an earlier message differently when newer messages follow. The request then begins a new conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ...data.chat import Messages
from ..data import rendering
from ..data.columns import Array
from ..data.rendering import BadMessages
from ..data.tokens import Tokens
from .tool_calls import Call, Calls, find_format


class ChatTemplate:
    """The tokenizer and the chat template of the policy's model folder.

    `calls` is the parser of tool calls. If the program states no format of tool calls, the parser is chosen by the
    format that the template uses.
    """

    def __init__(self, tokens: Tokens, calls: Calls | None = None) -> None:
        self.tokens = tokens
        self._calls = calls
        self.ends = {end_id: end_text for end_id in tokens.ends if (end_text := tokens.tokenizer.id_to_token(end_id))}

    def prepare(self) -> None:
        """Start the template's renderer before the first request.

        If the first request started the renderer, all other requests would wait for it.
        """
        with suppress(BadMessages):  # a request reports it
            rendering.template(self.tokens.folder)

    @cached_property
    def calls(self) -> Calls | None:
        """The parser of tool calls, or None if the policy's tool-call format is unknown.

        Raises BadMessages.
        """
        return self._calls or find_format(rendering.tools_template(rendering.template(self.tokens.folder)))

    @property
    def takes_tools(self) -> bool:
        """Whether the template uses tools. Raises BadMessages."""
        return rendering.takes_tools(self.tokens.folder)

    def encode_prompt(self, messages: Messages, **more: Any) -> Array:
        """Return the tokens after which the policy answers `messages`.

        `more` are arguments of the chat template. Raises BadMessages.
        """
        return self.encode(self.tokens.render(messages, True, **more))

    def encode_continuation(self, messages: Messages, last: int, drawn: Array, **more: Any) -> Array | None:
        """Return the tokens between a drawn answer and the next answer of the policy.

        `messages` is the whole conversation. The message with index `last` was made from the tokens `drawn`. Returns
        None if the template writes `messages[:last + 1]` differently when the newer messages follow. Raises
        BadMessages.
        """
        asked = self.tokens.render(messages[:last], True, **more)
        full_text = self.tokens.render(messages, True, **more)
        end = self.ends.get(int(drawn[-1]), "") if len(drawn) else ""
        text = self.decode(drawn[:-1] if end else drawn, special=True)
        before = asked + text
        if full_text.startswith(before) and full_text[len(before) :].startswith(self._closers):
            # Alone, a turn may be written differently than among others: Qwen3 adds empty thoughts to a last turn.
            return self.encode_following(full_text[len(before) :].removeprefix(end))
        through_turn = self.tokens.render(messages[: last + 1], False, **more)
        if not (full_text.startswith(through_turn) and through_turn.startswith(asked)):
            return None
        rest = self._text_after_answer(through_turn[len(asked) :], text)
        return (
            None if rest is None else self.encode_following((rest + full_text[len(through_turn) :]).removeprefix(end))
        )

    def _text_after_answer(self, turn: str, text: str) -> str | None:
        """Return the end of a message's text: what the template adds to the drawn text.

        `turn` is the whole text of the message, and `text` is the drawn text. Returns None if the end of the drawn text
        cannot be found in `turn`.
        """
        closes = max((turn.rfind(closer) for closer in self._closers), default=-1)
        if closes >= 0:
            # Templates write calls in their own way, and strip or add blanks: the turn ends at the end token.
            return turn[closes:]
        own = text if turn.startswith(text) else text.strip()
        if own not in turn or (text and not own):
            return None
        return turn[turn.index(own) + len(own) :]

    @cached_property
    def _closers(self) -> tuple[str, ...]:
        """The texts of the tokens that end an answer."""
        return tuple(self.ends.values())

    def encode(self, text: str) -> Array:
        return self.tokens.encode([text])[0]

    def encode_following(self, text: str) -> Array:
        """Return the tokens of a text that follows other tokens. Raises BadPieceError."""
        return self.tokens.encode_after([text])[0]

    def decode(self, tokens: Array, special: bool = False) -> str:
        return self.tokens.decode([tokens], special)[0]

    def pieces(self, tokens: Array) -> list[str]:
        """Return the text of each token, decoded one by one."""
        return self.tokens.decode([tokens[i : i + 1] for i in range(len(tokens))], special=True)

    def parse_answer(self, drawn: Array, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
        """Return the text and the tool calls of an answer of the policy.

        `drawn` has the tokens of the answer. If `tools` is empty, the whole answer is text.
        """
        end = len(drawn) and int(drawn[-1]) in self.tokens.ends
        own = drawn[:-1] if end else drawn
        if tools and self.calls is not None:
            text, calls = self.calls(self.decode(own, special=True))
            if calls:
                # The text around the calls, without special tokens.
                return self.decode(self.encode(text)) if text else "", calls
        return self.decode(own), []
