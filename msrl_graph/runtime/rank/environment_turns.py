"""What environments say, as the tokens that stand after what the policy wrote.

Invariant: text is encoded as it is. Messages are what the chat template of the policy's model writes of them in the
whole conversation: prompt, what was drawn and what was said decode to the text of that, and what was drawn is never
tokenised again. Where the template writes the beginning otherwise than it was drawn, the row fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.chat import Messages
from ..agents.template import ChatTemplate
from ..data.columns import Array
from ..data.rendering import BadMessages
from ..data.token_pieces import BadPieceError
from ..functions.environments import Episodes
from ..functions.instances import Utterance

BEGINNING = "the beginning"


class BadTurnError(ValueError):
    """What an environment said cannot stand there; why."""


class Dialogue:
    """Episodes of some rows, called by their positions, whose responses stand after these `contexts`. A row whose
    `reset` gave messages is a conversation."""

    def __init__(self, episodes: Episodes, speech: ChatTemplate, contexts: Sequence[Array]) -> None:
        self.episodes = episodes
        self.speech = speech
        self.contexts = contexts
        self.conversations: dict[int, Messages] = {}

    def begin(self) -> list[Array | None]:
        """The tokens that each response begins with; None where the episode is over."""
        said = self.episodes.reset()
        return self._encoded(dict(enumerate(said)), {}, BEGINNING)

    def step(self, positions: Array, drawn: list[Array], turn: int, goes_on: bool) -> list[Array | None]:
        """The tokens that follow what was drawn in these rows in a turn; None where the episode is over, as it is
        everywhere unless it `goes_on`."""
        texts = self.speech.tokens.decode(drawn)
        said = self.episodes.step(positions, texts, turn)
        if not goes_on:
            return [None] * len(said)
        each = dict(zip(positions.tolist(), zip(drawn, texts, strict=True), strict=True))
        return self._encoded(dict(zip(positions.tolist(), said, strict=True)), each, f"turn {turn}")

    def _encoded(
        self, said: dict[int, tuple[Utterance, bool]], drawn: dict[int, tuple[Array, str]], when: str
    ) -> list[Array | None]:
        found: dict[int, Array] = {}
        for position, (words, over) in said.items():
            if over:
                continue
            try:
                if not drawn:
                    found[position] = self._first(position, words)
                else:
                    found[position] = self._answer(position, *drawn[position], words)
            except (BadTurnError, BadMessages, BadPieceError) as error:
                self.episodes.refuse(position, str(error), when)
        lost = self.episodes.standing.lost
        return [None if lost[position] else found.get(position) for position in said]

    def _first(self, position: int, words: Utterance) -> Array:
        """What `reset` said."""
        context = self.contexts[position]
        if isinstance(words, str):
            first = self.speech.following(words) if len(context) else self.speech.encode(words)
            if not len(context) + len(first):
                raise BadTurnError("`reset` says nothing, and the row has no prompt: nothing predicts a first token")
            return first
        begun = self.speech.begun(words)
        if not np.array_equal(begun[: len(context)], context):
            begins, belongs = (self.speech.decode(tokens[:40], special=True) for tokens in (begun, context))
            raise BadTurnError(
                f"the conversation that `reset` returned begins with {begins!r}, and the row's own prompt is "
                f"{belongs!r}: return the messages that the prompt was rendered from, or read no column of tokens"
            )
        self.conversations[position] = words
        return begun[len(context) :]

    def _answer(self, position: int, drawn: Array, text: str, words: Utterance) -> Array:
        """What `step` said to what was drawn, which is this text."""
        conversation = self.conversations.get(position)
        if conversation is None:
            if not isinstance(words, str):
                raise BadTurnError(
                    "`step` returned messages, and the conversation that they belong to is not known: let `reset` "
                    "return the messages that it begins with"
                )
            return self.speech.following(words)
        if isinstance(words, str):
            what = f"the text {words[:40]!r}" if words else "nothing"
            raise BadTurnError(
                f"`step` returned {what} in a conversation of messages that goes on: return a message, as "
                '{"role": "user", "content": …}'
            )
        last = len(conversation)
        conversation += [{"role": "assistant", "content": text}, *words]
        rest = self.speech.after(conversation, last, drawn)
        if rest is None:
            raise BadTurnError(self._rewritten(conversation, last, drawn))
        return rest

    def _rewritten(self, conversation: Messages, last: int, drawn: Array) -> str:
        """Why a conversation cannot go on whose beginning the template writes otherwise than before."""
        tokens = self.speech.tokens
        before = tokens.rendered(conversation[:last], True) + self.speech.decode(drawn, special=True)
        after = tokens.rendered(conversation, True)
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        return (
            f"the chat template of {tokens.folder} writes {after[same : same + 20]!r} with what `step` returned, where "
            f"the policy wrote after {before[same : same + 20]!r}. If it leaves out what was thought before a `user` "
            "speaks, answer as `tool`; if it moves the `system` message, say that in the first `user` message; else "
            "change the template in the model's folder"
        )
