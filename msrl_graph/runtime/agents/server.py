"""The endpoint: an HTTP server for OpenAI's requests, which the policy answers.

Invariant: a request belongs to the row whose API key it has, and to no other row. A request is refused unless its API
key is the key of a row whose agent is running. A connection is closed after some seconds if no request with a valid API
key arrives (process/connection_gate.py). All requests are handled in one event loop, so two requests never change the
conversations of a row at the same time.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from ...data.characters import half_character_within
from ..data.columns import Array
from ..data.rendering import BadMessages
from ..data.token_pieces import BadPieceError
from ..process.connection_gate import Gate, accept, listen
from .api_types import ChatReply, CompletionRequest, RequestRefused, parse_request, prepare_messages
from .conversations import ContextOverflow, Conversations, DrawnAnswer
from .template import ChatTemplate

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 64 << 20  # bytes of a request


@dataclass(eq=False)
class OpenRow:
    """A row whose agent is running.

    `place` is the index of the row in the batch. `conversations` are the conversations of the row.
    """

    place: int
    conversations: Conversations
    api_key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    drawing: dict[int, asyncio.Future[tuple[Array, Array]]] = field(default_factory=dict)  # by answer number


Draw = Callable[[OpenRow, DrawnAnswer, tuple[str, ...]], Awaitable[tuple[Array, Array]]]


class Endpoint:
    """An HTTP server for one model.

    - `model`: the name of the model in requests.
    - `speech`: the chat template of the model.
    - `stops`: the texts that end an answer, which the program states.
    - `draw`: the function that returns the tokens of an answer and their log-probabilities.
    """

    def __init__(self, model: str, speech: ChatTemplate, stops: tuple[str, ...], draw: Draw) -> None:
        self.model = model
        self.speech = speech
        self.stops = stops
        self.draw = draw
        self.rows: dict[str, OpenRow] = {}
        self.left_out: dict[str, None] = {}  # ignored parameters of requests, which the run decides
        self.base_url = ""
        self.gate = Gate()

    async def start(self, address: str = LOOPBACK) -> None:
        """Listen at an address of this host, at a port that the kernel chooses."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._not_found)
        # handler_cancellation: a handler must notice when its client is gone.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        self._listening = listen(address)
        self._accepting = asyncio.ensure_future(accept(self._listening, self.gate, self._serve))
        host = f"[{address}]" if ":" in address else address
        self.base_url = f"http://{host}:{self._listening.getsockname()[1]}/v1"

    async def _serve(self, connection: socket.socket) -> None:
        assert self._runner.server is not None
        await asyncio.get_running_loop().connect_accepted_socket(self._runner.server, connection)

    async def stop(self) -> None:
        self._accepting.cancel()
        self._listening.close()
        await self._runner.cleanup()

    def _find_row(self, request: web.Request) -> OpenRow:
        api_key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        row = self.rows.get(api_key)
        if row is None:
            message = "no row in progress has this `api_key`: an agent gets a key of its own, which ends with the agent"
            raise RequestRefused(message, "invalid_api_key", status=401)
        if request.transport is not None:
            self.gate.prove(request.transport.get_extra_info("socket").fileno())
        return row

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._find_row(request)
        except RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        model_entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "msrl_graph"}
        return web.json_response({"object": "list", "data": [model_entry]})

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        refused = RequestRefused(f"{request.method} {request.path} is not served here", "not_found", status=404)
        return web.json_response(refused.body(), status=404)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, False)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        try:
            row = self._find_row(request)
            parsed = await self._parse_request(request, chat)
            answer = self._start_answer(row.conversations, parsed)
        except RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        try:
            reply = await self._wait_for_reply(row, answer, parsed)
            if not parsed.stream:
                response: web.StreamResponse = web.json_response(reply.body(parsed, self.model))
            else:
                response = await self._stream(request, reply, parsed)
        except (asyncio.CancelledError, ConnectionError):
            row.conversations.record_dropped_request(answer)
            raise
        if parsed.messages:
            row.conversations.record_chat_answer(
                answer, parsed.messages, prepare_messages([reply.message()])[0], parsed.more
            )
        else:
            row.conversations.record_completion(answer, parsed.prompt, reply.text)
        return response

    async def _parse_request(self, request: web.Request, chat: bool) -> CompletionRequest:
        try:
            text = (await request.read()).decode("utf-8")  # JSON is always UTF-8, whatever the request's header says
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is not JSON: {error}", "invalid_json") from None
        if "\\u" in text and (half := half_character_within(body)):
            fix = 'send `text.encode("utf-8", "replace").decode()`'
            raise RequestRefused(f"the request has {half}, which has no tokens: {fix}", "invalid_text")
        parsed = parse_request(body, chat, self.model)
        self.left_out |= dict.fromkeys(parsed.left_out)
        return parsed

    def _start_answer(self, conversations: Conversations, parsed: CompletionRequest) -> DrawnAnswer:
        """Return the DrawnAnswer for a request; its tokens are not drawn yet.

        `conversations` are the conversations of the request's row. Raises RequestRefused.
        """
        try:
            if not parsed.messages:
                self._check_tokens(parsed.prompt)
                return conversations.completion(parsed.prompt, parsed.most)
            if parsed.tools and not self.speech.takes_tools:
                raise RequestRefused("the chat template of this model does not support tools", "unsupported", "tools")
            if parsed.tools and self.speech.calls is None:
                message = "the format of this model's tool calls is unknown: state it with `tool_calls` in the program"
                raise RequestRefused(message, "unsupported", "tools")
            return conversations.chat(parsed.messages, parsed.most, parsed.more)
        except (BadMessages, BadPieceError) as error:
            raise RequestRefused(str(error), "template", "messages") from None
        except ContextOverflow as full:
            raise RequestRefused(
                str(full), "context_length_exceeded", "messages" if parsed.messages else "prompt"
            ) from None

    def _check_tokens(self, prompt: str | Array) -> None:
        """Raise RequestRefused if a prompt has tokens that are not in the vocabulary."""
        size = self.speech.tokens.tokenizer.get_vocab_size()
        if not isinstance(prompt, str) and (unknown_tokens := prompt[prompt >= size]).size:
            message = (
                f"token {unknown_tokens[0]} is not in the vocabulary of this model's tokenizer, which has {size} tokens"
            )
            raise RequestRefused(message, "invalid_token", "prompt")

    async def _wait_for_reply(self, row: OpenRow, answer: DrawnAnswer, parsed: CompletionRequest) -> ChatReply:
        if answer.number not in row.drawing:
            row.drawing[answer.number] = asyncio.ensure_future(self.draw(row, answer, parsed.stop))
        # Drawing continues when the client goes away: a repeated request gets the answer.
        tokens, logps = await asyncio.shield(row.drawing[answer.number])
        answer.tokens = tokens
        answer.logps = logps
        text, calls = self.speech.parse_answer(tokens, parsed.tools)
        for stop in parsed.stop:
            text = text.partition(stop)[0] if stop not in self.stops else text
        full_text = self.speech.decode(tokens, special=True)
        is_full = len(tokens) >= answer.most and int(tokens[-1]) not in self.speech.tokens.ends
        is_full = is_full and not any(end_text in full_text for end_text in (*self.stops, *parsed.stop))
        return ChatReply(
            text=text,
            calls=tuple(calls),
            ended="length" if is_full else "tool_calls" if calls else "stop",
            tokens=tokens,
            pieces=tuple(self.speech.pieces(tokens)) if parsed.logprobs else (),
            logps=logps,
            prompt=answer.prefix,
            row=row.conversations.row,
            number=answer.number,
        )

    async def _stream(self, request: web.Request, reply: ChatReply, parsed: CompletionRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in reply.chunks(parsed, self.model):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
