"""A central buffer: all rows of all columns in one Ray actor on the first host, as arrays of rows."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import ray
from side import NODES, Rows, Setup, Side, Times, check, on, serve, spent


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
        """A column of those rows, once all of them are there."""
        with self.news:
            self.news.wait_for(lambda: self._there(name, rows))
            parts = [*self.rows[name]]
        found = np.empty((len(rows), *parts[0][1].shape[1:]), parts[0][1].dtype)
        for n, values in parts:
            _, there, here = np.intersect1d(rows, n, assume_unique=True, return_indices=True)
            found[there] = values[here]
        return found

    def _there(self, name: str, rows: Any) -> bool:
        parts = self.rows.get(name, [])
        return bool(parts) and bool(np.isin(rows, np.concatenate([n for n, _ in parts])).all())

    def clear(self) -> None:
        self.rows = {}


@ray.remote
class Worker:
    """All nodes of the graph on one host."""

    def __init__(self, host: int, samples: int, length: int, center: Any) -> None:
        self.rows = Rows(host, samples, length)
        self.center = center
        first, *middle, last = NODES
        turn = host % len(middle)  # hosts that all do the same at a time leave the link idle between two nodes
        self.nodes = (first, *middle[turn:], *middle[:turn], last)

    def ready(self) -> None:
        pass

    def run(self, own: Any, strided: Any, compute: float) -> Times:
        start = time.perf_counter()
        puts = []
        for node in self.nodes:
            reads, writes = NODES[node]
            rows = strided if reads else own
            # A column at a time: the link has something to do while the last of them is being written.
            found = ray.get([self.center.get.remote(c, rows) for c in reads])
            check(rows, {c: v[:, 0] for c, v in zip(reads, found, strict=True)})
            time.sleep(compute / len(NODES))
            if writes:
                puts.append(self.center.put.remote(rows, self.rows.made(rows, writes)))  # under way while it goes on
        ray.get(puts)
        return start, time.perf_counter()


class Central(Side):
    def __init__(self, setup: Setup) -> None:
        kinds: Any = (Center, Worker)
        self.setup = setup
        self.center = kinds[0].options(**on(setup.hosts[0])).remote()
        self.workers = [
            kinds[1].options(**on(address)).remote(h, setup.samples, setup.length, self.center)
            for h, address in enumerate(setup.hosts)
        ]
        ray.get([w.ready.remote() for w in self.workers])

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        parts = zip(self.workers, self.setup.own, self.setup.strided, strict=True)
        times = ray.get([w.run.remote(own, strided, compute) for w, own, strided in parts])
        ray.get(self.center.clear.remote())
        return {"seconds": spent(times)}


if __name__ == "__main__":
    serve(Central)
