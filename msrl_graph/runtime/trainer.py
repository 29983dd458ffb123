"""The driver of a run: starts iterations and collects metrics. No sample passes through it.

Invariant: everything that can be known to be wrong is told before a process is started; when `run` returns or raises, no process and
no temporary folder of it is left.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..diagnostics import Diagnostic, Fault
from ..graph import Node
from ..plan import Evaluation, Plan
from . import data
from .display import Display, comparison
from .pool import Pool
from .record import Recorder
from .report import RunError


class RunFailed(Exception):
    """A process died, or a wait passed its deadline."""


@dataclass(frozen=True)
class Outcome:
    """Where the files lie, and each evaluation's reported means: first and last."""

    folder: Path
    first: dict[str, dict[str, float]]
    last: dict[str, dict[str, float]]
    labels: dict[str, str]

    def lines(self) -> list[str]:
        """Each evaluation before and after, in a line."""
        return [
            f"{self.labels[data] or f'{data} {column}'} {value:.3f} -> {self.last[data][column]:.3f}"
            for data, before in self.first.items()
            for column, value in before.items()
        ]


def check(plan: Plan) -> dict[str, int]:
    """What must be there to run: weights, tokenizer, data. The number of rows of each data file; `Fault` with all that is missing."""
    found: list[Diagnostic] = []
    if plan.cluster.device.backend != "cpu":
        what = f"devices of kind {plan.cluster.device.backend} can be planned for, not run on, in this version"
        found.append(Diagnostic("not-yet", what, plan.cluster.span, 'run on `device = "cpu"`'))
    for model in plan.deploy.models.values():
        if not model.path:
            what = f"`{model.name}` is a preset: its shape is known, its weights are not on this machine"
            found.append(Diagnostic("unknown-model", what, model.span, 'name a folder: model policy = "./my-model"'))
            continue
        for pattern in ("*.safetensors", "tokenizer.json"):
            if not list(Path(model.path).glob(pattern)):
                found.append(Diagnostic("missing-file", f"the model folder {model.path} holds no {pattern}", model.span))
    if "source" not in plan.deploy.data:
        found.append(
            Diagnostic(
                "missing-file", "the deploy names no data for the source", plan.deploy.span, 'add: data source = "file.jsonl" { ... }'
            )
        )
    sizes = {}
    for name, item in plan.deploy.data.items():
        try:
            sizes[name] = len(data.read(item, plan.graph))
        except Fault as fault:
            found += fault.diagnostics
    if found:
        raise Fault(*found)
    return sizes


def run(plan: Plan, out: Path | str | None = None, console: Console | None = None, measure: bool = False) -> Outcome:
    """Runs a plan to its end and writes metrics, curve, trace and weights under `out` (default: a new folder under runs/).

    Raises Fault for input that cannot be run, NoResources for machines that lack what it asks for, RunFailed when a process died.
    """
    import ray

    console = console or _console()
    check(plan)
    plan = _absolute(plan)
    pool = Pool(plan)
    folder = _folder(plan, out)
    display = Display(plan, console)
    try:
        with pool:
            return _record(plan, pool, folder, out is not None, display, measure, console)
    except ray.exceptions.RayActorError as error:
        raise RunFailed(f"{pool.name_of(error)} died while {display.last} ran; the files of the run so far are in {folder}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Fault):
            raise error.cause from None
        raise RunFailed(
            str(error.cause) if isinstance(error.cause, RunError) else f"{type(error.cause).__name__}: {error.cause}"
        ) from error
    except ray.exceptions.RayError as error:
        raise RunFailed(str(error).strip().splitlines()[-1]) from error
    finally:
        display.close()


def _record(plan: Plan, pool: Pool, folder: Path, stated: bool, display: Display, measure: bool, console: Console) -> Outcome:
    """The run itself; its files are complete whether it ends well or not."""
    sizes = pool.sizes()
    folder = _make(plan, folder, stated)
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    recorder = Recorder(folder, plan)
    try:
        return _Run(plan, pool, recorder, display, sizes, measure).whole()
    except KeyboardInterrupt:
        console.print(f"interrupted; the files of the run so far are in {folder}")
        raise
    finally:
        display.close()
        recorder.close()
        if rows := recorder.table():
            console.print(comparison(rows))


class _Run:
    def __init__(
        self, plan: Plan, pool: Pool, recorder: Recorder, display: Display, sizes: dict[str, tuple[int, int]], measure: bool
    ) -> None:
        import ray

        self.ray = ray
        self.plan, self.pool, self.recorder, self.display, self.sizes, self.measure = plan, pool, recorder, display, sizes, measure
        for name, (rows, left_out) in sizes.items():
            if left_out:
                display.say(f"{name}: {left_out} of {rows + left_out} rows left out, their prompts are longer than the column's bound")

    def whole(self) -> Outcome:
        plan, iterations = self.plan, self.plan.deploy.run.iterations
        first = {e.data: self._evaluate(e, 0) for e in plan.deploy.evaluations}
        last = first
        scalars = [c.name for c in plan.graph.columns if c.element == "f32" and not c.dims]
        for i in range(iterations):
            line = self._iteration(i)
            self.display.iteration(line, scalars)
            due = [e for e in plan.deploy.evaluations if e.every and (i + 1) % e.every == 0 and i + 1 < iterations]
            last = last | {e.data: self._evaluate(e, i + 1) for e in due}
        if iterations:
            last = {e.data: self._evaluate(e, iterations) for e in plan.deploy.evaluations}
        for worker in dict.fromkeys(plan.graph.node(n.name).worker for n in plan.graph.verb("update")):
            self._wait([r.save.remote(worker, str(self.recorder.folder / "weights" / worker)) for r in self.pool.ranks])
        return Outcome(self.recorder.folder, first, last, {e.data: e.label for e in plan.deploy.evaluations})

    def _task(self, name: str, number: int, prompts: int, fan: int, measure: bool) -> tuple[float, list[Any], dict[str, int]]:
        """Runs the streams of all pools for one task: seconds, reports, bytes moved by the dock."""
        from .actors import Task

        task, ray, pool = Task(name, number, prompts, fan), self.ray, self.pool
        start = time.perf_counter()
        ray.get([b.open.remote(task) for b in pool.boards])
        reports = self._wait([*(r.run.remote(task, measure) for r in pool.ranks), *(f.run.remote(task) for f in pool.functions)])
        seconds = time.perf_counter() - start
        for remark in [r for report in reports for r in report.remarks]:
            self.display.say(remark)
        for board in pool.boards:
            board.close.remote(task.key)
        moved: dict[str, int] = {}
        for counts in ray.get([w.drop.remote(task.key) for w in pool.warehouses]):
            for what, size in counts.items():
                moved[what] = moved.get(what, 0) + size
        return seconds, reports, moved

    def _wait(self, references: list[Any]) -> list[Any]:
        """The results. Fails as soon as one fails, or when for the dock's deadline no row has moved and nothing has ended; keeps the
        display alive meanwhile."""
        left, moves, since = references, -1, time.monotonic()
        deadline = self.plan.docks.deadline
        while left:
            done, left = self.ray.wait(left, num_returns=1, timeout=0.3 if self.display.live else min(10.0, deadline))
            try:
                self.ray.get(done)
                progress = self.ray.get([b.progress.remote() for b in self.pool.boards]) if not done else []
            except self.ray.exceptions.RayError:
                with suppress(self.ray.exceptions.RayError):
                    self.display.phase(self.ray.get(self.pool.boards[0].progress.remote(), timeout=2)[0])
                raise
            if progress:
                self.display.phase(progress[0][0])
            if done or sum(m for _, m in progress) != moves:
                moves, since = sum(m for _, m in progress), time.monotonic()
            elif time.monotonic() - since > deadline:
                # Later than the dock's own deadline would have told of a wait: this is work that does not end.
                last = ", ".join(f"`{name}`" for name, _ in progress if name)
                raise RunFailed(f"for {deadline:g} s no row has moved; {last} took rows last and has not come back")
        return list(self.ray.get(references))

    def _iteration(self, number: int) -> dict[str, Any]:
        rows = self.plan.graph.rows
        measure = self.measure and number == min(1, self.plan.deploy.run.iterations - 1)
        seconds, reports, moved = self._task("train", number, rows[0], rows[-1] // rows[0], measure)
        if measure:
            self.recorder.memory(reports)
        return self.recorder.training(number, seconds, reports, moved)

    def _evaluate(self, evaluation: Evaluation, iteration: int) -> dict[str, float]:
        self.display.phase(f"evaluating {evaluation.data}")
        size = self.sizes[evaluation.data][0]
        seconds, reports, _ = self._task(evaluation.data, iteration, size, evaluation.samples, False)
        found = self.recorder.evaluation(evaluation.data, iteration, seconds, reports, evaluation.report)
        if not self.display.live:
            shown = "  ".join(f"{k} {v:.3f}" for k, v in found.items())
            self.display.say(f"after {iteration} iterations, {evaluation.data}: {shown}")
        return found


def _absolute(plan: Plan) -> Plan:
    """The plan with absolute paths: Ray's processes have a working directory of their own."""

    def node(n: Node) -> Node:
        call = n.attributes.get("call")
        if call is None or ":" not in str(call.value):
            return n
        path, _, name = str(call.value).rpartition(":")
        return replace(n, attributes={**n.attributes, "call": replace(call, value=f"{Path(path).absolute()}:{name}")})

    data = {name: replace(d, path=str(Path(d.path).absolute())) for name, d in plan.deploy.data.items()}
    models = {name: replace(m, path=str(Path(m.path).absolute())) for name, m in plan.deploy.models.items()}
    graph = replace(plan.graph, nodes=tuple(map(node, plan.graph.nodes)))
    return replace(plan, graph=graph, deploy=replace(plan.deploy, data=data, models=models))


def _console() -> Console:
    """stderr; a hundred columns where it is no terminal, so that tables keep their lines."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=120)


def _folder(plan: Plan, out: Path | str | None) -> Path:
    """The folder of this run; never one that holds another's results."""
    names = (Path("runs") / f"{plan.deploy.name}-{n}" for n in itertools.count(1))
    folder = Path(out) if out is not None else next(p for p in names if not p.exists())
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    what = ""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is there already and is not empty"
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK):
        what = f"cannot be made: {nearest} is not a folder that can be written to"
    if what:
        raise Fault(Diagnostic("bad-value", f"the output folder {folder} {what}", help="name another with --out"))
    return folder


def _make(plan: Plan, folder: Path, stated: bool) -> Path:
    """Makes the folder; where its name was ours to choose, another run that took it meanwhile keeps it."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=stated)
            return folder
        except FileExistsError:
            folder = _folder(plan, None)


__all__ = ["Outcome", "RunFailed", "check", "run"]
