"""The conversations that an agent has with the policy for one row, as tokens.

Invariant: an answer in a conversation has exactly the tokens that the policy drew. The tokens before the answer are
exactly the tokens that the policy read when it drew the answer.

The requests of a row form a tree. The messages (or the text) of a request may begin with an earlier exchange, which
ends with an answer of the policy. In this case, the request continues this answer. If the messages begin with several
earlier exchanges, the request continues the latest answer. If the messages begin with no earlier exchange, the request
begins a new conversation. If an agent repeats a request because the answer did not reach the agent, the repeated
request gets the same answer.

A path from the root of the tree to the last answer that the agent received is a conversation. A row is trained on
conversations that begin with the row's own prompt. The program states the maximum number of these conversations; if
there are more, only the latest are used. If several of the used conversations share an answer, the answer is trained
only in the latest of them.

The noise of a draw has one of these keys:
- The first conversation of a row has the key of the row.
- The first request that continues an answer has the key of that answer. So an agent that sends one request after
  another gets the same random draws as an environment.
- Any other request has a key of its own. The key is made from the tokens of the request, and from the number of earlier
  requests with the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data.chat import Messages
from ..data.columns import Array
from .template import ChatTemplate

NOTHING: Array = np.zeros(0, np.int32)


class ContextOverflow(Exception):
    """The error for a request that the policy cannot answer; the message says why.

    Either the response has no room for more tokens, or the row already has the maximum number of answers.
    """


@dataclass(eq=False)
class DrawnAnswer:
    """The answer that the policy draws for a request.

    - `previous`: the answer that this answer continues, or None.
    - `prefix`: all tokens before the answer.
    - `base`: the length of the row's own prompt (`Conversations.context`), with which `prefix` begins. It is 0 if
      `prefix` does not begin with this prompt.
    - `key`: the key of the noise with which the answer is drawn.
    - `number`: the number of the answer among the answers of its row.
    - `most`: the maximum number of tokens of the answer.
    - `continued`: whether another request continues the answer.
    - `received`: whether the agent has received the answer.
    """

    previous: DrawnAnswer | None
    prefix: Array
    base: int
    key: int
    number: int
    most: int
    tokens: Array = field(default_factory=NOTHING.copy)
    logps: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    continued: bool = False
    received: bool = False

    @property
    def all_tokens(self) -> Array:
        return np.concatenate([self.prefix, self.tokens])

    def path(self) -> Iterator[DrawnAnswer]:
        """Yield this answer and the answers before it in the conversation, newest first."""
        node: DrawnAnswer | None = self
        while node is not None:
            yield node
            node = node.previous


@dataclass(frozen=True)
class AgentResponse:
    """The response of a row, which may contain several conversations.

    - `tokens`: all tokens of the response.
    - `logps`: the log-probability of each token; NaN for a token that was not drawn.
    - `mask`: true for each token that was drawn.
    - `begins`: true for each token at which a conversation begins.
    - `last`: the index of the token at which the last answer begins.
    - `drawn_answers`: the answers that were drawn in this response.
    """

    tokens: Array
    logps: Array
    mask: Array
    begins: Array
    last: int = 0
    drawn_answers: tuple[DrawnAnswer, ...] = ()


class Conversations:
    """The conversations of a row.

    - `context`: the tokens before the row's response: the row's own prompt.
    - `bound`: the maximum number of tokens of the response.
    - `turns`: the maximum number of answers; None means no limit.
    """

    def __init__(self, row: int, context: Array, bound: int, turns: int | None, speech: ChatTemplate) -> None:
        self.row = row
        self.context = context
        self.bound = bound
        self.turns = turns
        self.speech = speech
        self.answers: list[DrawnAnswer] = []
        self.strayed = 0  # requests that contain answers of the policy but do not continue them token for token
        self._by_messages: dict[str, DrawnAnswer] = {}  # by the messages up to and including an answer
        self._by_text: dict[str, DrawnAnswer] = {}
        self._asked: dict[bytes, int] = {}
        self._lost: dict[bytes, DrawnAnswer] = {}

    # Requests

    def chat(self, messages: Messages, most: int | None, more: Mapping[str, Any]) -> DrawnAnswer:
        """Return a new DrawnAnswer for a chat request; its tokens are not drawn yet.

        `messages` are the messages of the request. `most` is the request's own limit on the tokens of the answer, or
        None. `more` are arguments of the chat template. If the agent repeats a request whose answer the agent did not
        receive, the result is the earlier answer. Raises ContextOverflow and BadMessages.
        """
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        keys = message_keys(messages, more)
        for i in reversed(places):
            before = self._by_messages.get(keys[i])
            rest = self.speech.encode_continuation(messages, i, before.tokens, **more) if before else None
            if before and rest is not None:
                self.strayed += i != places[-1]
                return self._ask(before, np.concatenate([before.all_tokens, rest]), most)
        self.strayed += bool(places)
        return self._ask(None, self.speech.encode_prompt(messages, **more), most)

    def completion(self, prompt: str | Array, most: int | None) -> DrawnAnswer:
        """Return a new DrawnAnswer for a completion; its tokens are not drawn yet.

        `prompt` is the text or the tokens after which the policy answers. `most` is the request's own limit on the
        tokens of the answer, or None. If the agent repeats a request whose answer the agent did not receive, the result
        is the earlier answer. Raises ContextOverflow.
        """
        if isinstance(prompt, str):
            known_text = max((text for text in self._by_text if prompt.startswith(text)), key=len, default=None)
            if known_text is None:
                return self._ask(None, self.speech.encode(prompt), most)
            before: DrawnAnswer | None = self._by_text[known_text]
            rest = self.speech.encode_following(prompt[len(known_text) :])
        else:
            candidates = [
                answer
                for answer in self.answers
                if answer.received and np.array_equal(prompt[: len(answer.all_tokens)], answer.all_tokens)
            ]
            before = max(candidates, key=lambda answer: len(answer.all_tokens), default=None)
            rest = prompt[len(before.all_tokens) :] if before else prompt
        return self._ask(before, np.concatenate([before.all_tokens, rest]) if before else rest, most)

    def _ask(self, before: DrawnAnswer | None, prefix: Array, most: int | None) -> DrawnAnswer:
        lost = self._lost.pop(prefix_bytes := prefix.tobytes(), None)
        if lost is not None and most in (None, lost.most):
            return lost
        if self.turns is not None and len(self.answers) >= self.turns:
            raise ContextOverflow(f"row {self.row} already has {self.turns} answers, the limit that `turns` sets")
        if not len(prefix):
            raise ContextOverflow("the prompt has no tokens")
        owned = np.array_equal(prefix[: len(self.context)], self.context)
        base = before.base if before else len(self.context) * owned
        room = self.bound - (len(prefix) - base)
        if room < 1:
            raise ContextOverflow(
                f"the request takes {len(prefix) - base} of the {self.bound} tokens of the response, which leaves no "
                "room for an answer"
            )
        times = self._asked[prefix_bytes] = self._asked.get(prefix_bytes, -1) + 1
        inherits = not before.continued if before else not self.answers
        key = (before.key if before else self.row) if inherits else _noise_key(self.row, prefix, times)
        if before:
            before.continued = True
        answer = DrawnAnswer(before, prefix, base, key, len(self.answers), min(room, most or room))
        self.answers.append(answer)
        return answer

    # Answers

    def record_chat_answer(
        self, answer: DrawnAnswer, messages: Messages, message: dict[str, Any], more: Mapping[str, Any]
    ) -> None:
        """Record that the agent has received the answer to a chat request.

        The request has the messages `messages` and the template arguments `more`. `message` is the answer in the form
        in which the agent received it.
        """
        answer.received = True
        self._by_messages[message_keys([*messages, message], more)[-1]] = answer

    def record_completion(self, answer: DrawnAnswer, prompt: str | Array, text: str) -> None:
        """Record that the agent has received the answer to a prompt.

        `text` is the answer in the form in which the agent received it.
        """
        answer.received = True
        if isinstance(prompt, str):
            self._by_text[prompt + text] = answer

    def record_dropped_request(self, answer: DrawnAnswer) -> None:
        """Record that the agent gave up a request before it received the answer.

        The agent may repeat the request.
        """
        self._lost[answer.prefix.tobytes()] = answer

    # The response

    @property
    def last(self) -> DrawnAnswer | None:
        """The policy's last answer in the row's own conversation, or None.

        The result is the latest answer that the agent received in a conversation that begins with the row's own prompt.
        """
        got = [answer for answer in self.answers if answer.received]
        owned = [answer for answer in got if answer.base == len(self.context)]
        return max(owned, key=lambda answer: answer.number, default=None)

    def make_response(self, last: DrawnAnswer, most: int = 1) -> AgentResponse:
        """Return the response that ends with the answer `last`.

        The response has at most `most` conversations. The conversation that ends with `last` is the final conversation.
        Other conversations stand before it, in the order of their last answers: the latest ones, as long as they fit
        into the response.
        """
        ends = [last]
        room = self.bound - (len(last.all_tokens) - last.base)
        continued = {id(received.previous) for received in self.answers if received.received}
        for answer in reversed(self.answers):
            own = len(answer.all_tokens) - answer.base
            if len(ends) == most:
                break
            ended = answer.received and id(answer) not in continued and answer is not last and len(answer.tokens)
            if ended and answer.base == len(self.context) and own <= room:
                ends.append(answer)
                room -= own
        kept: dict[int, DrawnAnswer] = {}
        parts = [self._conversation(end, kept) for end in ends][::-1]
        tokens, logps, mask, begins = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return AgentResponse(tokens, logps, mask, begins, len(tokens) - len(last.tokens), tuple(kept.values()))

    def _conversation(self, end: DrawnAnswer, kept: dict[int, DrawnAnswer]) -> tuple[Array, Array, Array, Array]:
        """Return the tokens, log-probabilities, mask and `begins` of a conversation.

        The fields of AgentResponse explain the four arrays. The arrays cover the conversation's tokens that follow the
        row's prompt. `end` is the last answer of the conversation. `kept` has the answers that already count in another
        conversation. In this conversation, the tokens of these answers count as not drawn. The method adds the other
        answers of this conversation to `kept`.
        """
        tokens = end.all_tokens
        logps = np.full(len(tokens), np.nan, np.float32)
        mask = np.zeros(len(tokens), bool)
        for answer in end.path():
            if id(answer) not in kept:
                kept[id(answer)] = answer
                drawn_span = slice(len(answer.prefix), len(answer.prefix) + len(answer.tokens))
                logps[drawn_span] = np.where(np.isfinite(answer.logps), answer.logps, -np.inf)
                mask[drawn_span] = True
        begins = np.arange(len(tokens)) == end.base
        own = slice(end.base, None)
        return tokens[own], logps[own], mask[own], begins[own]

    def count_left_out(self, spoken: AgentResponse) -> tuple[int, int]:
        """Count the row's answers that are not part of the response `spoken`.

        Returns two numbers: how many answers are left out, and how many tokens these answers have.
        """
        kept = {id(answer) for answer in spoken.drawn_answers}
        left_out_lengths = [
            len(answer.tokens) for answer in self.answers if id(answer) not in kept and len(answer.tokens)
        ]
        return len(left_out_lengths), sum(left_out_lengths)


def message_keys(messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[str]:
    """Return, for each message, a key of the conversation up to this message.

    An agent may change an earlier message slightly when it sends the message again. So the key does not depend on
    blanks around the content of a message, or on fields other than role, name, content, tool calls and the id of a tool
    call.
    """
    keys = []
    key = json.dumps(more, sort_keys=True)
    for message in messages:
        fields = {field_name: message.get(field_name) for field_name in ("role", "name", "tool_call_id")}
        fields["content"] = str(message.get("content") or "").strip()
        fields["tool_calls"] = [(call.get("id"), call.get("function")) for call in message.get("tool_calls") or []]
        key = hashlib.sha256((key + json.dumps(fields, sort_keys=True)).encode()).hexdigest()
        keys.append(key)
    return keys


def _noise_key(row: int, prefix: Array, times: int) -> int:
    """Return a noise key for a request; it is larger than the key of any row.

    `prefix` has the tokens of the request. `times` is the number of earlier requests with the same tokens.
    """
    digest = hashlib.blake2b(f"{row} {times} ".encode() + prefix.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1 << 61
