"""The user's agents, as they run: a call for each row, many at once, each with its deadline.

Invariant: what an agent's requests ask for is drawn in batches, and no batch changes what is drawn; an agent that
fails, takes too long or returns what the columns do not hold fails with its row. When a row is through, its key opens
nothing any more.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import is_tokens, of_response
from ...ir.signatures import ENDPOINT, agents
from ..data import numerics
from ..data.columns import Array, ragged
from ..data.tokens import Tokens, of_column
from ..functions.instances import Failure
from ..functions.own_process import ProcessExit, call_of, guard_exit
from ..functions.units import options_of
from ..functions.user_traceback import BadResult, ErrorSummary
from ..functions.values import InjectedArguments, ReturnChecker, brief, imported, seen
from ..process import shipped_files
from .conversations import NOTHING, AgentResponse, Conversations, DrawnAnswer
from .rank_protocol import AgentsFinished, BatchStart, SampleReplies, SampleRequest
from .server import LOOPBACK, Endpoint, OpenRow
from .template import ChatTemplate
from .tool_calls import FORMATS, Calls

AT_ONCE = 256  # agents that run side by side: they wait for answers more than they compute
QUIET = 0.02  # seconds that a request waits for others at least, while other agents compute
FIGURES = ("left_out_answers", "left_out_tokens", "strayed", "conversations")
HEARTBEAT = 10.0  # seconds after which a rank hears that nobody asks: its neighbours wait with it


@dataclass(eq=False)
class _Request:
    """One that waits for its tokens, since `since`."""

    wanted: SampleRequest
    since: float
    future: asyncio.Future[tuple[Array, Array]]


class Agents:
    """Those of a node. All methods run in one event loop, but for the user's code."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan = plan
        self.node = node
        self.said = GenerateAttributes.of(node)
        call = self.said.agent
        assert call is not None
        path, _, name = str(call.value).rpartition(":")
        guard_exit()
        self.call = getattr(imported(path, call), name)
        self.signature = agents(shipped_files.found(path).read_text(encoding="utf-8-sig"))[name]
        columns = call.columns()
        self.bound = [(p, columns.get(p, p)) for p in self.signature.columns if columns.get(p, p) in node.reads]
        self.options = options_of(call)
        self.filled = InjectedArguments(self.signature, node, plan)
        texts = [c for p, c in self.bound if p in self.signature.text and is_tokens(plan.graph, c)]
        self.tokens = {c: of_column(plan, c) for c in texts}
        self.response, as_drawn = numerics.drawn(plan.graph, node)
        own = {self.response, as_drawn, *(of_response(plan.graph, node, e) for e in ("bool", "i32"))}
        self.columns = tuple(c for c in node.writes if c not in own)
        self.returned = ReturnChecker(plan, self.columns)
        self.speech = ChatTemplate(Tokens(plan.model(node.name).path), self._calls())
        self.speech.prepare()
        self.model = plan.graph.worker(node.worker).model
        self.endpoint = Endpoint(self.model, self.speech, self.said.stop, self._draw)
        self.others = asyncio.new_event_loop()  # where agents with `async` run: they may block it, and nobody else
        threading.Thread(target=self.others.run_forever, daemon=True).start()

    def _calls(self) -> Calls | None:
        """What the program says of how calls of tools are written."""
        stated = self.said.tool_calls
        if stated is None:
            return None
        path, colon, name = str(stated.value).rpartition(":")
        found: Calls = getattr(imported(path, stated), name) if colon else FORMATS[str(stated.value)]
        return found

    # Batches

    async def begin(self, batch: BatchStart) -> None:
        """Starts an agent for each row."""
        if not self.endpoint.base_url:
            await self.endpoint.start(address(self.plan.deploy.run.listen or LOOPBACK))
        self.batch = batch
        self.live = 0
        self.left = len(batch.rows)
        self.waiting: list[_Request] = []
        self.handed: dict[int, _Request] = {}
        self.number = 0
        self.failed: dict[int, tuple[Failure, dict[str, Any]]] = {}
        self.began = self.took = 0.0  # when the last batch was handed out, and how long it took to draw
        self.changed = asyncio.Event()
        self.places = asyncio.Semaphore(AT_ONCE)
        self.spoken: list[AgentResponse | None] = [None] * len(batch.rows)
        self.values: list[tuple[Any, ...]] = [()] * len(batch.rows)
        self.answers = 0
        self.figures = dict.fromkeys(FIGURES, 0)
        self.tasks = [asyncio.ensure_future(self._row(i)) for i in range(len(batch.rows))]

    async def next(self, told: SampleReplies) -> list[SampleRequest] | AgentsFinished:
        """What is to be drawn next."""
        clock = asyncio.get_running_loop().time
        self.took = clock() - self.began if told.drawn else self.took
        for drawn in told.drawn:
            future = self.handed.pop(drawn.number).future
            if not future.done():  # its row may have failed
                future.set_result((drawn.tokens, drawn.logps))
        until = clock() + HEARTBEAT
        while self.left and not (self.failed and self.said.on_failure == "stop"):
            patience = self._patience(clock())
            if patience <= 0:
                wanted = self.waiting
                self.waiting = []
                self.began = clock()
                self.handed |= {r.wanted.number: r for r in wanted}
                return [r.wanted for r in wanted]
            if clock() >= until:
                return []
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), min(patience, until - clock()))
            except TimeoutError:
                continue
        return self._over()

    def _patience(self, now: float) -> float:
        """How long those that wait for tokens wait for others yet."""
        if not self.waiting:
            return math.inf
        if len({r.wanted.place for r in self.waiting}) >= self.live:
            return 0.0
        # To wait as long as drawing takes costs twice the time at most, and there are as many more in a batch.
        return self.waiting[0].since + max(QUIET, self.took) - now

    async def _draw(self, row: OpenRow, answer: DrawnAnswer, stop: tuple[str, ...]) -> tuple[Array, Array]:
        loop = asyncio.get_running_loop()
        self.number += 1
        begun = len(answer.prefix) - answer.base
        wanted = SampleRequest(self.number, row.place, answer.key, answer.prefix, begun, answer.most, stop)
        request = _Request(wanted, loop.time(), loop.create_future())
        self.waiting.append(request)
        self.changed.set()
        return await request.future

    # Rows

    async def _row(self, place: int) -> None:
        batch = self.batch
        async with self.places:
            row = int(batch.rows[place])
            conversations = Conversations(row, batch.contexts[place], batch.bound, self.said.turns, self.speech)
            one = OpenRow(place, conversations)
            self.endpoint.rows[one.api_key] = one
            self.live += 1
            given: dict[str, Any] = {}
            try:
                given = self._given(place)
                limit = None if self.said.timeout == math.inf else self.said.timeout
                call = asyncio.ensure_future(self._called({**given, **self._filled(one, place), **self.options}))
                done, _ = await asyncio.wait([call], timeout=limit)
                if not done:
                    call.cancel()
                    late = TimeoutError(f"it takes longer than {limit:g} s, its `timeout`")
                    self.failed[place] = Failure("timeout", ErrorSummary.of(late)), given
                else:
                    self._took(place, conversations, call.result())
            except (Exception, SystemExit, ProcessExit) as error:
                self.failed[place] = Failure.of(error), given
            finally:
                del self.endpoint.rows[one.api_key]
                self.live -= 1
                self.left -= 1
                self.changed.set()

    async def _called(self, arguments: dict[str, Any]) -> Any:
        """What the user's function returns."""
        if inspect.iscoroutinefunction(self.call):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._awaited(arguments), self.others))
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            if not result.done():  # nobody waits for one that took too long
                result.set_exception(error) if error else result.set_result(value)

        def work() -> None:
            try:
                with call_of(os.getpid()):
                    found = self.call(**arguments)
                    failed = None
            except BaseException as error:
                found = None
                failed = error if isinstance(error, Exception | ProcessExit) else _exit(error)
            loop.call_soon_threadsafe(tell, found, failed)

        # A thread of its own, not of a pool: one that hangs takes no other row's place.
        threading.Thread(target=work, daemon=True).start()
        return await result

    async def _awaited(self, arguments: dict[str, Any]) -> Any:
        try:
            with call_of(os.getpid()):
                return await self.call(**arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exit(error) from error

    def _given(self, place: int) -> dict[str, Any]:
        """What the agent is given of the columns."""
        batch = self.batch
        row = place // (len(self.batch.rows) // len(self.batch.batch.rows))
        found = {}
        for parameter, name in self.bound:
            element = self.plan.graph.column(name).element
            text = parameter in self.signature.text
            column = batch.batch.columns[name]
            rows = range(row, row + 1)
            found[parameter] = seen(column, element, rows, text, self.tokens.get(name) if text else None)[0]
        return found

    def _filled(self, row: OpenRow, place: int) -> dict[str, Any]:
        """What it is given beside: by what it asks the policy, and what any function may have."""
        asks = dict(zip(ENDPOINT, (self.endpoint.base_url, row.api_key, self.model), strict=True))
        found = {name: asks[name] for name in self.signature.fills if name in asks}
        return found | self.filled(self.batch.task, self.batch.iteration, int(self.batch.rows[place]))

    def _took(self, place: int, conversations: Conversations, result: Any) -> None:
        """Keeps what an agent leaves behind. Raises BadResult."""
        last = conversations.last
        if last is None:
            raise BadResult(self._unheard(conversations))
        spoken = conversations.spoken(last, self.said.conversations)
        if len(self.columns) == 1:
            result = (result,)
        elif not self.columns:
            result = ()
        if not isinstance(result, tuple) or len(result) != len(self.columns):
            belongs = f"a tuple of {len(self.columns)} belongs: {', '.join(self.columns)}"
            raise BadResult(f"it returned {brief(result)}, where {belongs}")
        lengths = {self.response: len(spoken.tokens)}
        values = zip(self.columns, result, strict=True)
        self.values[place] = tuple(self.returned.checked(name, value, lengths) for name, value in values)
        self.spoken[place] = spoken
        answers, tokens = conversations.aside(spoken)
        self.answers += len(conversations.answers)
        told = (answers, tokens, conversations.strayed, int(spoken.begins.sum()))
        for name, number in zip(self.figures, told, strict=True):
            self.figures[name] += number

    def _unheard(self, conversations: Conversations) -> str:
        """Why there is no response."""
        if not any(a.got for a in conversations.answers):
            return "it has had no answer of the policy, and a row needs one"
        first = conversations.answers[0]
        context = conversations.context
        begins, belongs = (self.speech.decode(t[:40], special=True) for t in (first.prefix, context))
        return (
            f"what it asks begins with {begins!r}, and the row's own prompt is {belongs!r}: let `{self.node.name}` "
            "read it as text, or ask what the template makes of it"
        )

    def _over(self) -> AgentsFinished:
        nothing = AgentResponse(NOTHING, NOTHING.astype(np.float32), NOTHING.astype(np.bool_), NOTHING.astype(np.bool_))
        spoken = [s or nothing for s in self.spoken]
        response = (
            ragged([s.tokens for s in spoken], np.int32),
            ragged([s.logps for s in spoken], np.float32),
            ragged([s.mask for s in spoken], np.bool_),
            ragged([s.begins for s in spoken], np.bool_),
        )
        remarks = []
        if self.endpoint.left_out:
            names = ", ".join(f"`{name}`" for name in self.endpoint.left_out)
            remarks = [f"agents of `{self.node.name}` ask for {names}: how tokens are drawn, the program says"]
            self.endpoint.left_out.clear()
        values = {name: [v[i] if v else None for v in self.values] for i, name in enumerate(self.columns)}
        return AgentsFinished(
            response, [s.last for s in spoken], values, self.failed, self.answers, self.figures, remarks
        )


def _exit(error: BaseException) -> Exception:
    """An exit that a row asks for, as an error: as it is it would end the event loop, and all rows with it."""
    return RuntimeError(repr(error)).with_traceback(error.__traceback__)


def address(name: str) -> str:
    """The address of this host that an interface has, or the address itself."""
    found = psutil.net_if_addrs().get(name, [])
    return next((str(a.address) for a in found if a.family == socket.AF_INET), name)
