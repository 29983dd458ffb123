"""A function that is `async def`, called for many units at once in one event loop.

Invariant: what is made of the units comes in their order. The loop lives as long as the process, so that what a user's
file keeps between calls, as a client of a server, may belong to it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator, Iterable, Sequence

from ...ir.at_once import WAITING
from ..process.report import RunError
from ..process.task import Task
from .blame import blame
from .note import ProcessDied
from .own_process import guard_exit
from .units import Failed, Made, Unit, UnitFunction


class SideBySide:
    def __init__(self, function: UnitFunction) -> None:
        guard_exit()  # first: the file may have a name of its own for what it takes from `os`
        self.function, self.loop = function, asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close)

    def made(self, units: Iterable[Unit], task: Task) -> Generator[tuple[Unit, Made | Failed]]:
        """What is made of each unit. RunError where a process died in these calls and it is not known in which."""
        all_ = [*units]
        node, where = self.function.node, f"one of {len(all_)} calls under way"
        try:
            with self.function.note.at(f"{node.name}: {where} of {task.key}"):
                yield from self._made(all_, task)
        except ProcessDied as died:
            raise RunError(blame(node, died, f"{where} of iteration {task.number}")) from died

    def _made(self, all_: Sequence[Unit], task: Task) -> Generator[tuple[Unit, Made | Failed]]:
        free = asyncio.Semaphore(WAITING)

        async def one(unit: Unit) -> Made | Failed:
            async with free:
                return await self.function.awaited(unit, task)

        calls = [self.loop.create_task(one(unit)) for unit in all_]
        try:
            for unit, call in zip(all_, calls, strict=True):
                yield unit, self.loop.run_until_complete(call)
        finally:
            for call in calls:
                call.cancel()
            self.loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
