"""Requests to the agents' endpoint and the endpoint's answers, in OpenAI's format.

Invariant: a request that cannot be served is refused with an OpenAI error that names the reason. The run, not the
agent, decides how tokens are drawn. If a request has sampling parameters, these parameters are ignored and reported.
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

# Parameters that do not change what is drawn here.
NOTED = {
    *("model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "logprobs", "chat_template_kwargs", "return_token_ids", "n", "best_of", "top_logprobs"),
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"),
    *("tool_choice", "response_format", "echo", "suffix", "logit_bias", "frequency_penalty", "presence_penalty"),
}
# Parameters that rule out tokens by a schema or a grammar, of OpenAI and of vLLM.
FORMATS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
)
# Unsupported parameters that would change what is drawn, with the values that have no effect.
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
    """The error for a request that cannot be served; the message says why."""

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
    """A parsed request for a chat answer or for a completion.

    - `messages`: the messages of a chat request; empty for a completion.
    - `prompt`: the prompt of a completion, as text or tokens.
    - `tools`: the tools that the policy may call.
    - `more`: the arguments of the chat template other than messages and tools.
    - `most`: the maximum number of tokens of the answer; None if the request states no maximum.
    - `stop`: texts that end the answer.
    - `logprobs`, `ids`: whether the answer has log-probabilities, and whether it has token ids.
    - `stream`, `usage`: whether the answer is a stream, and whether the stream ends with the numbers of tokens.
    - `left_out`: the request's sampling parameters, which are ignored.
    """

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


def parse_request(body: Any, chat: bool, model: str) -> CompletionRequest:
    """Parse a request for a chat answer if `chat` is true, or else for a completion.

    `body` is the parsed JSON of the request. `model` is the name of the endpoint's model. Raises RequestRefused if the
    request cannot be served, or names another model.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body is not a JSON object", "invalid_json")
    if body.get("model") != model:
        raise RequestRefused(
            f"there is no model {body.get('model')!r} here, only {model!r}", "model_not_found", "model", 404
        )
    fields = {key: value for key, value in body.items() if value is not None}
    for name, values in REFUSED.items():
        if name in fields and fields[name] not in values:
            asks = f"`{name}` = {json.dumps(fields[name])}"
            raise RequestRefused(f"{asks} is not supported: {_refusal_reason(name)}", "unsupported", name)
    stop = fields.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if not all(isinstance(text, str) and text for text in stops) or (stop and not stops):
        raise RequestRefused("`stop` takes a string, or a list of strings", "invalid_type", "stop")
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise RequestRefused("`max_tokens` takes a whole number of 1 or more", "invalid_type", "max_tokens")
    logprobs = fields.get("logprobs", False)
    if not chat and logprobs not in (False, 0):
        message = "`logprobs` of other tokens than the drawn one are not supported: 0 returns those of the drawn token"
        raise RequestRefused(message, "unsupported", "logprobs")
    tools = fields.get("tools", []) if fields.get("tool_choice") != "none" else []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise RequestRefused("`tools` takes a list of functions, each with a name", "invalid_type", "tools")
    template_arguments = fields.get("chat_template_kwargs", {})
    if not isinstance(template_arguments, dict) or template_arguments.keys() & {
        "messages",
        "tokenize",
        "add_generation_prompt",
        "tools",
    }:
        raise RequestRefused(
            "`chat_template_kwargs` takes an object of the template's variables", "invalid_type", "chat_template_kwargs"
        )
    options = fields.get("stream_options", {})
    return CompletionRequest(
        messages=prepare_messages(fields.get("messages")) if chat else [],
        prompt="" if chat else _parse_prompt(fields.get("prompt")),
        tools=tuple(tools),
        more={**template_arguments, **({"tools": tools} if tools else {})},
        most=most,
        stop=stops,
        logprobs=logprobs is True or (not chat and logprobs == 0 and logprobs is not False),
        stream=fields.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        ids=fields.get("return_token_ids") is True,
        left_out=tuple(sorted(fields.keys() - NOTED)),
    )


def _refusal_reason(name: str) -> str:
    """Return why the parameter `name` is refused, and what the agent can do instead."""
    if name not in FORMATS:
        return "one answer is drawn, without constraints, as the run's program says"
    return (
        "it would rule out tokens while they are drawn, but training uses the policy's own, unconstrained draws with "
        "their log-probabilities. Describe the format in `messages`, parse the answer in the agent, and give a low "
        "reward to answers that do not fit; or describe the format as a function in `tools`, which the policy may "
        "call"
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def prepare_messages(value: Any) -> Messages:
    """Convert the messages of a request to the form that chat templates expect.

    The content of a message becomes text, and the arguments of its tool calls become objects. Raises RequestRefused if
    a message cannot be used.
    """
    if not are_messages(value):
        raise RequestRefused(
            "`messages` takes a list of messages, each with a role and content", "invalid_type", "messages"
        )
    messages = []
    for message in value:
        fields = {key: item for key, item in message.items() if item is not None}
        fields["role"] = "system" if fields["role"] == "developer" else fields["role"]
        fields["content"] = _content_text(message.get("content"))
        if calls := fields.pop("tool_calls", None):
            fields["tool_calls"] = [_normalize_call(call) for call in calls]
        messages.append(fields)
    return messages


def _content_text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RequestRefused("a message's content must be text, or parts of text", "unsupported", "messages")


def _normalize_call(call: Any) -> dict[str, Any]:
    if not _is_tool(call):
        raise RequestRefused(
            "each of `tool_calls` needs a function with a name and arguments", "invalid_type", "messages"
        )
    arguments = call["function"].get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a template renders text that is not JSON unchanged
            read = json.loads(arguments)
            arguments = arguments if half_character_within(read) else read
    return {**call, "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}


def _parse_prompt(value: Any) -> str | Array:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return np.array(value, np.int32)
    raise RequestRefused("`prompt` takes one text, or a list of tokens", "invalid_type", "prompt")


@dataclass(frozen=True)
class ChatReply:
    """The answer of the policy to a request.

    - `text`: the text around the tool calls.
    - `calls`: the tool calls.
    - `ended`: the reason why the answer ended: stop, length or tool_calls.
    - `tokens`, `logps`: the drawn tokens and their log-probabilities.
    - `prompt`: the tokens before the answer.
    - `row`: the row of the agent.
    """

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
        """Return the answer as a message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"{self.number:06}{i:03}",  # nine letters or digits, as some templates require
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(self.calls)
            ]
        return message

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        """Return the whole answer as one object of OpenAI's API."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.ended, "logprobs": self._logprobs(request)}
        if request.messages:
            choice["message"] = {**self.message(), "refusal": None}
        else:
            choice["text"] = self.text
        if request.ids:
            choice |= {"token_ids": self.tokens.tolist(), "prompt_token_ids": self.prompt.tolist()}
        kind = "chat.completion" if request.messages else "text_completion"
        return {**self._header(kind, model), "choices": [choice], "usage": self._usage()}

    def chunks(self, request: CompletionRequest, model: str) -> Iterator[dict[str, Any]]:
        """Yield the answer as the chunks of a stream.

        The policy's answer is complete before the first chunk, so all chunks are sent at the same time.
        """
        header = self._header("chat.completion.chunk" if request.messages else "text_completion", model)
        parts: list[dict[str, Any]] = [{"text": self.text}]
        if request.messages:
            message = self.message()
            parts = [{"delta": {"role": "assistant", "content": message["content"] or ""}}]
            parts += [
                {"delta": {"tool_calls": [{"index": i, **call}]}}
                for i, call in enumerate(message.get("tool_calls", ()))
            ]
        for i, part in enumerate(parts):
            logprobs = None if i else self._logprobs(request)
            yield {**header, "choices": [{"index": 0, "finish_reason": None, "logprobs": logprobs, **part}]}
        last: dict[str, Any] = {"delta": {}} if request.messages else {"text": ""}
        yield {**header, "choices": [{"index": 0, "finish_reason": self.ended, "logprobs": None, **last}]}
        if request.usage:
            yield {**header, "choices": [], "usage": self._usage()}

    def _header(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.row}-{self.number}", "object": kind, "created": int(time.time()), "model": model}

    def _usage(self) -> dict[str, int]:
        before = len(self.prompt)
        drawn = len(self.tokens)
        return {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}

    def _logprobs(self, request: CompletionRequest) -> dict[str, Any] | None:
        """Return the log-probabilities of the drawn tokens in the format of OpenAI's API.

        The log-probabilities are for the temperature at which the tokens were drawn. Returns None if the request does
        not ask for log-probabilities.
        """
        if not request.logprobs:
            return None
        # -9999.0 is OpenAI's value for -inf, which JSON lacks.
        numbers = [float(logprob) if np.isfinite(logprob) else -9999.0 for logprob in self.logps]
        if not request.messages:
            ends = np.cumsum([0, *map(len, self.pieces)]).tolist()
            return {
                "tokens": [*self.pieces],
                "token_logprobs": numbers,
                "top_logprobs": None,
                "text_offset": ends[:-1],
            }
        content = [
            {"token": piece, "logprob": logprob, "bytes": [*piece.encode()], "top_logprobs": []}
            for piece, logprob in zip(self.pieces, numbers, strict=True)
        ]
        return {"content": content, "refusal": None}
