"""The instances of a user's environment, called side by side.

Invariant: an instance is asked one thing at a time. A call that raises, takes too long or gives what does not belong
there comes back as a value, a Failure; whoever asks decides what becomes of its row.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .blame import BadResult, Told
from .values import Filled, brief

Reason = Literal["raised", "timeout", "rubbish", "exited", "memory"]


@dataclass(frozen=True)
class Failure:
    """Why a row has no answer."""

    reason: Reason
    told: Told

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kinds: dict[type[BaseException], Reason] = {BadResult: "rubbish", MemoryError: "memory"}
        return cls(next((r for kind, r in kinds.items() if isinstance(error, kind)), "raised"), Told.of(error))


@dataclass(frozen=True)
class Answer:
    """What an environment says, the values of its columns as of now, and whether the episode is over."""

    said: str
    values: tuple[Any, ...] = ()
    over: bool = False


@dataclass(frozen=True)
class Reset:
    """The beginning of a row's episode, and the columns that it is given."""

    iteration: int
    row: int
    given: Mapping[str, Any]


Ask = Reset | str  # a beginning, or the text that the policy wrote


class Instances:
    """Of some rows, which are called by their positions. `make` is the class, `columns` are those whose values a step
    returns; `at_once` so many are asked side by side."""

    def __init__(
        self, make: Callable[[], Any], filled: Filled, columns: tuple[str, ...], timeout: float, at_once: int
    ) -> None:
        self.make, self.filled, self.columns, self.timeout = make, filled, columns, timeout
        self.threads, self.turn = ThreadPoolExecutor(at_once, "environment"), asyncio.Semaphore(at_once)
        self.made: dict[int, Any] = {}

    async def answers(self, asked: Mapping[int, Ask], stops: bool) -> dict[int, Answer | Failure]:
        """What each says; where a failure `stops` the others, only those up to the first of them."""
        tasks = {position: asyncio.create_task(self._answer(position, ask)) for position, ask in asked.items()}
        found: dict[int, Answer | Failure] = {}
        for position, task in tasks.items():
            found[position] = await task
            if stops and isinstance(found[position], Failure):
                for other in tasks.values():
                    other.cancel()
                break
        return found

    async def _answer(self, position: int, ask: Ask) -> Answer | Failure:
        async with self.turn:
            try:
                if isinstance(ask, Reset):
                    return Answer(_said(await self._timed(self._reset, position, ask)))
                return self._stepped(await self._timed(self.made[position].step, ask))
            except _Late as late:
                return Failure("timeout", Told.of(TimeoutError(str(late))))
            except (Exception, SystemExit) as error:
                return Failure.of(error)

    async def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the user's gives; a plain one has a thread meanwhile."""
        doing = asyncio.get_running_loop().run_in_executor(self.threads, _caught, call, *arguments)
        await asyncio.wait({doing}, timeout=None if self.timeout == math.inf else self.timeout)
        if not doing.done():
            doing.cancel()
            raise _Late(f"it takes longer than {self.timeout:g} s, its `timeout`")
        found = doing.result()
        if isinstance(found, _Raised):
            raise found.error
        return found

    def _reset(self, position: int, ask: Reset) -> Any:
        self.made[position] = self.make()
        return self.made[position].reset(**ask.given, **self.filled(ask.iteration, ask.row))

    def _stepped(self, found: Any) -> Answer:
        if not isinstance(found, tuple) or len(found) != len(self.columns) + 2:
            belongs = ", ".join(("what it says", *self.columns, "whether the episode is over"))
            raise BadResult(
                f"`step` returned {brief(found)}, where a tuple of {len(self.columns) + 2} belongs: {belongs}"
            )
        said, *values, over = found
        if not isinstance(over, bool | np.bool_):
            raise BadResult(
                f"`step` returned {brief(over)} at the end, where true or false belongs: whether the episode is over"
            )
        return Answer(_said(said), tuple(values), bool(over))


class _Late(Exception):
    """A call has had its time."""


class Loop:
    """Instances in this process, beside its own work: a thread of it runs their loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="environments", daemon=True).start()

    def answers(self, instances: Instances, asked: Mapping[int, Ask], stops: bool) -> dict[int, Answer | Failure]:
        return asyncio.run_coroutine_threadsafe(instances.answers(asked, stops), self.loop).result()


@dataclass(frozen=True)
class _Raised:
    """An error on its way from a thread: an exit would end the loop that hears of it."""

    error: BaseException


def _caught(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except BaseException as error:
        return _Raised(error)


def _said(value: Any) -> str:
    """What an environment says; None is nothing."""
    if value is not None and not isinstance(value, str):
        raise BadResult(f"it returned {brief(value)}, where the text belongs that it says, or none")
    return value or ""


__all__ = ["Answer", "Ask", "Failure", "Instances", "Loop", "Reset"]
