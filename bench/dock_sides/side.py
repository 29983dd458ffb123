"""Common parts of all sides of bench/dock.py: graph, rows and protocol.

Invariant: every side moves the same rows of the same columns. A row's first element identifies the row and column, and
its reader checks it. A side is a process on the first host, under the Python of its package; it reads lines of "number
compute" and answers each with a line of JSON. This module needs no packages except numpy and Ray.
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

COLUMNS = ("response", "response.logp", "old_logp", "ref_logp", "advantage")  # each row is as long as its response
# What each node of the graph reads and writes of a sample. `reward` is one number per row.
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
    """Parameters of a side: name, hosts, samples per host, length of a sample."""

    name: str
    hosts: tuple[str, ...]
    samples: int
    length: int
    lengths: tuple[int, ...] = ()  # of all rows; () if they are all equal

    @property
    def own(self) -> list[Any]:
        """The rows that each host generates."""
        return [np.arange(self.samples * host, self.samples * (host + 1)) for host in range(len(self.hosts))]

    @property
    def strided(self) -> list[Any]:
        """The rows that each host reads from a buffer that ignores hosts: every n-th row."""
        return [np.arange(host, self.samples * len(self.hosts), len(self.hosts)) for host in range(len(self.hosts))]


class Side(ABC):
    """A system that moves rows between the nodes of the graph."""

    @abstractmethod
    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        """Run one iteration in which every worker computes for `compute` seconds.

        Returns at least its `seconds`.
        """

    def close(self) -> None:  # noqa: B027
        """End what does not end with this process."""


class Rows:
    """The rows that a worker makes.

    They are prepared in advance, except for their marks: a computation is not part of the measurement.
    """

    def __init__(self, seed: int, samples: int, length: int) -> None:
        chance = np.random.default_rng(seed)
        self.values = {column: chance.random((samples, length), np.float32) for column in COLUMNS}

    def make_columns(self, rows: Any, columns: Sequence[str]) -> dict[str, Any]:
        """Return columns of rows; they are valid until the next iteration."""
        return {column: self._column(rows, column) for column in columns}

    def _column(self, rows: Any, column: str) -> Any:
        if column == "reward":
            return np.zeros(len(rows), np.float32)
        values = self.values[column][: len(rows)]
        values[:, 0] = marks(rows, column)
        return values


def marks(rows: Any, column: str) -> Any:
    """Return the first element of each of these rows."""
    return np.asarray(rows) * 8 + COLUMNS.index(column)


def check(rows: Any, columns: dict[str, Any]) -> None:
    """Check that these are the right rows, by the first elements of each column."""
    for name, first in columns.items():
        if not np.array_equal(np.asarray(first, np.float64), marks(rows, name)):
            raise ValueError(f"{name}: rows are not what was written")


def elapsed(times: Sequence[Times]) -> float:
    """Return the seconds from the first worker's start to the last one's end."""
    return max(end for _, end in times) - min(start for start, _ in times)


def actor_options(address: str) -> dict[str, Any]:
    """Return the options of an actor on a host; it uses no processor of Ray's account."""
    node = next(info["NodeID"] for info in ray.nodes() if info["Alive"] and info["NodeManagerAddress"] == address)
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def pids(actors: Sequence[Any]) -> list[int]:
    """Return the process ids of actors."""
    process_ids: list[int] = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])
    return process_ids


def memory(pids: Sequence[int]) -> float:
    """Return the private memory of these processes, in bytes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1]) * 1024
    return total


def serve(make: Callable[[Setup], Side], **environment: str) -> None:
    """Answer the bench until it closes the pipe.

    Workers get this `environment`. Output of packages goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    setup = Setup(
        **{key: tuple(argument) if isinstance(argument, list) else argument for key, argument in arguments.items()}
    )
    inherited = {name: value for name, value in os.environ.items() if name.startswith("MSRL_BENCH")}
    # Workers run under this Python, whatever Python started the cluster.
    runtime = {"py_executable": sys.executable, "env_vars": environment | inherited}
    ray.init(address="auto", log_to_driver=False, logging_level="error", namespace=setup.name, runtime_env=runtime)
    side = make(setup)
    answers.write("{}\n")
    for line in sys.stdin:
        number, compute = line.split()
        answers.write(json.dumps(side.iteration(int(number), float(compute))) + "\n")
    side.close()
