"""What all sides of bench/dock.py have in common: the graph, its rows, and how the bench speaks to them.

Invariant: every side moves the same rows of the same columns. A row's first element says which row of which column it
is, and who reads it looks. A side is a process on the first host, under the Python of its package; it reads lines of
"number compute" and answers each with a line of JSON. Nothing here needs a package besides numpy and Ray.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

COLUMNS = ("response", "response.logp", "old_logp", "ref_logp", "advantage")  # each row as long as its response
# What each node of the graph reads of a sample, and writes. `reward` is a number a row.
NODES = {
    "actor.generate": ((), ("response", "response.logp")),
    "actor.infer": (("response", "response.logp"), ("old_logp",)),
    "reference.infer": (("response",), ("ref_logp",)),
    "host.reward": (("response",), ("reward", "advantage")),
    "actor.update": (COLUMNS, ()),
}
Times = tuple[float, float]  # start and end


@dataclass(frozen=True)
class Setup:
    """What a side is asked for: its `name`, its hosts' addresses, samples of a host, and how long a sample is."""

    name: str
    hosts: tuple[str, ...]
    samples: int
    length: int
    lengths: tuple[int, ...] = ()  # of all rows; () where they are all alike

    @property
    def own(self) -> list[Any]:
        """By host the rows that it generates."""
        return [np.arange(self.samples * h, self.samples * (h + 1)) for h in range(len(self.hosts))]

    @property
    def strided(self) -> list[Any]:
        """By host the rows that it reads from a buffer that knows of no host: whatever comes next."""
        return [np.arange(h, self.samples * len(self.hosts), len(self.hosts)) for h in range(len(self.hosts))]


class Side(ABC):
    """A way for rows between the nodes of the graph."""

    @abstractmethod
    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        """One iteration, in which every worker computes for so many seconds; at least its `seconds`."""

    def close(self) -> None:  # noqa: B027
        """Ends what does not end with this process."""


class Rows:
    """The rows that a worker makes. They are there before anybody asks, but for their marks: what a computation would
    take is no part of what is measured."""

    def __init__(self, seed: int, samples: int, length: int) -> None:
        chance = np.random.default_rng(seed)
        self.values = {c: chance.random((samples, length), np.float32) for c in COLUMNS}

    def made(self, rows: Any, columns: Sequence[str]) -> dict[str, Any]:
        """New until the next iteration makes this column."""
        return {c: self._column(rows, c) for c in columns}

    def _column(self, rows: Any, column: str) -> Any:
        if column == "reward":
            return np.zeros(len(rows), np.float32)
        values = self.values[column][: len(rows)]
        values[:, 0] = marks(rows, column)
        return values


def marks(rows: Any, column: str) -> Any:
    """The first element of each of these rows."""
    return np.asarray(rows) * 8 + COLUMNS.index(column)


def check(rows: Any, columns: dict[str, Any]) -> None:
    """That these are those rows; by column their first elements."""
    for name, first in columns.items():
        if not np.array_equal(np.asarray(first, np.float64), marks(rows, name)):
            raise ValueError(f"{name}: rows are not what was written")


def spent(times: Sequence[Times]) -> float:
    """From the first worker's start to the last one's end."""
    return max(end for _, end in times) - min(start for start, _ in times)


def on(address: str) -> dict[str, Any]:
    """Options of an actor on the host of an address; it takes no processor from Ray's account."""
    node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address)
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def pids(actors: Sequence[Any]) -> list[int]:
    """The processes of actors."""
    found: list[int] = ray.get([a.__ray_call__.remote(lambda _: os.getpid()) for a in actors])
    return found


def memory(pids: Sequence[int]) -> float:
    """Bytes of memory that these processes have to themselves."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1]) * 1024
    return total


def serve(make: Callable[[Setup], Side], **environment: str) -> None:
    """Answers the bench until it closes the pipe; workers get this `environment`. What packages print goes to
    stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    setup = Setup(**{k: tuple(v) if isinstance(v, list) else v for k, v in asked.items()})
    told = {name: value for name, value in os.environ.items() if name.startswith("MSRL_BENCH")}
    # Workers run under this Python, whatever the cluster was started by.
    runtime = {"py_executable": sys.executable, "env_vars": environment | told}
    ray.init(address="auto", log_to_driver=False, logging_level="error", namespace=setup.name, runtime_env=runtime)
    side = make(setup)
    answers.write("{}\n")
    for line in sys.stdin:
        number, compute = line.split()
        answers.write(json.dumps(side.iteration(int(number), float(compute))) + "\n")
    side.close()
