"""What is asked of the endpoint, and what it answers, in the shapes of OpenAI's API.

Invariant: what cannot be kept to is refused, by name, in OpenAI's form of an error; what the run decides (how tokens
are drawn) is not the program's to say, and what it says of that is left out, and told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data.characters import half_character_within
from ...data.chat import Messages, are_messages
from ..data.columns import Array
from .tool_calls import Call

# What changes nothing of what is drawn here.
NOTED = {
    *("model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "logprobs", "chat_template_kwargs", "return_token_ids", "n", "best_of", "top_logprobs"),
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"),
    *("tool_choice", "response_format", "echo", "suffix", "logit_bias", "frequency_penalty", "presence_penalty"),
}
# What rules tokens out by a schema or a grammar, OpenAI's way and vLLM's.
FORMATS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
)
# What would change it and is not there, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_logprobs": (0,),
    **{name: ({"type": "text"},) if name == "response_format" else () for name in FORMATS},
    "tool_choice": ("auto", "none"),
}


class RequestRefused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, message: str, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class CompletionRequest:
    """A request: `messages`, or a `prompt` as text or tokens. `more` is for the template, `left_out` what it says of
    how tokens are drawn."""

    messages: Messages = field(default_factory=list)
    prompt: str | Array = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    usage: bool = False
    ids: bool = False
    left_out: tuple[str, ...] = ()


def read(body: Any, chat: bool, model: str) -> CompletionRequest:
    """A request of the chat or of the completions. Raises Refused."""
    if not isinstance(body, dict):
        raise RequestRefused("the body is no JSON object", "invalid_json")
    if body.get("model") != model:
        raise RequestRefused(
            f"there is no model {body.get('model')!r} here, but {model!r}", "model_not_found", "model", 404
        )
    given = {k: v for k, v in body.items() if v is not None}
    for name, values in REFUSED.items():
        if name in given and given[name] not in values:
            asks = f"`{name}` = {json.dumps(given[name])}"
            raise RequestRefused(f"{asks} is not there: {_reason(name)}", "unsupported", name)
    stop = given.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if not all(isinstance(s, str) and s for s in stops) or (stop and not stops):
        raise RequestRefused("`stop` takes a string, or a list of strings", "invalid_type", "stop")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise RequestRefused("`max_tokens` takes a whole number of 1 or more", "invalid_type", "max_tokens")
    logprobs = given.get("logprobs", False)
    if not chat and logprobs not in (False, 0):
        what = "`logprobs` of more than the token that was drawn are not there: 0 asks for its own"
        raise RequestRefused(what, "unsupported", "logprobs")
    tools = given.get("tools", []) if given.get("tool_choice") != "none" else []
    if not isinstance(tools, list) or not all(_is_tool(t) for t in tools):
        raise RequestRefused("`tools` takes a list of functions, each with a name", "invalid_type", "tools")
    more = given.get("chat_template_kwargs", {})
    if not isinstance(more, dict) or more.keys() & {"messages", "tokenize", "add_generation_prompt", "tools"}:
        raise RequestRefused(
            "`chat_template_kwargs` takes what the template knows", "invalid_type", "chat_template_kwargs"
        )
    options = given.get("stream_options", {})
    return CompletionRequest(
        messages=templated(given.get("messages")) if chat else [],
        prompt="" if chat else _prompt(given.get("prompt")),
        tools=tuple(tools),
        more={**more, **({"tools": tools} if tools else {})},
        most=most,
        stop=stops,
        logprobs=logprobs is True or (not chat and logprobs == 0 and logprobs is not False),
        stream=given.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        ids=given.get("return_token_ids") is True,
        left_out=tuple(sorted(given.keys() - NOTED)),
    )


def _reason(name: str) -> str:
    """Why a parameter is refused, and what to do."""
    if name not in FORMATS:
        return "one answer is drawn, freely, as the run's program says"
    return (
        "it would rule out tokens as they are drawn, and the row is trained on as the policy draws by itself, with the "
        "log-probabilities of that. Say in `messages` what form the answer has, read it in the agent, and give a low "
        "reward to what does not fit; or describe it as a function in `tools`, which the policy may call"
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def templated(value: Any) -> Messages:
    """Messages as templates want them: content as text, the arguments of calls as objects."""
    if not are_messages(value):
        raise RequestRefused(
            "`messages` takes a list of messages, each with a role and content", "invalid_type", "messages"
        )
    found = []
    for message in value:
        made = {k: v for k, v in message.items() if v is not None}
        made["role"] = "system" if made["role"] == "developer" else made["role"]
        made["content"] = _text(message.get("content"))
        if calls := made.pop("tool_calls", None):
            made["tool_calls"] = [_call(call) for call in calls]
        found.append(made)
    return found


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise RequestRefused("a message's content is text here, or parts of text", "unsupported", "messages")


def _call(call: Any) -> dict[str, Any]:
    if not _is_tool(call):
        raise RequestRefused(
            "each of `tool_calls` has a function with a name and arguments", "invalid_type", "messages"
        )
    arguments = call["function"].get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a template renders what is no JSON as it is
            read = json.loads(arguments)
            arguments = arguments if half_character_within(read) else read
    return {**call, "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}


def _prompt(value: Any) -> str | Array:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(t) is int and 0 <= t < 2**31 for t in value):
        return np.array(value, np.int32)
    raise RequestRefused("`prompt` takes one text, or a list of tokens", "invalid_type", "prompt")


@dataclass(frozen=True)
class ChatReply:
    """An answer: its text, the calls of tools in it, why it ended, and its tokens."""

    text: str
    calls: tuple[Call, ...]
    ended: str
    tokens: Array
    pieces: tuple[str, ...]  # the text of each token
    logps: Array
    prompt: Array
    row: int
    number: int  # among the row's answers

    def message(self) -> dict[str, Any]:
        """As a message of the assistant's."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.calls:
            found["tool_calls"] = [
                {
                    "id": f"{self.number:06}{i:03}",  # nine letters or digits, as some templates want them
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(self.calls)
            ]
        return found

    def body(self, asked: CompletionRequest, model: str) -> dict[str, Any]:
        """The answer in one."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.ended, "logprobs": self._logprobs(asked)}
        if asked.messages:
            choice["message"] = {**self.message(), "refusal": None}
        else:
            choice["text"] = self.text
        if asked.ids:
            choice |= {"token_ids": self.tokens.tolist(), "prompt_token_ids": self.prompt.tolist()}
        kind = "chat.completion" if asked.messages else "text_completion"
        return {**self._head(kind, model), "choices": [choice], "usage": self._usage()}

    def chunks(self, asked: CompletionRequest, model: str) -> Iterator[dict[str, Any]]:
        """The answer in pieces: a generation gives whole answers, so that all of them come at once."""
        head = self._head("chat.completion.chunk" if asked.messages else "text_completion", model)
        parts: list[dict[str, Any]] = [{"text": self.text}]
        if asked.messages:
            message = self.message()
            parts = [{"delta": {"role": "assistant", "content": message["content"] or ""}}]
            parts += [
                {"delta": {"tool_calls": [{"index": i, **call}]}}
                for i, call in enumerate(message.get("tool_calls", ()))
            ]
        for i, part in enumerate(parts):
            logprobs = None if i else self._logprobs(asked)
            yield {**head, "choices": [{"index": 0, "finish_reason": None, "logprobs": logprobs, **part}]}
        last: dict[str, Any] = {"delta": {}} if asked.messages else {"text": ""}
        yield {**head, "choices": [{"index": 0, "finish_reason": self.ended, "logprobs": None, **last}]}
        if asked.usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.row}-{self.number}", "object": kind, "created": int(time.time()), "model": model}

    def _usage(self) -> dict[str, int]:
        before = len(self.prompt)
        drawn = len(self.tokens)
        return {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}

    def _logprobs(self, asked: CompletionRequest) -> dict[str, Any] | None:
        """Of the tokens that were drawn, at the temperature that they were drawn at."""
        if not asked.logprobs:
            return None
        numbers = [float(x) if np.isfinite(x) else -9999.0 for x in self.logps]  # OpenAI's stand-in for what JSON lacks
        if not asked.messages:
            ends = np.cumsum([0, *map(len, self.pieces)]).tolist()
            return {
                "tokens": [*self.pieces],
                "token_logprobs": numbers,
                "top_logprobs": None,
                "text_offset": ends[:-1],
            }
        content = [
            {"token": t, "logprob": x, "bytes": [*t.encode()], "top_logprobs": []}
            for t, x in zip(self.pieces, numbers, strict=True)
        ]
        return {"content": content, "refusal": None}
