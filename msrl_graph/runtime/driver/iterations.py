"""The driver of a run: starts iterations and collects metrics. No sample passes through it.

Invariant: what it leaves in the run's folder is whole whenever it dies: lines of metrics are flushed, checkpoints
renamed into place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...diagnostics import Fault
from ...emit.humanize import many
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ...ir.plan_paths import here
from ..dock.messages import Status
from ..metrics.best import ending
from ..metrics.display import Display, comparison, evaluated
from ..metrics.health_checks import HealthChecks
from ..metrics.recorder import METRICS, Recorder, restore
from ..metrics.row_failures import failures
from ..process import fault_points
from ..process.heartbeat import Limits
from ..process.task import Task
from ..process.task_report import Loaded, Report, RunError
from ..weights import checkpoint
from . import function_hosts, wait_report
from .async_driver import AsyncPools
from .changed_files import ChangedFiles
from .dock_monitor import DockMonitor, HostLost
from .driver_exit import LOOK
from .function_hosts import FunctionHosts, reference
from .function_tasks import FunctionTasks, lane
from .process_pool import ProcessPool
from .resume import program
from .run_state import RunState
from .signals import Signals
from .stalls import LOADING, DeathReports, ProcessStuck, StallClock, of_the_user
from .supervisor import Attempt, Result

# Seconds that a driver leaves the docks to tell of a wait before it does.
AFTER = 2.0
# Seconds that an iteration which is to be the last may stand still, twice the longest so far where that is more.
STILL = 5.0
PATIENCE = 15.0  # seconds that a disk may stand still under a checkpoint that is to be the last


class _Running(NamedTuple):
    """A task under way: when it began (perf_counter), and a reference to each process's report."""

    task: Task
    start: float
    streams: list[Any]


class Driver:
    """One attempt."""

    ahead: AsyncPools  # as soon as there are ranks

    def __init__(self, attempt: Attempt, pool: ProcessPool, display: Display, signals: Signals) -> None:
        import ray

        self.ray = ray
        self.attempt = attempt
        self.pool = pool
        self.display = display
        self.signals = signals
        self.plan: Plan = here(attempt.plan)
        self.docks = DockMonitor()
        self.fates = DeathReports(attempt.folder)
        self.limits = Limits.of(self.plan.docks.deadline)
        self.looked = 0.0  # when the docks were asked (time.monotonic)
        self.longest = 0.0  # seconds of an iteration
        self.unsaved = ""  # why the last checkpoint that was asked for is not there
        self.edited = ChangedFiles(Path(attempt.folder), attempt.edited)

    @property
    def functions(self) -> FunctionHosts:
        assert self.pool.functions is not None
        return self.pool.functions

    def whole(self) -> Result:
        pool = self.pool
        display = self.display
        out = Path(self.attempt.out)
        pool.connect()
        self.signals.heed()
        pool.start()
        loaded: dict[str, Loaded] = self._wait(pool.started, LOADING)[0]
        (out / "plan.json").write_text(self.attempt.plan.to_json(), encoding="utf-8")
        for name, data in loaded.items():
            if data.left_out:
                display.say(f"{name}: {data.left_out}")
        resumed = self._bring(out) if self.attempt.resume else None
        self.recorder = Recorder(out, self.plan, self.attempt.lines, self.attempt.changed)
        display.knows(self.recorder.lines, self.recorder.evaluations)
        try:
            result = self._train({name: data.rows for name, data in loaded.items()}, out, resumed)
        except KeyboardInterrupt:
            display.say(f"interrupted; the files of the run so far are in {self.attempt.url or out}")
            raise
        finally:
            display.close()
            with suppress(OSError):
                self.recorder.close()
        if table := self.recorder.table():
            display.console.print(comparison(table))
        return result

    def _bring(self, out: Path) -> checkpoint.Manifest:
        """Brings the checkpoint to the hosts that lack files of it, and puts back lines of metrics.jsonl that are
        missing; its manifest."""
        folder = Path(self.attempt.resume)
        manifest = checkpoint.manifest_of(folder)
        self.pool.parted.bring(folder, manifest, self._written)
        if self.attempt.options.evaluate:
            return manifest
        copy = checkpoint.metrics_copy(folder, manifest)
        if copy is not None and (wrong := restore(out / METRICS, copy)):
            self.display.say(f"{out / METRICS} {wrong}: its {many(manifest.lines, 'line')} come from {folder}")
        return manifest

    def _train(self, sizes: dict[str, int], out: Path, resumed: checkpoint.Manifest | None) -> Result:
        plan = self.plan
        run = self.plan.deploy.run
        begin = 0
        self.carried = RunState(plan, sizes["source"])
        self.tasks = FunctionTasks(self.ray, plan, self.functions, self.carried)
        if resumed is not None:
            saved = self.attempt.resume
            self.carried.restore(Path(saved), resumed)
            begin = resumed.iteration
            self._written([r.resume.remote(saved, resumed) for r in self.pool.ranks])
            self.display.resume(begin)
        if self.attempt.options.replay:
            self._wait([r.replay.remote(str(Path(self.attempt.options.replay).absolute())) for r in self.pool.ranks])
        self.ahead = AsyncPools(plan, self.pool.ranks, begin)
        if not self.attempt.lines:
            for evaluation in plan.deploy.evaluations:
                self._evaluate(evaluation, begin, sizes)
        if self.attempt.options.evaluate:
            return self._done()
        scalars = [c.name for c in plan.graph.columns if c.element == "f32" and not c.dims]
        symptoms = HealthChecks(plan)
        for line in self.recorder.lines:  # of what was told already
            symptoms.look(line)
        self.signals.training = True
        running = None
        end = begin
        enough = ending(self.recorder.bests)
        for i in range(begin, begin if enough else run.iterations):
            running = running or self._begin(self.carried.task(i), self._measured(i))
            done = running
            last = i + 1 == run.iterations
            saves = bool(plan.deploy.saves) and (last or bool(run.save and (i + 1) % run.save == 0))
            evaluations = [e for e in plan.deploy.evaluations if e.every and (i + 1) % e.every == 0]
            # The ranks go on while this iteration's figures are written down, unless something else has its turn first.
            goes_on = not (last or saves or evaluations or self.attempt.options.record)
            # Where the dock's capacity is bounded, rows of an iteration that comes must not take what this one needs.
            if goes_on and self.carried.known and not plan.docks.capacity:
                self._prepare(self.carried.task(i + 1))
            seconds, reports = self._end(done)
            self.longest = max(self.longest, seconds)
            self.carried.count(i, reports)
            self.carried.after(done.task, reports)
            goes_on = goes_on and not self.signals.asked
            running = self._begin(self.carried.task(i + 1), self._measured(i + 1)) if goes_on else None
            if self._measured(i):
                self.recorder.memory(reports)
            line = self.recorder.training(i, seconds, reports, *self._clear(done.task, reports))
            self.display.iteration(line, scalars, reports)
            for remark in self.edited.look():
                self.display.say(remark)
            for remark in symptoms.look(line):
                self.display.say(remark)
            if ends := symptoms.ends(line):
                raise RunError(ends)
            for evaluation in evaluations:
                self._evaluate(evaluation, i + 1, sizes)
            end = i + 1
            if running is not None:
                continue
            enough = ending(bests := self.recorder.bests)
            if self.signals.asked or saves or enough or any(best.iteration == end for best in bests):
                self._checkpoint(end, out)
            if self.signals.asked:
                go_on = "" if self.unsaved else f"; go on with --resume {self.attempt.url or out}"
                self.display.say(f"ended after {many(i + 1, 'iteration')}{go_on}")
                return Result("interrupted", status=128 + self.signals.asked)
            if enough:
                break
        if enough:
            self.display.say(f"ended after {end} of {many(run.iterations, 'iteration')}: {enough}")
        self.signals.training = False
        # After the checkpoint: a longer run that is resumed from it would not have had these.
        for evaluation in plan.deploy.evaluations if end else ():
            if not evaluation.every or end % evaluation.every:
                self._evaluate(evaluation, end, sizes)
        for worker in plan.graph.weighty:
            folder = (out / "weights" / worker).absolute()
            self._written([r.save.remote(worker, str(folder)) for r in self.pool.ranks])
            self.pool.parted.collect(folder)
        return self._done()

    def _done(self) -> Result:
        if self.attempt.url:
            self.pool.parted.leave(Path(self.attempt.out).absolute(), self.attempt.url)
        # All else is done; but who asked for checkpoints must not take this run for one that has its last.
        return Result("failed", self.unsaved) if self.unsaved else Result("done")

    def _checkpoint(self, iteration: int, out: Path) -> None:
        """Writes a checkpoint; where the disk does not take it, the run goes on with the last one."""
        self.display.phase(f"saving after {many(iteration, 'iteration')}")
        try:
            self.signals.saving = True
            decides = program(self.plan)
            saved = self.pool.parted.save(out, iteration, self.recorder, decides, self.carried, self._written)
            self.unsaved = ""
        except OSError as error:
            kept = checkpoint.found(out)
            older = f"{kept[-1]} stays the last one" if kept else "there is none yet"
            self.unsaved = f"the checkpoint after {many(iteration, 'iteration')} could not be written: {error}; {older}"
            self.display.say(self.unsaved)
            return
        finally:
            self.signals.saving = False
        try:
            if self.attempt.url:
                self.display.phase(f"sending what was saved after {many(iteration, 'iteration')}")
                self.pool.parted.send(saved, self.attempt.url)
        except (OSError, Fault) as error:
            self.unsaved = f"the checkpoint after {many(iteration, 'iteration')} lies in {saved} alone: {error}"
            self.display.say(self.unsaved)

    def _written(self, asked: Sequence[Any]) -> list[Any]:
        """The results of what reads or writes weights: it may last as long as bytes move."""
        return self._wait(asked, disk=True)

    def _open(self, task: Task) -> None:
        """Makes a task known to the docks."""
        fault_points.reach("driver", f"open {task.key}")
        self._wait([d.open.remote(task) for d in self.pool.docks])  # Ray would wait for ever for one of a lost host
        fault_points.reach("driver", f"opened {task.key}")

    def _begin(self, task: Task, measure: bool = False) -> _Running:
        """Starts the streams of all pools for one task, but for those that were ahead."""
        start = time.perf_counter()
        self._prepare(task)
        if task.trains:
            self._go_ahead(task.number, self.ahead.pipelined)
        told = self.ahead.told(task)
        ranks = [r.run.remote(told, measure) for r in self.ahead.in_step]
        if task.trains:
            self._go_ahead(task.number, self.ahead.others)
        else:
            for pool in self.ahead.others:
                self.ahead.begin(pool, task, task.number, measure)
        fault_points.reach("driver", f"begun {task.key}")
        return _Running(task, start, [*ranks, *self.ahead.reports.pop(task.key, ()), *self.tasks.take(task)])

    def _go_ahead(self, now: int, pools: Sequence[str]) -> None:
        """Starts what is due of some pools that may be ahead, while the updates are in the iteration `now`."""
        last = now + 1 if self.signals.asked else self.plan.deploy.run.iterations
        for pool, number in self.ahead.due(now, last, self.carried.foreseen, pools):
            task = self.carried.task(number)
            if number > now:
                self._prepare(task)
            self.ahead.begin(pool, task, now, self._measured(number))

    def _prepare(self, task: Task) -> None:
        """Opens a task and starts the hosts' functions on it, unless that was done: ahead of the ranks where it follows
        without anything between, so that its prompts are there when it begins."""
        if task.key not in self.tasks.calls:
            self._open(task)
            self.tasks.begin(task)

    def _end(self, running: _Running) -> tuple[float, list[Report]]:
        """Waits for the streams: seconds, reports."""
        self.display.begin(running.task)
        reports = self._wait(running.streams, training=running.task.number if running.task.trains else -1)
        number = running.task.number
        while running.task.trains and not self.signals.asked and self.ahead.late(number, self.ahead.others):
            if not (under_way := self.ahead.under_way()):
                break
            self._wait(under_way, training=number)
        self.tasks.end(running.task)
        fault_points.reach("driver", f"ended {running.task.key}")
        return time.perf_counter() - running.start, reports

    def _clear(self, task: Task, reports: list[Report]) -> tuple[dict[str, int], int]:
        """Forgets the rows of a task that has ended; bytes moved by the dock, and the messages that it took."""
        pool = self.pool
        fault_points.reach("driver", f"clear {task.key}")
        for remark in [*(r for report in reports for r in report.remarks), *failures(self.plan, task, reports)]:
            self.display.say(remark)
        if self.attempt.options.record:
            out = str(Path(self.attempt.out).absolute())
            asked = [self.functions.ask(0, "record", task, out, lane=lane(task))]
            for wrong in filter(None, self._wait(asked)):
                self.display.say(wrong)
        moved: dict[str, int] = {}
        for report in reports:
            for what, size in report.moved.items():
                moved[what] = moved.get(what, 0) + size
        messages = sum(self._wait([d.drop.remote(task.key) for d in pool.docks]))
        fault_points.reach("driver", f"cleared {task.key}")
        return moved, messages

    def _wait(self, asked: Sequence[Any], deadline: float = 0.0, training: int = -1, disk: bool = False) -> list[Any]:
        """The results, of Ray's references and of calls of function hosts. It fails as soon as one of them fails, or
        a process dies that is not replaced; and when for `deadline` seconds (0: the dock's) nothing has ended and no
        row has moved, nor, of what reads or writes a `disk`, a byte. Meanwhile it keeps the display alive, and pools
        that may be ahead of the iteration `training` at work."""
        left = list(asked)
        still = StallClock(disk)
        counted = not deadline
        deadline = deadline or self.plan.docks.deadline
        often = min(LOOK / 5 if self.attempt.ports.open else LOOK, deadline)
        while left:
            beside = [*self.ahead.under_way(), *self.tasks.watched()] if training >= 0 else []
            watched = list(dict.fromkeys([*map(reference, left), *beside]))
            ended, _ = self.ray.wait(watched, num_returns=1, timeout=often)
            for who in self.functions.mend():  # the calls of a process that died have other references now
                self.display.say(f"{self.fate([who])}; started again")
                self.display.restarted(who)
                still.moved()
            done = [x for x in left if reference(x) in ended]
            self.ray.get([reference(x) for x in done])
            if training >= 0:
                for task, report in self.ahead.ended(self.ray, ended):
                    self.carried.heard(task, report)
                self.tasks.heard(ended)
                self._go_ahead(training, self.ahead.others)
            left = [x for x in left if x not in done]
            if self._look(not done):
                still.hear(self.docks.statuses)
            if done:
                still.moved()
            what = "byte was read or written" if disk else "row has moved"
            if counted and self.signals.asked and (seconds := still.seconds(self.signals.since)) > self._patience(disk):
                self.display.say(f"for {seconds:.0f} s no {what}: ending at once{self.words()}")
                raise KeyboardInterrupt
            if still.seconds() > deadline + AFTER:
                # The dock's own deadline would have told of a wait by now: this is work that does not end.
                raise self._stuck(f"for {deadline:g} s no {what}", left)
        return list(self.ray.get([reference(x) for x in asked]))

    def _stuck(self, what: str, left: Sequence[Any]) -> RunError:
        """Work that does not end: of the user's function it ends the run, any other may be tried again."""
        last = ", ".join(f"`{s.last}`" for s in self.docks.statuses if s.last)
        if self.at_fault():
            return RunError(f"{what}; {last or 'a function'} took rows last and has not come back{self.words()}")
        busy = self.pool.asked([reference(x) for x in left])
        return ProcessStuck(f"{what}; {' and '.join(busy) or 'a process'} has not come back{self.words()}")

    def at_fault(self) -> list[str]:
        """The processes that are in the user's code, and which others wait for."""
        calls = self.functions.open if self.pool.functions else []
        busy = {function_hosts.name(*self.functions.places[i]) for i, some in enumerate(calls) if some}
        return of_the_user(self.plan, self.docks.statuses, busy | {f"rank {r}" for r in range(len(self.pool.ranks))})

    def _patience(self, disk: bool) -> float:
        """How long a wait may stand still after which the run is to end: what takes minutes each time is work, and
        ends."""
        return max(PATIENCE if disk else STILL, 2 * self.longest)

    def _look(self, idle: bool) -> bool:
        """Asks the docks where it is time to: where nothing has ended for a while, or somebody watches; whoever is dead
        fails at once."""
        watched = bool(self.display.wanted())
        if not watched and not (idle and time.monotonic() - self.looked >= 0.8 * LOOK):
            return False
        self.looked = time.monotonic()
        self.docks.look(self.ray, self.pool.docks, 2.0, watched)
        if statuses := self.docks.statuses:
            self.display.phase(statuses[0].last)
            self.display.look(statuses)
        self.fates.hear(self.docks.statuses)
        for why in self.fates.beginning("dock", "a process of").values():
            self.display.say(f"{why}; started again" if why.startswith("dock") else why)
        if lost := self.docks.lost(self.pool.nodes):
            raise HostLost(wait_report.silent(lost))
        for dock in self.docks.silent(self.limits.stopped):
            self.pool.examine(dock, self.limits)
        return True

    def fate(self, names: Sequence[str]) -> str:
        """What became of processes that are dead, in words: those that did not move first."""
        self.fates.hear(self.docks.statuses)
        killed = self.fates.of(names)
        others = [name for name in names if name not in killed]
        return "; ".join([*killed.values(), *([f"{' and '.join(others)} died{self.place(others)}"] if others else [])])

    def place(self, names: list[str]) -> str:
        """What these processes did when they were last heard of, in words."""
        told = wait_report.places(self._heard(), names)
        return f" {' and '.join(told)}" if told else f", after {self.display.last}" if self.display.last else ""

    def words(self, told: str = "") -> str:
        """Who waits for what: the wait-for graph in lines, without the wait that was `told` already."""
        return "".join(f"\n  {line}" for line in wait_report.waits(self._heard(), told))

    def _heard(self) -> list[Status]:
        """What the docks that can still tell say now, and the others said last."""
        with suppress(self.ray.exceptions.RayError):
            self.docks.look(self.ray, self.pool.docks, 2.0)
        return self.docks.statuses

    def _measured(self, number: int) -> bool:
        """Whether memory is looked at in this iteration: one that is not the first, if there are more."""
        return self.attempt.options.measure and number == min(1, self.plan.deploy.run.iterations - 1)

    def _evaluate(self, evaluation: Evaluation, iteration: int, sizes: dict[str, int]) -> None:
        self.display.phase(f"evaluating {evaluation.task}")
        task = self.carried.evaluation(evaluation, iteration, sizes[evaluation.data])
        seconds, reports = self._end(self._begin(task))
        figures: dict[str, float] = {}
        if evaluation.needs_rows:
            (figures,) = self._wait([self.functions.ask(0, "figures", task, lane=lane(task))])
        self._clear(task, reports)
        found = self.recorder.evaluation(evaluation, iteration, seconds, reports, figures)
        if not self.display.live:
            self.display.say(f"after {many(iteration, 'iteration')}, {evaluated(evaluation, found)}")
