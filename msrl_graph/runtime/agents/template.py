"""What a model's chat template writes of a conversation, and where in it the policy's own words end.

Invariant: what the policy drew is never tokenised again. A conversation that goes on is what was drawn, token for
token, and after it what the template writes there; where the template writes the beginning otherwise than it did, the
conversation does not go on: it begins anew.
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
from .tool_calls import Call, Calls, taught


class ChatTemplate:
    """The tokenizer and the template of the policy's folder; `calls` finds calls of tools, where the template's own
    format is not to be looked for."""

    def __init__(self, tokens: Tokens, calls: Calls | None = None) -> None:
        self.tokens = tokens
        self._calls = calls
        self.ends = {e: t for e in tokens.ends if (t := tokens.tokenizer.id_to_token(e))}

    def prepare(self) -> None:
        """Start what renders: a first request that waited for it would hold up all others."""
        with suppress(BadMessages):  # whoever asks hears of it
            rendering.template(self.tokens.folder)

    @cached_property
    def calls(self) -> Calls | None:
        """What finds calls of tools; None where nobody knows how the policy would write them. Raises BadMessages."""
        return self._calls or taught(rendering.with_tools(rendering.template(self.tokens.folder)))

    @property
    def takes_tools(self) -> bool:
        """Whether the template does anything with tools. Raises BadMessages."""
        return rendering.takes_tools(self.tokens.folder)

    def begun(self, messages: Messages, **more: Any) -> Array:
        """The tokens that ask for an answer to messages. Raises BadMessages."""
        return self.encode(self.tokens.rendered(messages, True, **more))

    def after(self, messages: Messages, last: int, drawn: Array, **more: Any) -> Array | None:
        """The tokens that stand between what was `drawn`, which the message at `last` was made of, and the next answer
        to all messages; None where the template writes what comes before them otherwise than it did. Raises
        BadMessages."""
        asked = self.tokens.rendered(messages[:last], True, **more)
        whole = self.tokens.rendered(messages, True, **more)
        end = self.ends.get(int(drawn[-1]), "") if len(drawn) else ""
        text = self.decode(drawn[:-1] if end else drawn, special=True)
        before = asked + text
        if whole.startswith(before) and whole[len(before) :].startswith(self._closers):
            # The turn alone need not be written as it is in the whole: Qwen3 adds empty thoughts to a last one.
            return self.following(whole[len(before) :].removeprefix(end))
        said = self.tokens.rendered(messages[: last + 1], False, **more)
        if not (whole.startswith(said) and said.startswith(asked)):
            return None
        rest = self._rest(said[len(asked) :], text)
        return None if rest is None else self.following((rest + whole[len(said) :]).removeprefix(end))

    def _rest(self, turn: str, text: str) -> str | None:
        """What a template writes of a turn after the text that was drawn in it; None where that cannot be told."""
        closes = max((turn.rfind(closer) for closer in self._closers), default=-1)
        if closes >= 0:
            # Templates write calls in their own way, and strip or add blanks: the end token is where the turn ends.
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

    def following(self, text: str) -> Array:
        """The tokens of a text that comes after others. Raises BadPieceError."""
        return self.tokens.following([text])[0]

    def decode(self, tokens: Array, special: bool = False) -> str:
        return self.tokens.decode([tokens], special)[0]

    def pieces(self, tokens: Array) -> list[str]:
        """The text of each token by itself."""
        return self.tokens.decode([tokens[i : i + 1] for i in range(len(tokens))], special=True)

    def read(self, drawn: Array, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
        """What the policy says in what it drew, and which of the tools it calls."""
        end = len(drawn) and int(drawn[-1]) in self.tokens.ends
        own = drawn[:-1] if end else drawn
        if tools and self.calls is not None:
            said, found = self.calls(self.decode(own, special=True))
            if found:
                # What stands beside the calls, less the special tokens in it.
                return self.decode(self.encode(said)) if said else "", found
        return self.decode(own), []
