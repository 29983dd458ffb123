"""The message for the user when an engine fails on a rank.

Invariant: the first line has the node and its line in the program, the engine, the rank, the task (a training iteration
or an evaluation), the rows that the engine computed, and the engine's own message, cut to MOST characters. The log of
the rank has the full error. After an out-of-memory error, the message also lists the memory that the plan counts, and
ways to need less memory. If an engine cannot be built with a model, the message lists the engines that may support the
model.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import distributed as dist

from ...analysis.row_packing import MicroBatchLimit
from ...backends import ENGINES, can_build
from ...cost.holdings import gigabytes
from ...diagnostics import Fault
from ...ir.graph import Node
from ...ir.options import EngineOptions
from ...ir.plan import Plan
from ..process import log
from ..process.task_report import RankFailed, RunError
from .context import RankContext

BUILT = "while it was built"
MOST = 400  # characters of an engine's error that the message shows
# The messages with which torch, numpy and the C++ library report that memory is exhausted, on any device.
NO_MEMORY = re.compile(r"(can't|cannot|unable to|tried to) allocate|out of memory|bad_alloc", re.IGNORECASE)
WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# If another process dies during a collective, the resulting error is raised by code in these folders, or by code that
# they call.
COLLECTIVES = ("/torch/distributed/", "/torch/autograd/")


@contextmanager
def report_engine_errors(
    context: RankContext, node: Node, doing: str, rows: Sequence[int] | np.ndarray = ()
) -> Iterator[None]:
    """Convert an exception of an engine into an error with a message for the user.

    The context manager raises RankFailed. RunError, Fault and Ray's errors pass unchanged. `doing` completes the
    message "failed on rank 3 ...", for example "in train/1".
    """
    try:
        yield
    except (RunError, Fault):
        raise
    except Exception as error:
        import ray  # not at the top: processes fork from one that has imported this module, but not Ray (preload.py)

        if isinstance(error, ray.exceptions.RayError):
            raise
        rows_text = f" on {_describe_rows(rows)}" if len(rows) else ""
        plan = context.plan
        engine = plan.placement(node.name).engine.name
        prefix = f"`{node.name}` ({node.span.place}), engine {engine}, failed on rank {context.rank} {doing}{rows_text}"
        log.log_details(prefix, *traceback.format_exception(error))
        lines = [f"{prefix}: {_summarize(error)}"]
        if no_memory := _is_out_of_memory(error):
            lines = [f"{prefix}: {_describe_shortage(error)}", *_explain_memory(plan, node)]
        elif doing == BUILT:
            lines += _suggest_engines(plan, node)
        if log.file_name():
            lines.append(f"all of it is in logs/{log.file_name()}")
        joint = isinstance(error, RuntimeError) and not no_memory and _in_collective(error)
        raise RankFailed("\n  ".join(lines), joint) from error


def _suggest_engines(plan: Plan, node: Node) -> list[str]:
    """Return advice that names the engines that could replace a node's engine."""
    engine_name = plan.placement(node.name).engine.name
    able = [
        spec.name
        for spec in ENGINES.values()
        if spec.name != engine_name and node.verb in spec.verbs and can_build(spec.name)
    ]
    model = plan.model(node.name)
    able = [
        f"`engine {node.name} = {other}`"
        for other in able
        if not model.list_lacking(ENGINES[other].capabilities.features)
    ]
    return [
        f"if {engine_name} does not support the model of {node.worker}, choose another engine: {' or '.join(able)}"
    ] * bool(able)


def _describe_rows(rows: Sequence[int] | np.ndarray) -> str:
    first = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"row {first}" if len(rows) == 1 else f"{len(rows)} rows ({first})"


def _summarize(error: BaseException) -> str:
    """Return the type and the message of an error, in one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(
        isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))
    )


def _describe_shortage(error: BaseException) -> str:
    if match := WANTED.search(str(error)):
        return f"no memory for {gigabytes(float(match[1]) * UNITS[match[2]])} more"
    return f"no memory; {_summarize(error)}"


def _explain_memory(plan: Plan, node: Node) -> list[str]:
    """Return the memory that the plan counts for a node, and ways to reduce it."""
    pool = plan.placement(node.name).pool
    engine = plan.placement(node.name).engine
    entries = [entry for entry in plan.memory if (entry.place, entry.pool, entry.phase) == ("device", pool, node.verb)]
    lines = []
    for entry in entries:
        items = ", ".join(
            f"{item} {gigabytes(item_bytes)}"
            for item, item_bytes in sorted(entry.items.items(), key=lambda pair: -pair[1])
        )
        counted = f"the plan counts {gigabytes(entry.total)} of a device's {gigabytes(entry.capacity.value)}"
        lines.append(f"{counted}: {items}")
    option = MicroBatchLimit.of(plan, node.name).option
    sizes = {option: engine.options.get(option)}
    if node.verb == "generate":
        sizes = {"memory": engine.options.get("memory", EngineOptions.memory)} | sizes
    smaller = " or ".join(f"`{option}`{f' (now {size})' if size else ''}" for option, size in sizes.items())
    advice = f"to need less, use a smaller {smaller} in `engine {node.name} = {engine.name} {{ … }}`"
    layout_advice = " or a larger tp" if node.verb == "generate" else ", a larger tp or `recompute = full`"
    memory_advice = "if other processes use the memory, state what is left with `memory = …` of the cluster"
    return [*lines, f"{advice}{layout_advice}; {memory_advice}"]


def _in_collective(error: BaseException) -> bool:
    """Return whether an error, or its cause, was raised in a collective.

    If the result is true, the death of another process may be the reason. The cause may have been raised in another
    thread.
    """
    if isinstance(error, dist.DistError) or any(
        folder in frame.filename for frame in traceback.extract_tb(error.__traceback__) for folder in COLLECTIVES
    ):
        return True
    return error.__cause__ is not None and _in_collective(error.__cause__)
