"""Snapshots of a host's dock, for showing the progress of a run.

Invariant: this module keeps no counters. Every figure is computed on request from data that the dock has for its own
work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import psutil

from .controller import Controller
from .messages import DockSnapshot, ProcessStatus
from .warehouse import Warehouse


def take_snapshot(
    process: str,
    host: int,
    controllers: Mapping[str, Controller],
    warehouse: Warehouse | None,
    statuses: Mapping[str, ProcessStatus],
) -> DockSnapshot:
    """Return a snapshot: the row counts of a dock, and the memory use of its host."""
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for node, controller in controllers.items():
        for key in controller.states:
            rows.setdefault(key, {})[node] = controller.count_rows(key)
    done = {key: warehouse.written(key) for key in warehouse.tasks} if warehouse else {}
    for status in statuses.values():
        for node, row_count in status.done.items():
            rows_done = done.setdefault(status.key, {})
            rows_done[node] = rows_done.get(node, 0) + row_count
    memory = {process: os.getpid(), **{name: status.pid for name, status in statuses.items() if status.pid}}
    host_memory = psutil.virtual_memory()
    return DockSnapshot(
        host,
        rows,
        done,
        warehouse.segments.room.stored_bytes() if warehouse else None,
        {name: size for name, pid in memory.items() if (size := _resident_size(pid))},
        host_memory.total - host_memory.available,
        host_memory.total,
        os.getpid(),
    )


def _resident_size(pid: int) -> int:
    with suppress(psutil.Error):  # it has died
        resident_bytes: int = psutil.Process(pid).memory_info().rss
        return resident_bytes
    return 0
