"""The execution of a user's agents: one call per row, many calls at once.

Each call has its own deadline, and its own API key for the endpoint.

Invariant: the tokens for the agents' requests are drawn in batches, and the batching never changes which tokens are
drawn. An agent and its row fail if the agent raises an error, takes too long, or returns a value that does not fit the
value's column. The API key of a call becomes invalid when the call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from ...analysis.sequences import find_response_column, is_tokens
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.signatures import ENDPOINT, read_agents
from ..data import numerics
from ..data.columns import Array, ragged
from ..data.tokens import column_tokenizer, model_tokens
from ..functions.instances import Failure
from ..functions.own_process import ProcessExit, guard_exit, guarded_call
from ..functions.units import options_of
from ..functions.user_traceback import BadResult, ErrorSummary
from ..functions.values import InjectedArguments, ReturnChecker, describe_briefly, import_user_file, values_for_function
from ..process import shipped_files
from .conversations import NOTHING, AgentResponse, Conversations, DrawnAnswer
from .rank_protocol import AgentsFinished, BatchStart, SampleReplies, SampleRequest
from .server import LOOPBACK, Endpoint, OpenRow
from .template import ChatTemplate
from .tool_calls import FORMATS, Calls

MAX_CONCURRENT_AGENTS = 256  # maximum number of agents at a time, which mostly wait for answers
QUIET = 0.02  # minimum seconds that a request waits for others while other agents compute
FIGURES = ("left_out_answers", "left_out_tokens", "strayed", "conversations")
HEARTBEAT = 10.0  # seconds without a request after which a rank gets an empty answer: other ranks wait for this rank


@dataclass(eq=False)
class _Request:
    """A request that waits for its tokens.

    `since` is the time at which the wait began. `future` gets the tokens and their log-probabilities.
    """

    wanted: SampleRequest
    since: float
    future: asyncio.Future[tuple[Array, Array]]


class Agents:
    """The agents of a generation node.

    All methods run in one event loop. The user's code runs in other threads.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan = plan
        self.node = node
        self.attributes = GenerateAttributes.of(node)
        call = self.attributes.agent
        assert call is not None
        path, _, name = str(call.value).rpartition(":")
        guard_exit()
        self.call = getattr(import_user_file(path, call), name)
        self.signature = read_agents(shipped_files.find_copy(path).read_text(encoding="utf-8-sig"))[name]
        columns = call.columns()
        self.bound = [
            (parameter, columns.get(parameter, parameter))
            for parameter in self.signature.columns
            if columns.get(parameter, parameter) in node.reads
        ]
        self.options = options_of(call)
        self.filled = InjectedArguments(self.signature, node, plan)
        texts = [
            column
            for parameter, column in self.bound
            if parameter in self.signature.text and is_tokens(plan.graph, column)
        ]
        self.tokens = {column: column_tokenizer(plan, column) for column in texts}
        self.response, as_drawn = numerics.sampled_columns(plan.graph, node)
        own_columns = {
            self.response,
            as_drawn,
            *(find_response_column(plan.graph, node, element) for element in ("bool", "i32")),
        }
        self.columns = tuple(column for column in node.writes if column not in own_columns)
        self.returned = ReturnChecker(plan, self.columns)
        self.speech = ChatTemplate(model_tokens(plan, plan.model(node.name).path), self._tool_call_format())
        self.speech.prepare()
        self.model = plan.graph.worker(node.worker).model
        self.endpoint = Endpoint(self.model, self.speech, self.attributes.stop, self._draw)
        self.others = asyncio.new_event_loop()  # for `async` agents: one that blocks it does not block requests
        threading.Thread(target=self.others.run_forever, daemon=True).start()

    def _tool_call_format(self) -> Calls | None:
        """Return the format of tool calls that the program states, or None."""
        expression = self.attributes.tool_calls
        if expression is None:
            return None
        path, colon, name = str(expression.value).rpartition(":")
        calls: Calls = getattr(import_user_file(path, expression), name) if colon else FORMATS[str(expression.value)]
        return calls

    # Batches

    async def begin(self, batch: BatchStart) -> None:
        """Start an agent for each row of a batch."""
        if not self.endpoint.base_url:
            await self.endpoint.start(interface_address(self.plan.deploy.run.listen or LOOPBACK))
        self.batch = batch
        self.live = 0
        self.left = len(batch.rows)
        self.waiting: list[_Request] = []
        self.handed: dict[int, _Request] = {}
        self.number = 0
        self.failed: dict[int, tuple[Failure, dict[str, Any]]] = {}
        self.began = self.took = 0.0  # the time when the last batch was returned, and the seconds that drawing it took
        self.changed = asyncio.Event()
        self.places = asyncio.Semaphore(MAX_CONCURRENT_AGENTS)
        self.spoken: list[AgentResponse | None] = [None] * len(batch.rows)
        self.values: list[tuple[Any, ...]] = [()] * len(batch.rows)
        self.answers = 0
        self.figures = dict.fromkeys(FIGURES, 0)
        self.tasks = [asyncio.ensure_future(self._run_row(i)) for i in range(len(batch.rows))]

    async def next(self, replies: SampleReplies) -> list[SampleRequest] | AgentsFinished:
        """Pass replies to the waiting agents, and return the next requests of the agents.

        The list of requests is empty if no agent sends a request for HEARTBEAT seconds. Returns AgentsFinished when all
        agents have finished, or when the failure of an agent ends the run.
        """
        clock = asyncio.get_running_loop().time
        self.took = clock() - self.began if replies.drawn else self.took
        for drawn in replies.drawn:
            future = self.handed.pop(drawn.number).future
            if not future.done():  # false if its row has failed
                future.set_result((drawn.tokens, drawn.logps))
        heartbeat_at = clock() + HEARTBEAT
        while self.left and not (self.failed and self.attributes.on_failure == "stop"):
            patience = self._patience(clock())
            if patience <= 0:
                wanted = self.waiting
                self.waiting = []
                self.began = clock()
                self.handed |= {request.wanted.number: request for request in wanted}
                return [request.wanted for request in wanted]
            if clock() >= heartbeat_at:
                return []
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), min(patience, heartbeat_at - clock()))
            except TimeoutError:
                continue
        return self._finish()

    def _patience(self, now: float) -> float:
        """Return how many more seconds the queued requests wait for further requests.

        Requests wait because one large batch is drawn faster than several small batches. The result is 0 or less if the
        queued requests must be drawn now, and infinite if the queue is empty.
        """
        if not self.waiting:
            return math.inf
        if len({request.wanted.place for request in self.waiting}) >= self.live:
            return 0.0
        # Waiting as long as drawing takes at most doubles the time, and makes the batch larger.
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

    async def _run_row(self, place: int) -> None:
        batch = self.batch
        async with self.places:
            row = int(batch.rows[place])
            conversations = Conversations(row, batch.contexts[place], batch.bound, self.attributes.turns, self.speech)
            open_row = OpenRow(place, conversations)
            self.endpoint.rows[open_row.api_key] = open_row
            self.live += 1
            arguments: dict[str, Any] = {}
            try:
                arguments = self._column_arguments(place)
                limit = None if self.attributes.timeout == math.inf else self.attributes.timeout
                call = asyncio.ensure_future(
                    self._call_agent({**arguments, **self._injected_arguments(open_row, place), **self.options})
                )
                done, _ = await asyncio.wait([call], timeout=limit)
                if not done:
                    call.cancel()
                    late = TimeoutError(f"it took longer than its `timeout` of {limit:g} s")
                    self.failed[place] = Failure("timeout", ErrorSummary.from_error(late)), arguments
                else:
                    self._store_result(place, conversations, call.result())
            except (Exception, SystemExit, ProcessExit) as error:
                self.failed[place] = Failure.from_error(error), arguments
            finally:
                del self.endpoint.rows[open_row.api_key]
                self.live -= 1
                self.left -= 1
                self.changed.set()

    async def _call_agent(self, arguments: dict[str, Any]) -> Any:
        """Call the user's function and return its result."""
        if inspect.iscoroutinefunction(self.call):
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._await_agent(arguments), self.others)
            )
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            if not result.done():  # a call that took too long has no waiter
                result.set_exception(error) if error else result.set_result(value)

        def work() -> None:
            try:
                with guarded_call(os.getpid()):
                    returned = self.call(**arguments)
                    failed = None
            except BaseException as error:
                returned = None
                failed = error if isinstance(error, Exception | ProcessExit) else _exit_as_error(error)
            with contextlib.suppress(RuntimeError):  # a call that took too long may outlast the loop
                loop.call_soon_threadsafe(tell, returned, failed)

        # A thread of its own instead of a pool: a call that hangs does not block another row.
        threading.Thread(target=work, daemon=True).start()
        return await result

    async def _await_agent(self, arguments: dict[str, Any]) -> Any:
        try:
            with guarded_call(os.getpid()):
                return await self.call(**arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _exit_as_error(error) from error

    def _column_arguments(self, place: int) -> dict[str, Any]:
        """Return the arguments of an agent that are values of columns.

        `place` is the index of the agent's row in the batch.
        """
        batch = self.batch
        row = place // (len(self.batch.rows) // len(self.batch.batch.rows))
        arguments = {}
        for parameter, name in self.bound:
            element = self.plan.graph.column(name).element
            text = parameter in self.signature.text
            column = batch.batch.columns[name]
            rows = range(row, row + 1)
            arguments[parameter] = values_for_function(
                column, element, rows, text, self.tokens.get(name) if text else None
            )[0]
        return arguments

    def _injected_arguments(self, row: OpenRow, place: int) -> dict[str, Any]:
        """Return the arguments of an agent that are not values of columns or options.

        These arguments are the base URL, API key and model name of the endpoint, and the arguments that every user's
        function may have, such as `rng`.
        """
        endpoint_values = dict(zip(ENDPOINT, (self.endpoint.base_url, row.api_key, self.model), strict=True))
        values = {name: endpoint_values[name] for name in self.signature.fills if name in endpoint_values}
        return values | self.filled(self.batch.task, self.batch.iteration, int(self.batch.rows[place]))

    def _store_result(self, place: int, conversations: Conversations, result: Any) -> None:
        """Store the response of an agent's row, and the column values of the row.

        `place` is the index of the row in the batch. `result` has the column values, as the agent's function returned
        them. Raises BadResult if there is no response, or if a value does not fit its column.
        """
        last = conversations.last
        if last is None:
            raise BadResult(self._explain_missing_response(conversations))
        spoken = conversations.make_response(last, self.attributes.conversations)
        if len(self.columns) == 1:
            result = (result,)
        elif not self.columns:
            result = ()
        if not isinstance(result, tuple) or len(result) != len(self.columns):
            belongs = f"a tuple of {len(self.columns)} belongs: {', '.join(self.columns)}"
            raise BadResult(f"it returned {describe_briefly(result)}, where {belongs}")
        lengths = {self.response: len(spoken.tokens)}
        values = zip(self.columns, result, strict=True)
        self.values[place] = tuple(self.returned.check(name, value, lengths) for name, value in values)
        self.spoken[place] = spoken
        answers, tokens = conversations.count_left_out(spoken)
        self.answers += len(conversations.answers)
        amounts = (answers, tokens, conversations.strayed, int(spoken.begins.sum()))
        for name, amount in zip(self.figures, amounts, strict=True):
            self.figures[name] += amount

    def _explain_missing_response(self, conversations: Conversations) -> str:
        """Explain why an agent has no response."""
        if not any(answer.received for answer in conversations.answers):
            return "it got no answer from the policy, and a row needs one"
        first = conversations.answers[0]
        context = conversations.context
        begins, belongs = (self.speech.decode(tokens[:40], special=True) for tokens in (first.prefix, context))
        return (
            f"its requests begin with {begins!r}, but the row's own prompt is {belongs!r}: let `{self.node.name}` "
            "read the prompt as text, or send what the template makes of it"
        )

    def _finish(self) -> AgentsFinished:
        nothing = AgentResponse(NOTHING, NOTHING.astype(np.float32), NOTHING.astype(np.bool_), NOTHING.astype(np.bool_))
        row_responses = [row_response or nothing for row_response in self.spoken]
        response = (
            ragged([row_response.tokens for row_response in row_responses], np.int32),
            ragged([row_response.logps for row_response in row_responses], np.float32),
            ragged([row_response.mask for row_response in row_responses], np.bool_),
            ragged([row_response.begins for row_response in row_responses], np.bool_),
        )
        remarks = []
        if self.endpoint.left_out:
            names = ", ".join(f"`{name}`" for name in self.endpoint.left_out)
            remarks = [
                f"agents of `{self.node.name}` set {names}, which is ignored: the program says how tokens are drawn"
            ]
            self.endpoint.left_out.clear()
        values = {
            name: [row_values[i] if row_values else None for row_values in self.values]
            for i, name in enumerate(self.columns)
        }
        return AgentsFinished(
            response,
            [row_response.last for row_response in row_responses],
            values,
            self.failed,
            self.answers,
            self.figures,
            remarks,
        )


def _exit_as_error(error: BaseException) -> Exception:
    """Convert an exit in an agent's code to an error that fails only the agent's row.

    The exit itself would end the event loop, and with it the agents of all rows.
    """
    return RuntimeError(repr(error)).with_traceback(error.__traceback__)


def interface_address(name: str) -> str:
    """Return the IPv4 address of the network interface `name` of this host.

    Returns `name` itself if this host has no such interface.
    """
    addresses = psutil.net_if_addrs().get(name, [])
    return next((str(entry.address) for entry in addresses if entry.family == socket.AF_INET), name)
