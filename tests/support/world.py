"""A Ray without processes: actors, calls and waits, one step at a time, in an order that is drawn.

Invariant: one thread moves at a time, and which one, or which message arrives next, `random` draws; messages between
two processes keep their order. Time is what processes say they take: it goes on when nobody else can move. Where nobody
can, and nobody takes time, and the run has not ended, it is `Stuck`.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import ray as real_ray

from msrl_graph.runtime.dock.methods import DOCK_METHODS

CALLER: ContextVar[str] = ContextVar("caller", default="")


class Stuck(Exception):
    """Nobody can move: who waits for what."""


class Over(BaseException):
    """Unwinds a thread whose run has ended."""


class Ref:
    """The result of a call that is on its way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done = False
        self.waiting = list[asyncio.Future[None]]()
        self.value: Any = None
        self.error: BaseException | None = None

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        self.done = True
        for future in self.waiting:
            future.set_result(None)

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def result(self) -> Any:
        self.world.block(lambda: self.done)
        return self.get()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done:
            self.waiting.append(self.world.loop.create_future())
            yield from self.waiting[-1].__await__()
        return self.get()


class Strand:
    """A process that does one call after another: a thread that moves when the world lets it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.calls: deque[tuple[Ref, Callable[..., Any], tuple[Any, ...]]] = deque()
        self.until: Callable[[], bool] = lambda: bool(self.calls)
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()
        world.strands.append(self)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Ref:
        self.calls.append((ref := Ref(self.world), call, arguments))
        return ref

    def step(self) -> None:
        self.world.moving = self
        self.go.release()
        self.world.back.acquire()

    def wait(self, until: Callable[[], bool]) -> None:
        self.until = until
        self.world.back.release()
        self.go.acquire()
        if self.world.over:
            raise Over

    def _live(self) -> None:
        CALLER.set(self.name)
        self.go.acquire()
        try:
            while not self.world.over:
                ref, call, arguments = self.calls.popleft()
                try:
                    ref.settle(call(*arguments))
                except Exception as error:
                    ref.settle(error=error)
                self.wait(lambda: bool(self.calls))
        except Over:
            pass
        finally:
            self.world.back.release()


class Method:
    """An actor's, as Ray gives it."""

    def __init__(self, world: World, actor: str, name: str) -> None:
        self.world = world
        self.actor = actor
        self.name = name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Ref:
        ref = Ref(self.world)
        self.world.lines[CALLER.get(), self.actor].append((ref, self.name, arguments))
        return ref


class Handle:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def __getattr__(self, method: str) -> Method:
        return Method(self._world, self._name, method)


class World:
    """Stands in for the module `ray`."""

    exceptions = real_ray.exceptions

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.over = False
        self.strands: list[Strand] = []
        self.moving: Strand | None = None
        self.back = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda *_: None)  # tasks that never end, where nobody can move
        self.lines: dict[tuple[str, str], deque[tuple[Ref, str, tuple[Any, ...]]]] = defaultdict(
            deque
        )  # by sender and receiver
        self.actors: dict[str, tuple[Any, Strand | None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.met: Counter[Any] = Counter()
        self.steps = 0
        self.now = 0.0
        self.alarms: set[float] = set()

    # What processes call.

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        return [r.result() for r in refs] if isinstance(refs, list) else refs.result()

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        self.block(lambda: any(r.done for r in refs))
        done = self.random.choice([r for r in refs if r.done])
        return [done], [r for r in refs if r is not done]

    def get_actor(self, name: str) -> Handle:
        return Handle(self, name)

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(was_current_actor_reconstructed=False)

    def block(self, until: Callable[[], bool]) -> None:
        """Lets others move, until it holds."""
        assert self.moving is not None
        self.moving.wait(until)

    def take(self, seconds: float) -> None:
        """Lets so much time go by, for who calls."""
        until = self.now + seconds
        self.alarms.add(until)
        self.block(lambda: self.now >= until)

    def meet(self, what: Any, members: int, times: Counter[Any]) -> None:
        """A collective of so many processes, each of which counts its own `times`."""
        times[what] += 1
        meeting = (what, times[what])
        self.met[meeting] += 1
        self.block(lambda: self.met[meeting] >= members)

    # How they move.

    def actor(self, name: str, made: Any) -> Handle:
        alone = any(inspect.iscoroutinefunction(m) for _, m in inspect.getmembers(type(made), inspect.isfunction))
        self.actors[name] = made, None if alone else Strand(self, name)
        return Handle(self, name)

    def run(self, main: Callable[[], Any], words: Callable[[], str]) -> Any:
        ref = Strand(self, "driver").submit(main)
        while not ref.done:
            moves: list[Callable[[], None]] = [s.step for s in self.strands if s.until()]
            moves += [
                lambda line=line, pair=pair: self._deliver(pair, line) for pair, line in self.lines.items() if line
            ]  # type: ignore[misc]
            # asyncio says nowhere else whether something can go on at once
            if self.loop._ready:  # type: ignore[attr-defined]
                moves.append(self._turn)
            if not moves:
                self.alarms = {a for a in self.alarms if a > self.now}
                if not self.alarms:
                    raise Stuck(words())
                self.now = min(self.alarms)
                continue
            self.random.choice(moves)()
            self.steps += 1
        return ref.get()

    def _deliver(self, pair: tuple[str, str], line: deque[tuple[Ref, str, tuple[Any, ...]]]) -> None:
        ref, called, arguments = line.popleft()
        made, strand = self.actors[pair[1]]
        name = DOCK_METHODS.methods[called].name if called in DOCK_METHODS.methods else called
        if strand is None:
            task = self.loop.create_task(self._called(pair[1], ref, getattr(made, name), arguments))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            strand.calls.append((ref, getattr(made, name), arguments))

    async def _called(self, actor: str, ref: Ref, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        CALLER.set(actor)
        try:
            ref.settle(await method(*arguments))
        except Exception as error:
            ref.settle(error=error)

    def _turn(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def close(self) -> None:
        self.over = True
        for strand in self.strands:
            strand.go.release()
        for strand in self.strands:
            strand.thread.join(10)
        for task in self.tasks:
            task.cancel()
        for _ in range(50):  # not until all have ended: one may want a lock of another that waits for a message
            self._turn()
        for task in self.tasks:
            # Else a garbage collection closes them, at any time. Python 3.11 parses code to write the traceback of what
            # is raised then, and a parser that is interrupted by another one fails.
            with suppress(RuntimeError):
                task.get_coro().close()
        self.loop.close()
