"""The replies of environments as tokens that follow the policy's tokens.

Invariant: a reply that is a text is encoded without changes. A reply that is a list of messages is rendered by the chat
template of the policy's model, as part of the whole conversation: prompt, sampled tokens and replies decode to the text
of the whole rendered conversation. Sampled tokens are never tokenized again. If the template renders the earlier part
of the conversation differently from what was sampled, the row fails.
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
    """An environment's reply that cannot be used; the message gives the reason."""


class Dialogue:
    """The environment's side of some rows' conversations, encoded as tokens.

    `episodes` has one episode of the environment for each row, and `contexts` has the tokens before each response.
    Methods identify a row by its position in `contexts`. A row is a conversation if the method `reset` of the row's
    episode returned messages, not text.
    """

    def __init__(self, episodes: Episodes, speech: ChatTemplate, contexts: Sequence[Array]) -> None:
        self.episodes = episodes
        self.speech = speech
        self.contexts = contexts
        self.conversations: dict[int, Messages] = {}

    def begin(self) -> list[Array | None]:
        """Return for each row the tokens with which its response begins.

        The result is None for a row whose episode is over.
        """
        replies = self.episodes.reset()
        return self._encode(dict(enumerate(replies)), {}, BEGINNING)

    def step(self, positions: Array, drawn: list[Array], turn: int, continues: bool) -> list[Array | None]:
        """Return the environment's tokens that follow the sampled tokens of a turn.

        `drawn` has the tokens that were sampled for the rows at `positions`. The result has None for a row whose
        episode is over. If `continues` is false, this was the last turn, and the episodes of all rows are over.
        """
        texts = self.speech.tokens.decode(drawn)
        replies = self.episodes.step(positions, texts, turn)
        if not continues:
            return [None] * len(replies)
        drawn_texts = dict(zip(positions.tolist(), zip(drawn, texts, strict=True), strict=True))
        return self._encode(dict(zip(positions.tolist(), replies, strict=True)), drawn_texts, f"turn {turn}")

    def _encode(
        self, replies: dict[int, tuple[Utterance, bool]], drawn: dict[int, tuple[Array, str]], when: str
    ) -> list[Array | None]:
        tokens: dict[int, Array] = {}
        for position, (utterance, ended) in replies.items():
            if ended:
                continue
            try:
                if not drawn:
                    tokens[position] = self._encode_reset(position, utterance)
                else:
                    tokens[position] = self._encode_reply(position, *drawn[position], utterance)
            except (BadTurnError, BadMessages, BadPieceError) as error:
                self.episodes.refuse(position, str(error), when)
        lost = self.episodes.surviving_rows.lost
        return [None if lost[position] else tokens.get(position) for position in replies]

    def _encode_reset(self, position: int, utterance: Utterance) -> Array:
        """Return the tokens of the text or messages that `reset` returned."""
        context = self.contexts[position]
        if isinstance(utterance, str):
            first = self.speech.encode_following(utterance) if len(context) else self.speech.encode(utterance)
            if not len(context) + len(first):
                raise BadTurnError(
                    "`reset` returned no text and the row has no prompt, so nothing predicts a first token"
                )
            return first
        rendered = self.speech.encode_prompt(utterance)
        if not np.array_equal(rendered[: len(context)], context):
            begins, belongs = (self.speech.decode(tokens[:40], special=True) for tokens in (rendered, context))
            raise BadTurnError(
                f"the conversation that `reset` returned begins with {begins!r}, but the row's own prompt is "
                f"{belongs!r}: return the messages that the prompt was rendered from, or read no column of tokens"
            )
        self.conversations[position] = utterance
        return rendered[len(context) :]

    def _encode_reply(self, position: int, drawn: Array, text: str, utterance: Utterance) -> Array:
        """Return the tokens of the text or messages that `step` returned.

        The reply follows the sampled tokens `drawn`, which decode to `text`.
        """
        conversation = self.conversations.get(position)
        if conversation is None:
            if not isinstance(utterance, str):
                raise BadTurnError(
                    "`step` returned messages, but there is no conversation to add them to: let `reset` return the "
                    "messages that it begins with"
                )
            return self.speech.encode_following(utterance)
        if isinstance(utterance, str):
            returned = f"the text {utterance[:40]!r}" if utterance else "nothing"
            raise BadTurnError(
                f"`step` returned {returned} in a conversation of messages that continues: return a message, such as "
                '{"role": "user", "content": …}'
            )
        last = len(conversation)
        conversation += [{"role": "assistant", "content": text}, *utterance]
        rest = self.speech.encode_continuation(conversation, last, drawn)
        if rest is None:
            raise BadTurnError(self._explain_rewrite(conversation, last, drawn))
        return rest

    def _explain_rewrite(self, conversation: Messages, last: int, drawn: Array) -> str:
        """Explain how the chat template changed the earlier part of a conversation."""
        tokens = self.speech.tokens
        before = tokens.render(conversation[:last], True) + self.speech.decode(drawn, special=True)
        after = tokens.render(conversation, True)
        same = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(after))
        return (
            f"the chat template of {tokens.folder} writes {after[same : same + 20]!r} once `step`'s messages are "
            f"added, but the policy wrote after {before[same : same + 20]!r}. If the template leaves out earlier "
            "thoughts once a `user` message follows, answer as `tool`; if it moves the `system` message, put its text "
            "into the first `user` message; otherwise change the template in the model's folder"
        )
