"""The pool of function nodes: the source and the Python functions, on the hosts' CPUs.

Invariant: a function sees the rows of its scope and nothing else; a generator that it asks for is keyed by (seed, iteration, node,
unit), so that neither the host nor the order of arrival changes what it returns.
"""

from __future__ import annotations

import importlib.util
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from .. import algorithms, noise
from ..functions import Signature, signatures
from ..graph import Expr, Node
from ..plan import Plan, from_json
from .actors import Client, Task, settle
from .columns import DTYPES, Column, ragged, texts
from .data import Dataset
from .dock import Batch, readers
from .report import Report, RunError


@ray.remote(num_cpus=0)
class FunctionHost:
    """The function nodes of one host; host 0 also runs the source."""

    def __init__(self, plan: str, host: int, folder: str) -> None:
        settle(folder)
        self.plan = from_json(plan)
        self.host = host

    def start(self, controllers: dict[str, Any], warehouses: list[Any]) -> dict[str, tuple[int, int]]:
        """Loads functions and data; (usable rows, rows left out) of each data file."""
        plan = self.plan
        self.client = Client(readers(plan), controllers, warehouses, self.host, min(self.host, len(warehouses) - 1))
        tokenizer = _tokenizer(plan)
        files = plan.deploy.data if self.host == 0 else {}
        self.data = {n: Dataset(d, plan.graph, tokenizer, plan.deploy.run.seed) for n, d in files.items()}
        self.functions = {n.name: _Function(n, plan, tokenizer) for n in plan.graph.nodes if "call" in n.attributes}
        return {name: (len(d), d.too_long) for name, d in self.data.items()}

    def run(self, task: Task) -> Report:
        """The stream of this pool for one task."""
        report = Report(f"functions {self.host}")
        stream = next(s for s in self.plan.schedule if s.pool == "functions" and s.task == task.name)
        for instruction in stream.instructions:
            if instruction.node == "source":
                if self.host == 0:
                    with report.phase("source"):
                        self._source(task)
            else:
                self._function(self.functions[instruction.node], task, report)
        self.client.flush()
        return report

    def _source(self, task: Task) -> None:
        training = task.name == "train"
        dataset = self.data["source" if training else task.name]
        rows = dataset.rows(task.number, task.prompts) if training else dataset.all()
        numbers = np.arange(task.prompts)
        self.client.put("source", task, {name: (numbers, column) for name, column in rows.items()})

    def _function(self, function: _Function, task: Task, report: Report) -> None:
        last = False
        while not last:
            waiting = time.perf_counter()
            batch = self.client.take(function.node.name, task, self.host)
            report.add("wait", waiting)
            last = batch.share.last
            if not len(batch.rows):
                continue
            with report.phase(function.node.name):
                written = function(batch, task.number)
            for name, column in written.items():
                if column.offsets is None and column.values.dtype.kind == "f":
                    report.count(name, float(column.values.sum()), len(column))
            self.client.put(function.node.name, task, {name: (batch.rows, column) for name, column in written.items()})


def _tokenizer(plan: Plan) -> Any:
    from tokenizers import Tokenizer

    policy = next(w for w in plan.graph.workers if w.kind == "policy")
    return Tokenizer.from_file(str(Path(plan.deploy.models[policy.model].path) / "tokenizer.json"))


class _Function:
    """A function node made callable on batches."""

    def __init__(self, node: Node, plan: Plan, tokenizer: Any) -> None:
        self.node, self.graph, self.tokenizer = node, plan.graph, tokenizer
        self.seed = plan.deploy.run.seed
        self.scope = "row" if node.per == "row" else "the batch" if node.per == "batch" else node.per
        call = node.attributes["call"]
        self.call, self.signature = _find(call)
        self.options = {k: _value(a) for k, a in zip(call.keys, call.args, strict=True) if k and a.kind != "column"}
        renamed = {k: str(a.value) for k, a in zip(call.keys, call.args, strict=True) if k and a.kind == "column"}
        # Parameter -> column, for the parameters whose column the node reads.
        self.columns = {p: renamed.get(p, p) for p in self.signature.columns if renamed.get(p, p) in node.reads}

    def __call__(self, batch: Batch, iteration: int) -> dict[str, Column]:
        outputs: list[tuple[Any, ...]] = []
        grouped = self.node.per != "row"
        size = len(batch.rows) // len(batch.share.units) if grouped else 1
        for i, unit in enumerate(batch.share.units if grouped else batch.rows):
            options = dict(self.options)
            if self.signature.rng:
                options["rng"] = noise.generator(self.seed, iteration, zlib.crc32(self.node.name.encode()), int(unit))
            columns = {p: self._argument(batch.columns[c], c, i * size, size if grouped else 0, p) for p, c in self.columns.items()}
            try:
                result = self.call(**columns, **options)
            except Exception as error:
                # The user's own frame is the last one: where a debugger would stop.
                frame = traceback.extract_tb(error.__traceback__)[-1]
                what = f"`{self.node.name}` (line {self.node.span.line}) failed on {self.scope} {unit} of iteration {iteration}"
                raise RunError(f"{what}: {type(error).__name__}: {error}, at {frame.filename}:{frame.lineno}") from error
            results = result if len(self.node.writes) > 1 else (result,)
            outputs += zip(*results, strict=True) if grouped else [results]
        return {name: self._column(name, [o[i] for o in outputs]) for i, name in enumerate(self.node.writes)}

    def _argument(self, column: Column, name: str, start: int, size: int, parameter: str) -> Any:
        """The argument for one row (size 0) or for `size` rows: an array of scalars, or a list."""
        if size and column.offsets is None:
            return column.values[start : start + size]
        kind = self.graph.column(name)
        text = kind.element == "text" or parameter in self.signature.text

        def one(row: int) -> Any:
            if kind.element == "text":
                return column.text(row)
            return self.tokenizer.decode(column[row].tolist(), skip_special_tokens=True) if text else column[row]

        return [one(r) for r in range(start, start + size)] if size else one(start)

    def _column(self, name: str, values: list[Any]) -> Column:
        column = self.graph.column(name)
        if column.element == "text":
            return texts(values)
        dtype = DTYPES[column.element]
        return ragged([np.atleast_1d(np.asarray(v)) for v in values], dtype) if column.dims else Column(np.asarray(values, dtype))


def _find(call: Expr) -> tuple[Callable[..., Any], Signature]:
    """The function that a node calls: of the package, or of a file ("path.py:name")."""
    name = str(call.value)
    if ":" not in name:
        return algorithms.load("function", name), algorithms.library()["function", name][0]
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function), signatures(Path(path).read_text(encoding="utf-8"))[function]


def _value(expr: Expr) -> Any:
    if expr.kind == "list":
        return [_value(a) for a in expr.args]
    return -_value(expr.args[0]) if expr.kind == "neg" else expr.value
