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
from . import log, rows
from .actors import Client, Task, settle
from .columns import DTYPES, Array, Column, ragged, texts
from .data import Dataset
from .dock import Batch, home, readers
from .report import Report, RunError
from .wrong import Watch, not_finite, vocabulary


@ray.remote(num_cpus=0)
class FunctionHost:
    """The function nodes of one host; host 0 also runs the source."""

    def __init__(self, plan: bytes, host: int, folder: str, logs: str, controllers: dict[str, str], warehouses: list[str]) -> None:
        settle(folder, logs, f"functions of host {host}")
        self.plan = from_json(zlib.decompress(plan))
        self.host = host
        self.client = Client(f"functions of host {host}", readers(self.plan), controllers, warehouses, host, home(self.plan, host, 0))
        self.functions: dict[str, Function] | None = None

    def start(self) -> dict[str, tuple[int, int]]:
        """Loads functions and data; (usable rows, rows left out) of each data file."""
        plan = self.plan
        tokenizer = self.tokenizer = _tokenizer(plan)
        files = plan.deploy.data if self.host == 0 else {}
        self.data = {n: Dataset(d, plan, tokenizer) for n, d in files.items()}
        self.watch = Watch(plan)
        self.functions = {n.name: Function(n, plan, tokenizer) for n in plan.graph.nodes if "call" in n.attributes}
        return {name: (len(d), d.too_long) for name, d in self.data.items()}

    def run(self, task: Task) -> Report:
        """The stream of this pool for one task. Where this process takes a dead one's place it does all of it again: its shares are
        the same, functions are pure, and rows that are written twice replace themselves."""
        if self.functions is None:
            self.start()
        assert self.functions is not None
        report = Report(f"functions of host {self.host}")
        stream = next(s for s in self.plan.schedule if s.pool == "functions" and s.task == task.name)
        for instruction in stream.instructions:
            if instruction.node == "source":
                if self.host == 0:
                    self.client.at(f"source in {task.key}")
                    with report.phase("source"):
                        self._source(task)
            else:
                self._function(self.functions[instruction.node], task, report)
        report.here = self.client.flush()
        return report

    def record(self, task: Task, folder: str) -> str:
        """Writes the rows of a task that has ended into a run's folder; what went wrong."""
        if self.functions is None:
            self.start()
        path = rows.file(Path(folder), task.number)
        try:
            rows.write(path, self.plan, self.client.whole(task), task.fan, self.tokenizer)
        except OSError as error:
            return f"the rows of iteration {task.number} could not be recorded: {error}"
        return ""

    def _source(self, task: Task) -> None:
        training = task.name == "train"
        dataset = self.data["source" if training else task.name]
        columns = dataset.rows(task.number * task.prompts, task.prompts) if training else dataset.all()
        numbers = np.arange(task.prompts)
        self.client.put("source", task, {name: (numbers, column) for name, column in columns.items()})

    def _function(self, function: Function, task: Task, report: Report) -> None:
        last = False
        while not last:
            waiting = time.perf_counter()
            batch = self.client.take(function.node.name, task, self.host, at_once=True)
            report.add("wait", waiting)
            last = batch.share.last
            if not len(batch.rows):
                continue
            log.at(f"{function.node.name} in {task.key}")
            with report.phase(function.node.name):
                written = function(batch, task.number)
            known = function.spoilt(batch)
            for name, column in written.items():
                self.watch.finite(function.node, task, report, "result", f"it returned {{}} for `{name}`", batch.rows, column, known)
                finite = column.values[np.isfinite(column.values)]
                if column.offsets is None and column.values.dtype.kind == "f" and len(finite):
                    report.count(name, float(finite.sum()), len(finite))
            self.client.put(function.node.name, task, {name: (batch.rows, column) for name, column in written.items()})


def _tokenizer(plan: Plan) -> Any:
    from tokenizers import Tokenizer

    policy = next(w for w in plan.graph.workers if w.kind == "policy")
    tokenizer = Tokenizer.from_file(str(Path(plan.deploy.models[policy.model].path) / "tokenizer.json"))
    # Many files store how their authors padded and cut batches; prompts are neither padded nor cut.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class BadResult(ValueError):
    """A function returned what its columns cannot hold."""


class Function:
    """A function node made callable on batches."""

    def __init__(self, node: Node, plan: Plan, tokenizer: Any) -> None:
        self.node, self.graph, self.tokenizer = node, plan.graph, tokenizer
        self.seed = plan.deploy.run.seed
        self.stops = plan.deploy.run.on_nan == "stop"
        self.vocabularies = {c: vocabulary(plan, c) for c in node.writes}
        self.scope = "row" if node.per == "row" else "the batch" if node.per == "batch" else node.per
        call = node.attributes["call"]
        self.call, self.signature = _find(call)
        self.options, renamed = _options(call), call.columns()
        # Parameter -> column, for the parameters whose column the node reads.
        self.columns = {p: renamed.get(p, p) for p in self.signature.columns if renamed.get(p, p) in node.reads}
        taken = self.columns.values()
        self.rest = [c for c in node.reads if c not in taken] if self.signature.rest else []

    def _size(self, batch: Batch) -> int:
        """Rows that the function sees at once."""
        return len(batch.rows) // len(batch.share.units) if self.node.per != "row" else 1

    def spoilt(self, batch: Batch) -> Array:
        """The rows whose result may be wrong because something that the function saw was."""
        bad = np.zeros(len(batch.rows), bool)
        for name in self.node.reads:
            bad |= not_finite(batch.columns[name])
        return np.repeat(bad.reshape(-1, self._size(batch)).any(axis=1), self._size(batch))

    def __call__(self, batch: Batch, iteration: int) -> dict[str, Column]:
        written: list[tuple[Any, ...]] = []  # by row, one value a column
        grouped, size = self.node.per != "row", self._size(batch)
        for i, unit in enumerate(batch.share.units if grouped else batch.rows):
            options = dict(self.options)
            if self.signature.rng:
                options["rng"] = noise.generator(self.seed, iteration, zlib.crc32(self.node.name.encode()), int(unit))
            where = f"{self.scope} {unit}"
            try:
                bound = [*self.columns.items(), *((self.signature.rest, c) for c in self.rest)]
                values = [(p, self._argument(batch.columns[c], c, i * size, size if grouped else 0, p)) for p, c in bound]
                # What comes before `*columns` is given by order, as Python wants it.
                result = self.call(*(v for _, v in values), **options) if self.rest else self.call(**dict(values), **options)
                rows = self._by_row(result, size) if grouped else [self._by_column(result)]
                for j, row in enumerate(rows, i * size):
                    where = f"{self.scope} {unit}, row {batch.rows[j]}" if grouped else where
                    written.append(self._checked(row, batch, j))
            except Exception as error:
                raise RunError(self._blame(error, f"{where} of iteration {iteration}")) from error
        return {name: self._column(name, [row[i] for row in written]) for i, name in enumerate(self.node.writes)}

    def _blame(self, error: Exception, where: str) -> str:
        what = f"`{self.node.name}` (line {self.node.span.line}) failed on {where}: {type(error).__name__}: {error}"
        # The user's own frame is the last one: where a debugger would stop. What it returned has no frame.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return what if isinstance(error, BadResult) else f"{what}, at {frame.filename}:{frame.lineno}"

    def _by_column(self, result: Any) -> tuple[Any, ...]:
        """One value for each written column."""
        writes = self.node.writes
        if len(writes) == 1:
            return (result,)
        if not isinstance(result, tuple) or len(result) != len(writes):
            raise BadResult(f"it returned {_kind(result)}, where a tuple of {len(writes)} belongs: {', '.join(writes)}")
        return result

    def _by_row(self, result: Any, size: int) -> list[tuple[Any, ...]]:
        """The results of a group, one tuple a row."""
        columns = self._by_column(result)
        for name, values in zip(self.node.writes, columns, strict=True):
            if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != size:
                raise BadResult(f"it returned {_kind(values)} for `{name}`, where one value for each of {size} rows belongs")
        return list(zip(*columns, strict=True))

    def _checked(self, row: tuple[Any, ...], batch: Batch, position: int) -> tuple[Any, ...]:
        """The values of a row as their columns' types; BadResult where they are not."""
        found: list[Any] = []
        for name, value in zip(self.node.writes, row, strict=True):
            column = self.graph.column(name)
            if column.element == "text":
                if not isinstance(value, str):
                    raise BadResult(f"it returned {_kind(value)} for `{name}`, where text belongs")
                found.append(value)
                continue
            try:
                array: Array = np.asarray(value, DTYPES[column.element])
                if value is None:
                    raise TypeError  # to numpy it is nan
            except (TypeError, ValueError):
                raise BadResult(f"it returned {_kind(value)} for `{name}`, where {column.element} belongs") from None
            if array.ndim != len(column.dims):
                raise BadResult(
                    f"it returned {_kind(value)} for `{name}`, where {'one value a token' if column.dims else 'one number'} belongs"
                )
            like = column.dims[0].like if column.dims else ""
            if like in batch.columns and len(array) != batch.columns[like].lengths[position]:
                length = batch.columns[like].lengths[position]
                raise BadResult(f"it returned {len(array)} values for `{name}`, where `{like}` has {length} tokens")
            if self.stops and not np.isfinite(array).all():
                raise BadResult(f"it returned {array[~np.isfinite(array)].flat[0]} for `{name}`")
            size = self.vocabularies[name]
            if size and ((array < 0) | (array >= size)).any():
                raise BadResult(f"it returned {value} for `{name}`, where tokens from 0 to {size - 1} belong")
            found.append(array)
        return tuple(found)

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
        return ragged(values, dtype) if column.dims else Column(np.asarray(values, dtype))


def _find(call: Expr) -> tuple[Callable[..., Any], Signature]:
    """The function that a node calls: of the package, or of a file ("path.py:name")."""
    name = str(call.value)
    if ":" not in name:
        return algorithms.load("function", name), algorithms.library()["function", name][0]
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{path} (line {call.span.line} of the program) cannot be imported: {type(error).__name__}: {error}"
        raise RunError(f"{what}, at {frame.filename}:{frame.lineno}") from error
    return getattr(module, function), signatures(Path(path).read_text(encoding="utf-8"))[function]


def _options(call: Expr) -> dict[str, Any]:
    """The options of a call; one that is a call itself is what that gives."""
    given = {k: a for k, a in zip(call.keys, call.args, strict=True) if a.kind != "column"}
    return {k: algorithms.load("option", str(a.value))(**_options(a)) if a.kind == "call" else a.literal() for k, a in given.items()}


def _kind(value: Any) -> str:
    """A value in few words."""
    if hasattr(value, "__len__") and not isinstance(value, str):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
