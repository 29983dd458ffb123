"""Concurrent calls of an `async def` function for many units, in one event loop.

Invariant: results are returned in the order of the units. The event loop lives until the process ends. So the user's
code can keep an object that belongs to the loop, such as an HTTP client, and use it in later calls.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator, Iterable, Sequence

from ...analysis.concurrency import MAX_ASYNC_CALLS
from ..process.task import Task
from ..process.task_report import RunError
from .crash_journal import ProcessDied
from .own_process import guard_exit
from .units import Unit, UnitFunction, UnitOutcome
from .user_traceback import describe_failure


class AsyncCaller:
    """A caller of an `async def` function, with an event loop of its own."""

    def __init__(self, function: UnitFunction) -> None:
        guard_exit()  # before the import of the user's file, which may copy functions of `os` under other names
        self.function = function
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close)

    def map_units(self, units: Iterable[Unit], task: Task) -> Generator[tuple[Unit, UnitOutcome]]:
        """Yield each unit with the outcome of its call, in the order of the units.

        All calls are in progress at the same time. So the crash journal (crash_journal.py) has one entry for all of
        them. If a process died during these calls, the journal does not show which call was the cause. In this case,
        none of the calls is repeated, and the method raises RunError.
        """
        all_units = [*units]
        node = self.function.node
        where = f"one of {len(all_units)} calls in progress"
        try:
            with self.function.note.record_call(f"{node.name}: {where} of {task.key}"):
                yield from self._map(all_units, task)
        except ProcessDied as died:
            raise RunError(describe_failure(node, died, f"{where} of iteration {task.number}")) from died

    def _map(self, units: Sequence[Unit], task: Task) -> Generator[tuple[Unit, UnitOutcome]]:
        slots = asyncio.Semaphore(MAX_ASYNC_CALLS)

        async def call(unit: Unit) -> UnitOutcome:
            async with slots:
                return await self.function.call_async(unit, task)

        calls = [self.loop.create_task(call(unit)) for unit in units]
        try:
            for unit, outcome in zip(units, calls, strict=True):
                yield unit, self.loop.run_until_complete(outcome)
        finally:
            for outcome in calls:
                outcome.cancel()
            self.loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
