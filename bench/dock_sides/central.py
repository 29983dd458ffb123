"""A central buffer: all rows of all columns in one Ray actor on the first host.

Columns are stored as arrays of rows.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import ray
from side import NODES, Rows, Setup, Side, Times, actor_options, check, elapsed, serve


@ray.remote(max_concurrency=64)
class Center:
    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[Any, Any]]] = {}
        self.news = threading.Condition()

    def put(self, rows: Any, columns: dict[str, Any]) -> None:
        with self.news:
            for name, values in columns.items():
                self.rows.setdefault(name, []).append((rows, values))
            self.news.notify_all()

    def get(self, name: str, rows: Any) -> Any:
        """Return a column of these rows, once all of them are present."""
        with self.news:
            self.news.wait_for(lambda: self._is_present(name, rows))
            parts = [*self.rows[name]]
        column = np.empty((len(rows), *parts[0][1].shape[1:]), parts[0][1].dtype)
        for numbers, values in parts:
            _, positions, here = np.intersect1d(rows, numbers, assume_unique=True, return_indices=True)
            column[positions] = values[here]
        return column

    def _is_present(self, name: str, rows: Any) -> bool:
        parts = self.rows.get(name, [])
        return bool(parts) and bool(np.isin(rows, np.concatenate([numbers for numbers, _ in parts])).all())

    def clear(self) -> None:
        self.rows = {}


@ray.remote
class Worker:
    """All nodes of the graph on one host."""

    def __init__(self, host: int, samples: int, length: int, center: Any) -> None:
        self.rows = Rows(host, samples, length)
        self.center = center
        first, *middle, last = NODES
        turn = host % len(middle)  # if all hosts do the same at a time, the link is idle between two nodes
        self.nodes = (first, *middle[turn:], *middle[:turn], last)

    def ready(self) -> None:
        pass

    def run(self, own: Any, strided: Any, compute: float) -> Times:
        start = time.perf_counter()
        puts = []
        for node in self.nodes:
            reads, writes = NODES[node]
            rows = strided if reads else own
            # One column at a time, so that the link is busy while the last column is being written.
            values = ray.get([self.center.get.remote(column, rows) for column in reads])
            check(rows, {column: value[:, 0] for column, value in zip(reads, values, strict=True)})
            time.sleep(compute / len(NODES))
            if writes:
                puts.append(
                    self.center.put.remote(rows, self.rows.make_columns(rows, writes))
                )  # in progress while the worker continues
        ray.get(puts)
        return start, time.perf_counter()


class Central(Side):
    def __init__(self, setup: Setup) -> None:
        kinds: Any = (Center, Worker)
        self.setup = setup
        self.center = kinds[0].options(**actor_options(setup.hosts[0])).remote()
        self.workers = [
            kinds[1].options(**actor_options(address)).remote(host, setup.samples, setup.length, self.center)
            for host, address in enumerate(setup.hosts)
        ]
        ray.get([worker.ready.remote() for worker in self.workers])

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        parts = zip(self.workers, self.setup.own, self.setup.strided, strict=True)
        times = ray.get([worker.run.remote(own, strided, compute) for worker, own, strided in parts])
        ray.get(self.center.clear.remote())
        return {"seconds": elapsed(times)}


if __name__ == "__main__":
    serve(Central)
