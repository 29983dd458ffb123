"""Requests to the agents' endpoint and the endpoint's answers, in OpenAI's format.

Invariant: a request that cannot be served is refused with an OpenAI error that names the reason. The run, not the
agent, decides how tokens are drawn. If a request has sampling parameters, these parameters are ignored and reported.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from ...data.characters import half_character_within
from ...data.chat import Messages
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


TEMPLATE_VARIABLES = {"messages", "tokenize", "add_generation_prompt", "tools"}  # those that the endpoint sets

Token = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Annotated[str, Meta(min_length=1)]


class _Function(Struct):
    name: str


class _Tool(Struct):  # or a call of it
    function: _Function


class _TextPart(Struct):
    text: str


class _Message(Struct):
    role: str
    content: str | list[_TextPart] | UnsetType | None = UNSET
    tool_calls: list[_Tool] | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.content is UNSET and self.tool_calls is UNSET:
            raise ValueError("Object has neither `content` nor `tool_calls`")


class _Fields(Struct):
    """The types of the parameters that the endpoint reads."""

    tools: list[_Tool] = []
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Stop | list[Stop] = []
    logprobs: bool | int = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class _ChatFields(_Fields, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]


class _CompletionFields(_Fields, kw_only=True):
    prompt: str | list[str | Token | list[Token]]


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
    given = {key: value for key, value in body.items() if value is not None}
    for name, values in REFUSED.items():
        if name in given and given[name] not in values:
            asks = f"`{name}` = {json.dumps(given[name])}"
            raise RequestRefused(f"{asks} is not supported: {_refusal_reason(name)}", "unsupported", name)
    fields = _check_types(given, _ChatFields if chat else _CompletionFields)
    if not chat and fields.logprobs not in (False, 0):
        message = "`logprobs` of other tokens than the drawn one are not supported: 0 returns those of the drawn token"
        raise RequestRefused(message, "unsupported", "logprobs")
    if own := fields.chat_template_kwargs.keys() & TEMPLATE_VARIABLES:
        message = f"`chat_template_kwargs`: the endpoint itself sets the template's variable `{min(own)}`"
        raise RequestRefused(message, "invalid_type", "chat_template_kwargs")
    tools = given.get("tools", []) if given.get("tool_choice") != "none" else []
    return CompletionRequest(
        messages=prepare_messages(given["messages"]) if chat else [],
        prompt="" if chat else _prompt(given["prompt"]),
        tools=tuple(tools),
        more={**fields.chat_template_kwargs, **({"tools": tools} if tools else {})},
        most=fields.max_completion_tokens or fields.max_tokens,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        logprobs=fields.logprobs is True or (not chat and fields.logprobs is not False),
        stream=fields.stream,
        usage=fields.stream_options.get("include_usage") is True,
        ids=fields.return_token_ids,
        left_out=tuple(sorted(given.keys() - NOTED)),
    )


def _check_types(given: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """Return the parameters of a request that the endpoint reads.

    Raises RequestRefused for the first parameter whose value has another type. The message names the place of the
    value, such as `messages[1].role`.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        place = place.strip("`$.") or problem.split("`")[1]  # a missing parameter has no place
        raise RequestRefused(f"`{place}`: {problem}", "invalid_type", re.split(r"[.\[]", place)[0]) from None


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


def prepare_messages(messages: Messages) -> Messages:
    """Convert the messages of a request to the form that chat templates expect.

    The content of a message becomes text, and the arguments of its tool calls become objects.
    """
    prepared = []
    for message in messages:
        fields = {key: item for key, item in message.items() if item is not None}
        fields["role"] = "system" if fields["role"] == "developer" else fields["role"]
        content = message.get("content") or ""
        fields["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if calls := fields.pop("tool_calls", None):
            fields["tool_calls"] = [_normalize_call(call) for call in calls]
        prepared.append(fields)
    return prepared


def _normalize_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", "")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a template renders text that is not JSON unchanged
            read = json.loads(arguments)
            arguments = arguments if half_character_within(read) else read
    return {**call, "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}


def _prompt(value: str | list[Any]) -> str | Array:
    """Return a prompt as text, or as the array of its tokens.

    The prompt may be the only element of a list. Raises RequestRefused for several prompts.
    """
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not value or not all(isinstance(token, int) for token in value):
        raise RequestRefused("`prompt`: Expected one text, or a list of tokens", "invalid_type", "prompt")
    return np.array(value, np.int32)


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
