"""The conversations that a program has with the policy for one row, as tokens.

Invariant: an answer's tokens are those that were drawn, after exactly the tokens that they were drawn from. Whatever a
program asks is a node of a tree: it goes on from the latest answer that its messages (or its text) begin with, or it
begins a conversation; what repeats a request whose answer never reached the program gets that answer. Of the tree a row
is trained on paths to the last answers that the program got, of those conversations that begin with the row's own
prompt: the latest of them, as many as the program says. An answer that several have in common counts in the latest.

The noise of a draw: what goes on from an answer for the first time has its key, and the row's first conversation the
row's, so that a program that asks in turn draws what an environment would. Whatever else begins, or is asked again,
has a key of its own, by its tokens and how often they were asked for.
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
    """There is no room for an answer, or no turn left; says why."""


@dataclass(eq=False)
class DrawnAnswer:
    """What the policy draws for a request: `prefix` are all tokens before it, of which the first `base` are no part of
    a response, `key` is that of its noise, `most` how many tokens it may have. `number` counts the requests of a row.
    `got`: the program has it."""

    before: DrawnAnswer | None
    prefix: Array
    base: int
    key: int
    number: int
    most: int
    tokens: Array = field(default_factory=NOTHING.copy)
    logps: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    continued: bool = False
    got: bool = False

    @property
    def whole(self) -> Array:
        return np.concatenate([self.prefix, self.tokens])

    def path(self) -> Iterator[DrawnAnswer]:
        """The answers from this one back to the first."""
        node: DrawnAnswer | None = self
        while node is not None:
            yield node
            node = node.before


@dataclass(frozen=True)
class AgentResponse:
    """A response: its tokens, their log-probabilities (NaN where they were not drawn), which were drawn, at which of
    them a conversation `begins`, and at which token its `last` answer does. `kept` are the answers that were drawn in
    it."""

    tokens: Array
    logps: Array
    mask: Array
    begins: Array
    last: int = 0
    kept: tuple[DrawnAnswer, ...] = ()


class Conversations:
    """Those of a row: `context` are the tokens that its response stands after, `bound` is how many that may have,
    `turns` how many answers there may be (None: any number)."""

    def __init__(self, row: int, context: Array, bound: int, turns: int | None, speech: ChatTemplate) -> None:
        self.row = row
        self.context = context
        self.bound = bound
        self.turns = turns
        self.speech = speech
        self.answers: list[DrawnAnswer] = []
        self.strayed = 0  # requests with answers of the policy in them that are not continued token for token
        self._by_messages: dict[str, DrawnAnswer] = {}  # by the messages up to an answer and that itself
        self._by_text: dict[str, DrawnAnswer] = {}
        self._asked: dict[bytes, int] = {}
        self._lost: dict[bytes, DrawnAnswer] = {}

    # What is asked

    def chat(self, messages: Messages, most: int | None, more: Mapping[str, Any]) -> DrawnAnswer:
        """What is to be drawn for messages; `more` is for the template. Raises Full, and BadMessages."""
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        known = keys(messages, more)
        for i in reversed(places):
            before = self._by_messages.get(known[i])
            rest = self.speech.after(messages, i, before.tokens, **more) if before else None
            if before and rest is not None:
                self.strayed += i != places[-1]
                return self._ask(before, np.concatenate([before.whole, rest]), most)
        self.strayed += bool(places)
        return self._ask(None, self.speech.begun(messages, **more), most)

    def completion(self, prompt: str | Array, most: int | None) -> DrawnAnswer:
        """What is to be drawn after a text, or after tokens. Raises Full."""
        if isinstance(prompt, str):
            known = max((t for t in self._by_text if prompt.startswith(t)), key=len, default=None)
            if known is None:
                return self._ask(None, self.speech.encode(prompt), most)
            before: DrawnAnswer | None = self._by_text[known]
            rest = self.speech.following(prompt[len(known) :])
        else:
            found = [a for a in self.answers if a.got and np.array_equal(prompt[: len(a.whole)], a.whole)]
            before = max(found, key=lambda a: len(a.whole), default=None)
            rest = prompt[len(before.whole) :] if before else prompt
        return self._ask(before, np.concatenate([before.whole, rest]) if before else rest, most)

    def _ask(self, before: DrawnAnswer | None, prefix: Array, most: int | None) -> DrawnAnswer:
        lost = self._lost.pop(name := prefix.tobytes(), None)
        if lost is not None and most in (None, lost.most):
            return lost
        if self.turns is not None and len(self.answers) >= self.turns:
            raise ContextOverflow(f"row {self.row} has had its {self.turns} answers, the `turns` of the program")
        if not len(prefix):
            raise ContextOverflow("there is no token to go on from")
        owned = np.array_equal(prefix[: len(self.context)], self.context)
        base = before.base if before else len(self.context) * owned
        room = self.bound - (len(prefix) - base)
        if room < 1:
            raise ContextOverflow(
                f"what is asked takes {len(prefix) - base} tokens of a response that holds {self.bound}, and leaves no "
                "room for an answer"
            )
        times = self._asked[name] = self._asked.get(name, -1) + 1
        inherits = not before.continued if before else not self.answers
        key = (before.key if before else self.row) if inherits else _key(self.row, prefix, times)
        if before:
            before.continued = True
        answer = DrawnAnswer(before, prefix, base, key, len(self.answers), min(room, most or room))
        self.answers.append(answer)
        return answer

    # What was drawn

    def chatted(
        self, answer: DrawnAnswer, messages: Messages, message: dict[str, Any], more: Mapping[str, Any]
    ) -> None:
        """The program has an answer to messages, as this message."""
        answer.got = True
        self._by_messages[keys([*messages, message], more)[-1]] = answer

    def completed(self, answer: DrawnAnswer, prompt: str | Array, text: str) -> None:
        """The program has an answer to a prompt, as this text."""
        answer.got = True
        if isinstance(prompt, str):
            self._by_text[prompt + text] = answer

    def lost(self, answer: DrawnAnswer) -> None:
        """The program has gone away from a request, as it does before it makes the request again."""
        self._lost[answer.prefix.tobytes()] = answer

    # What it comes to

    @property
    def last(self) -> DrawnAnswer | None:
        """The answer that the row's response ends with."""
        got = [a for a in self.answers if a.got]
        owned = [a for a in got if a.base == len(self.context)]
        return max(owned, key=lambda a: a.number, default=None)

    def spoken(self, last: DrawnAnswer, most: int = 1) -> AgentResponse:
        """The response that ends with an answer, of at most so many conversations: before that answer's the latest
        others that there is room for, in the order of their last answers."""
        ends = [last]
        room = self.bound - (len(last.whole) - last.base)
        continued = {id(a.before) for a in self.answers if a.got}
        for answer in reversed(self.answers):
            own = len(answer.whole) - answer.base
            if len(ends) == most:
                break
            ended = answer.got and id(answer) not in continued and answer is not last and len(answer.tokens)
            if ended and answer.base == len(self.context) and own <= room:
                ends.append(answer)
                room -= own
        kept: dict[int, DrawnAnswer] = {}
        parts = [self._conversation(end, kept) for end in ends][::-1]
        tokens, logps, mask, begins = (np.concatenate(each) for each in zip(*parts, strict=True))
        return AgentResponse(tokens, logps, mask, begins, len(tokens) - len(last.tokens), tuple(kept.values()))

    def _conversation(self, end: DrawnAnswer, kept: dict[int, DrawnAnswer]) -> tuple[Array, Array, Array, Array]:
        """A conversation's tokens, their log-probabilities, which were drawn and where it begins; answers that are
        `kept` elsewhere were not drawn here."""
        whole = end.whole
        logps = np.full(len(whole), np.nan, np.float32)
        mask = np.zeros(len(whole), bool)
        for answer in end.path():
            if id(answer) not in kept:
                kept[id(answer)] = answer
                here = slice(len(answer.prefix), len(answer.prefix) + len(answer.tokens))
                logps[here] = np.where(np.isfinite(answer.logps), answer.logps, -np.inf)
                mask[here] = True
        begins = np.arange(len(whole)) == end.base
        own = slice(end.base, None)
        return whole[own], logps[own], mask[own], begins[own]

    def aside(self, spoken: AgentResponse) -> tuple[int, int]:
        """How many answers a response leaves out, and how many tokens of the policy."""
        kept = {id(a) for a in spoken.kept}
        left = [len(a.tokens) for a in self.answers if id(a) not in kept and len(a.tokens)]
        return len(left), sum(left)


def keys(messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[str]:
    """Of each message a key of the conversation up to it. Programs hand messages back in their own way: what is no part
    of what was said, and blanks around it, make no difference."""
    found = []
    key = json.dumps(more, sort_keys=True)
    for message in messages:
        said = {k: message.get(k) for k in ("role", "name", "tool_call_id")}
        said["content"] = str(message.get("content") or "").strip()
        said["tool_calls"] = [(c.get("id"), c.get("function")) for c in message.get("tool_calls") or []]
        key = hashlib.sha256((key + json.dumps(said, sort_keys=True)).encode()).hexdigest()
        found.append(key)
    return found


def _key(row: int, prefix: Array, times: int) -> int:
    """A key that is no row's: beyond all of them."""
    digest = hashlib.blake2b(f"{row} {times} ".encode() + prefix.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1 << 61
