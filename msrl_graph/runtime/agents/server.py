"""The endpoint: an HTTP server that takes OpenAI's requests and has the policy answer them.

Invariant: a request belongs to the row whose key it bears, and to no other; who bears no key of a row that is under way
is refused, and keeps no connection for long (process/connection_gate.py). All runs in one event loop, so that a row's
conversations change at one place at a time.
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
from .api_types import ChatReply, CompletionRequest, RequestRefused, read, templated
from .conversations import ContextOverflow, Conversations, DrawnAnswer
from .template import ChatTemplate

LOOPBACK = "127.0.0.1"
LARGEST = 64 << 20  # bytes of a request


@dataclass(eq=False)
class OpenRow:
    """A row that is under way: its place among those of a batch, and its conversations."""

    place: int
    conversations: Conversations
    api_key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    drawing: dict[int, asyncio.Future[tuple[Array, Array]]] = field(default_factory=dict)  # by the answer's number


Draw = Callable[[OpenRow, DrawnAnswer, tuple[str, ...]], Awaitable[tuple[Array, Array]]]


class Endpoint:
    """Serves one model under a name; `draw` gives the tokens of an answer and their log-probabilities."""

    def __init__(self, model: str, speech: ChatTemplate, stops: tuple[str, ...], draw: Draw) -> None:
        self.model = model
        self.speech = speech
        self.stops = stops
        self.draw = draw
        self.rows: dict[str, OpenRow] = {}
        self.left_out: dict[str, None] = {}  # what requests say and the run decides
        self.base_url = ""
        self.gate = Gate()

    async def start(self, address: str = LOOPBACK) -> None:
        """Listens at an address of this host, at a port that the system chooses."""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._nothing)
        # A request whose program has gone away is to be known of.
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

    def _row(self, request: web.Request) -> OpenRow:
        bears = request.headers.get("Authorization", "").removeprefix("Bearer ")
        row = self.rows.get(bears)
        if row is None:
            what = "this is the `api_key` of no row under way: an agent is given its own, which ends with it"
            raise RequestRefused(what, "invalid_api_key", status=401)
        if request.transport is not None:
            self.gate.prove(request.transport.get_extra_info("socket").fileno())
        return row

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._row(request)
        except RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "msrl_graph"}
        return web.json_response({"object": "list", "data": [one]})

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        refused = RequestRefused(f"{request.method} {request.path} is not served here", "not_found", status=404)
        return web.json_response(refused.body(), status=404)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, False)

    async def _answered(self, request: web.Request, chat: bool) -> web.StreamResponse:
        try:
            row = self._row(request)
            asked = await self._asked(request, chat)
            answer = self._begun(row.conversations, asked)
        except RequestRefused as refused:
            return web.json_response(refused.body(), status=refused.status)
        try:
            said = await self._said(row, answer, asked)
            if not asked.stream:
                response: web.StreamResponse = web.json_response(said.body(asked, self.model))
            else:
                response = await self._streamed(request, said, asked)
        except (asyncio.CancelledError, ConnectionError):
            row.conversations.lost(answer)
            raise
        if asked.messages:
            row.conversations.chatted(answer, asked.messages, templated([said.message()])[0], asked.more)
        else:
            row.conversations.completed(answer, asked.prompt, said.text)
        return response

    async def _asked(self, request: web.Request, chat: bool) -> CompletionRequest:
        try:
            text = (await request.read()).decode("utf-8")  # as JSON always is, whatever the request's head says
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is no JSON: {error}", "invalid_json") from None
        if "\\u" in text and (half := half_character_within(body)):
            fix = 'send `text.encode("utf-8", "replace").decode()`'
            raise RequestRefused(f"there is {half} in the request, which has no tokens: {fix}", "invalid_text")
        asked = read(body, chat, self.model)
        self.left_out |= dict.fromkeys(asked.left_out)
        return asked

    def _begun(self, conversations: Conversations, asked: CompletionRequest) -> DrawnAnswer:
        """What is to be drawn."""
        try:
            if not asked.messages:
                self._known(asked.prompt)
                return conversations.completion(asked.prompt, asked.most)
            if asked.tools and not self.speech.takes_tools:
                raise RequestRefused("the chat template of this model knows no tools", "unsupported", "tools")
            if asked.tools and self.speech.calls is None:
                what = "nobody knows how this model writes calls of tools: say it by `tool_calls` in the program"
                raise RequestRefused(what, "unsupported", "tools")
            return conversations.chat(asked.messages, asked.most, asked.more)
        except (BadMessages, BadPieceError) as error:
            raise RequestRefused(str(error), "template", "messages") from None
        except ContextOverflow as full:
            raise RequestRefused(
                str(full), "context_length_exceeded", "messages" if asked.messages else "prompt"
            ) from None

    def _known(self, prompt: str | Array) -> None:
        """Refuses token ids that the model has no embedding for."""
        size = self.speech.tokens.tokenizer.get_vocab_size()
        if not isinstance(prompt, str) and (strange := prompt[prompt >= size]).size:
            what = f"the token {strange[0]} is not in the vocabulary of {size} of this model's tokenizer"
            raise RequestRefused(what, "invalid_token", "prompt")

    async def _said(self, row: OpenRow, answer: DrawnAnswer, asked: CompletionRequest) -> ChatReply:
        if answer.number not in row.drawing:
            row.drawing[answer.number] = asyncio.ensure_future(self.draw(row, answer, asked.stop))
        # It goes on where the program goes away: who asks again gets it.
        tokens, logps = await asyncio.shield(row.drawing[answer.number])
        answer.tokens = tokens
        answer.logps = logps
        text, calls = self.speech.read(tokens, asked.tools)
        for stop in asked.stop:
            text = text.partition(stop)[0] if stop not in self.stops else text
        whole = self.speech.decode(tokens, special=True)
        full = len(tokens) >= answer.most and int(tokens[-1]) not in self.speech.tokens.ends
        full = full and not any(s in whole for s in (*self.stops, *asked.stop))
        return ChatReply(
            text=text,
            calls=tuple(calls),
            ended="length" if full else "tool_calls" if calls else "stop",
            tokens=tokens,
            pieces=tuple(self.speech.pieces(tokens)) if asked.logprobs else (),
            logps=logps,
            prompt=answer.prefix,
            row=row.conversations.row,
            number=answer.number,
        )

    async def _streamed(self, request: web.Request, said: ChatReply, asked: CompletionRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in said.chunks(asked, self.model):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
