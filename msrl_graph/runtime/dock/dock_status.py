"""What the dock of a host tells those who watch a run.

Invariant: nothing is counted or kept for it beside what the dock has anyway; it is worked out when somebody asks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import psutil

from .controller import Controller
from .messages import DockSnapshot, ProcessStatus
from .warehouse import Warehouse


def look(
    process: str,
    host: int,
    controllers: Mapping[str, Controller],
    warehouse: Warehouse | None,
    said: Mapping[str, ProcessStatus],
) -> DockSnapshot:
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for node, controller in controllers.items():
        for key in controller.books:
            rows.setdefault(key, {})[node] = controller.counts(key)
    done = {key: warehouse.written(key) for key in warehouse.tasks} if warehouse else {}
    for told in said.values():
        for node, number in told.done.items():
            of = done.setdefault(told.key, {})
            of[node] = of.get(node, 0) + number
    memory = {process: os.getpid(), **{name: told.pid for name, told in said.items() if told.pid}}
    here = psutil.virtual_memory()
    return DockSnapshot(
        host,
        rows,
        done,
        warehouse.segments.room.held() if warehouse else None,
        {name: size for name, pid in memory.items() if (size := _resident(pid))},
        here.total - here.available,
        here.total,
        os.getpid(),
    )


def _resident(pid: int) -> int:
    with suppress(psutil.Error):  # it has died
        found: int = psutil.Process(pid).memory_info().rss
        return found
    return 0
