"""What is told where an engine fails on a rank.

Invariant: the first line has the node and its line in the program, the engine, the rank, the task and the rows that it
computed, and what the engine said, cut to what fits a screen; the log of the rank has all of it. What memory was asked
for in vain is told beside what the plan counts, with what needs less; a model that an engine cannot be built with,
with the engines that may take it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import ray
import torch
from torch import distributed as dist

from ...backends import ENGINES, runs
from ...cost.holdings import gigabytes
from ...diagnostics import Fault
from ...ir.graph import Node
from ...ir.plan import Plan
from ..process import log
from ..process.task_report import RankFailed, RunError

BUILT = "as it was built"
MOST = 400  # characters of an engine's words that the message shows
# How torch, numpy and the C++ library say that there is no memory, on any device.
NO_MEMORY = re.compile(r"(can't|cannot|unable to|tried to) allocate|out of memory|bad_alloc", re.IGNORECASE)
WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# What raises when another process of a collective has died lies here, or is called from here.
COLLECTIVES = ("/torch/distributed/", "/torch/autograd/")


@contextmanager
def telling(plan: Plan, node: Node, rank: int, doing: str, rows: Sequence[int] | np.ndarray = ()) -> Iterator[None]:
    """Makes of what an engine raises within a message for the user; what is one already stays. `doing` ends a sentence,
    as "in train/1"."""
    try:
        yield
    except (RunError, Fault, ray.exceptions.RayError):
        raise
    except Exception as error:
        of = f" on {_rows(rows)}" if len(rows) else ""
        engine = plan.placement(node.name).engine.name
        head = f"`{node.name}` ({node.span.place}), engine {engine}, failed on rank {rank} {doing}{of}"
        log.whole(head, *traceback.format_exception(error))
        lines = [f"{head}: {_said(error)}"]
        if no_memory := _no_memory(error):
            lines = [f"{head}: {_wanted(error)}", *_counted(plan, node)]
        elif doing == BUILT:
            lines += _others(plan, node)
        if log.file():
            lines.append(f"all of it is in logs/{log.file()}")
        joint = isinstance(error, RuntimeError) and not no_memory and _joint(error)
        raise RankFailed("\n  ".join(lines), joint) from error


def _others(plan: Plan, node: Node) -> list[str]:
    """The engines that could stand in an engine's place."""
    name = plan.placement(node.name).engine.name
    able = [e.name for e in ENGINES.values() if e.name != name and node.verb in e.verbs and runs(e.name)]
    family = plan.model(node.name).family
    able = [f"`engine {node.name} = {e}`" for e in able if family in ENGINES[e].families]
    return [f"where {name} cannot take the model of {node.worker}, name another engine: {' or '.join(able)}"] * bool(
        able
    )


def _rows(rows: Sequence[int] | np.ndarray) -> str:
    first = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"row {first}" if len(rows) == 1 else f"{len(rows)} rows ({first})"


def _said(error: BaseException) -> str:
    """The kind of an error and what it says, in one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def _no_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))
    )


def _wanted(error: BaseException) -> str:
    if found := WANTED.search(str(error)):
        return f"no memory for {gigabytes(float(found[1]) * UNITS[found[2]])} more"
    return f"no memory; {_said(error)}"


def _counted(plan: Plan, node: Node) -> list[str]:
    """What the plan counts for a node, and what needs less."""
    pool = plan.placement(node.name).pool
    engine = plan.placement(node.name).engine
    found = [m for m in plan.memory if (m.place, m.pool, m.phase) == ("device", pool, node.verb)]
    lines = []
    for m in found:
        items = ", ".join(f"{k} {gigabytes(v)}" for k, v in sorted(m.items.items(), key=lambda i: -i[1]))
        counted = f"the plan counts {gigabytes(m.total)} of the {gigabytes(m.capacity.value)} of a device"
        lines.append(f"{counted}: {items}")
    size = engine.options.get("micro_batch")
    now = f" (now {size})" if size else ""
    less = f"less is needed with a smaller `micro_batch`{now} in `engine {node.name} = {engine.name} {{ … }}`"
    more = " or a larger tp" if node.verb == "generate" else ", a larger tp or `recompute = full`"
    left = "if others take the memory, state what is left, `memory = …` of the cluster"
    return [*lines, f"{less}{more}; {left}"]


def _joint(error: BaseException) -> bool:
    """Whether it, or what it follows from, perhaps in another thread, came out of a collective, and may be of another
    process's death."""
    if isinstance(error, dist.DistError) or any(
        part in f.filename for f in traceback.extract_tb(error.__traceback__) for part in COLLECTIVES
    ):
        return True
    return error.__cause__ is not None and _joint(error.__cause__)


__all__ = ["BUILT", "telling"]
