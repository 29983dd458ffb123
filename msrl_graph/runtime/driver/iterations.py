"""The driver of a run: starts iterations and collects metrics.

No row passes through the driver. Invariant: whenever the driver dies, the files in the run's folder are complete,
because metrics lines are flushed, and checkpoints are renamed into place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...data.plan_paths import copy_to_host
from ...diagnostics import Fault
from ...diagnostics.quantities import plural
from ...diagnostics.surface import name_option
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..dock.messages import Status
from ..metrics.best import early_stop_reason
from ..metrics.display import Display, comparison_table
from ..metrics.health_checks import HealthChecks
from ..metrics.metrics_file import METRICS, restore_lines
from ..metrics.recorder import Recorder
from ..metrics.row_failures import failures
from ..metrics.tracking import Trackers
from ..process import fault_points
from ..process.heartbeat import Limits
from ..process.task import Task
from ..process.task_report import Loaded, Report, RunError
from ..weights import checkpoint
from . import function_hosts, wait_report
from .async_driver import AsyncPools
from .attempt_messages import Attempt, Result
from .changed_files import ChangedFiles
from .dock_monitor import DockMonitor, HostLost
from .driver_exit import LOOK
from .function_hosts import FunctionHosts, reference
from .function_tasks import FunctionTasks, lane
from .process_pool import ProcessPool
from .resume import program
from .run_state import RunState
from .signals import Signals
from .stalls import LOADING, DeathReports, ProcessStuck, StallClock, processes_in_user_code

AFTER = 2.0  # seconds in which the docks may report a wait before the driver does
STILL = 5.0  # seconds that the last iteration may stall after a signal; at least twice the longest iteration
PATIENCE = 15.0  # seconds that a disk may stall under the last checkpoint after a signal


class _Running(NamedTuple):
    """A task in progress: its start (perf_counter), and Ray references to its reports."""

    task: Task
    start: float
    streams: list[Any]


class Driver:
    """The driver of one attempt of a run."""

    async_pools: AsyncPools  # set once there are ranks

    def __init__(self, attempt: Attempt, pool: ProcessPool, display: Display, signals: Signals) -> None:
        import ray

        self.ray = ray
        self.attempt = attempt
        self.pool = pool
        self.display = display
        self.signals = signals
        self.plan: Plan = copy_to_host(attempt.plan)
        self.docks = DockMonitor()
        self.fates = DeathReports(attempt.folder)
        self.limits = Limits.for_deadline(self.plan.docks.deadline)
        self.looked = 0.0  # when the docks were last asked (time.monotonic)
        self.longest = 0.0  # seconds of the longest iteration
        self.unsaved = ""  # why the last requested checkpoint is missing
        self.edited = ChangedFiles(Path(attempt.folder), attempt.edited)

    @property
    def functions(self) -> FunctionHosts:
        assert self.pool.functions is not None
        return self.pool.functions

    def run(self) -> Result:
        display = self.display
        out = Path(self.attempt.out)
        self.pool.connect()
        self.signals.install()
        self.pool.start()
        loaded: dict[str, Loaded] = self._wait(self.pool.started, LOADING)[0]
        (out / "plan.json").write_text(self.attempt.plan.to_json(), encoding="utf-8")
        for remark in [f"{name}: {data.left_out}" for name, data in loaded.items() if data.left_out]:
            display.say(remark)
        resumed = self._bring(out) if self.attempt.resume else None
        trackers = Trackers(self.plan, out, Path(self.attempt.folder), display)
        self.recorder = Recorder(out, self.plan, self.attempt.lines, self.attempt.changed, trackers.add)
        trackers.begin(self.recorder.file.lines)
        result = Result("failed")
        try:
            result = self._train({name: data.rows for name, data in loaded.items()}, out, resumed)
        except KeyboardInterrupt:
            result = Result("interrupted")
            display.say(f"interrupted; the files of the run so far are in {self.attempt.url or out}")
            raise
        finally:
            display.close()
            trackers.close(result.kind)
            with suppress(OSError):
                self.recorder.close()
        if table := self.recorder.table():
            display.console.print(comparison_table(table))
        return result

    def _bring(self, out: Path) -> checkpoint.Manifest:
        """Copy a resumed checkpoint's files and metrics; return the checkpoint's manifest."""
        folder = Path(self.attempt.resume)
        manifest = checkpoint.read_manifest(folder)
        self.pool.checkpoints.bring(folder, manifest, self._wait_for_disk)
        if self.attempt.options.evaluate:
            return manifest
        copy = checkpoint.read_metrics_copy(folder, manifest)
        if copy is not None and (damage := restore_lines(out / METRICS, copy)):
            self.display.say(f"{out / METRICS} {damage}: its {plural(manifest.lines, 'line')} come from {folder}")
        return manifest

    def _train(self, sizes: dict[str, int], out: Path, resumed: checkpoint.Manifest | None) -> Result:
        plan = self.plan
        run = plan.deploy.run
        begin = resumed.iteration if resumed is not None else 0
        self.run_state = RunState(plan, sizes["source"])
        self.tasks = FunctionTasks(self.ray, plan, self.functions, self.run_state)
        if resumed is not None:
            self.run_state.restore(Path(self.attempt.resume), resumed)
            self._wait_for_disk([rank.resume.remote(self.attempt.resume, resumed) for rank in self.pool.ranks])
            self.display.resume(begin)
        if folder := self.attempt.options.replay:
            self._wait([rank.replay.remote(str(Path(folder).absolute())) for rank in self.pool.ranks])
        self.async_pools = AsyncPools(plan, self.pool.ranks, begin)
        for evaluation in plan.deploy.evaluations if not self.attempt.lines else ():
            self._evaluate(evaluation, begin, sizes)
        if self.attempt.options.evaluate:
            return self._done()
        health = HealthChecks(plan)
        for line in self.recorder.lines:  # lines that were checked before
            health.look(line)
        self.signals.training = True
        running = None
        end = begin
        end_reason = early_stop_reason(self.recorder.bests)
        for i in range(begin, begin if end_reason else run.iterations):
            current = running or self._begin(self.run_state.task(i), self._measured(i))
            last = i + 1 == run.iterations
            saves = bool(plan.deploy.saves) and (last or bool(run.save and (i + 1) % run.save == 0))
            evaluations = [e for e in plan.deploy.evaluations if e.every and (i + 1) % e.every == 0]
            # The ranks continue while this iteration's metrics are written, unless something else comes first.
            continues = not (last or saves or evaluations or self.attempt.options.record)
            # If the dock's capacity is bounded, rows of a later iteration must not take the space that this one needs.
            if continues and self.run_state.known_early and not plan.docks.capacity:
                self._prepare(self.run_state.task(i + 1))
            seconds, reports = self._end(current)
            self.longest = max(self.longest, seconds)
            self.run_state.count(i, reports)
            self.run_state.end_iteration(current.task, reports)
            continues = continues and not self.signals.asked
            running = self._begin(self.run_state.task(i + 1), self._measured(i + 1)) if continues else None
            if self._measured(i):
                self.recorder.memory(reports)
            line = self.recorder.training(i, seconds, reports, *self._clear(current.task, reports))
            self.display.count_waits(reports)
            for remark in (*self.edited.look(), *health.look(line)):
                self.display.say(remark)
            if ends := health.end_reason(line):
                raise RunError(ends)
            for evaluation in evaluations:
                self._evaluate(evaluation, i + 1, sizes)
            end = i + 1
            if running is not None:
                continue
            end_reason = early_stop_reason(bests := self.recorder.bests)
            if self.signals.asked or saves or end_reason or any(best.iteration == end for best in bests):
                self._checkpoint(end, out)
            if self.signals.asked:
                go_on = "" if self.unsaved else f"; continue with {name_option('resume', self.attempt.url or out)}"
                self.display.say(f"ended after {plural(i + 1, 'iteration')}{go_on}")
                return Result("interrupted", status=128 + self.signals.asked)
            if end_reason:
                break
        if end_reason:
            self.display.say(f"ended after {end} of {plural(run.iterations, 'iteration')}: {end_reason}")
        self.signals.training = False
        # After the checkpoint: a longer run, resumed from it, would not have made these evaluations.
        for evaluation in plan.deploy.evaluations if end else ():
            if not evaluation.every or end % evaluation.every:
                self._evaluate(evaluation, end, sizes)
        for worker in plan.graph.changing_workers:
            weights_folder = (out / "weights" / worker).absolute()
            self._wait_for_disk([rank.save.remote(worker, str(weights_folder)) for rank in self.pool.ranks])
            self.pool.checkpoints.collect(weights_folder)
        return self._done()

    def _done(self) -> Result:
        if self.attempt.url:
            self.pool.checkpoints.upload_rest(Path(self.attempt.out).absolute(), self.attempt.url)
        # All else is done, but a user who asked for checkpoints must learn that the last one is missing.
        return Result("failed", self.unsaved) if self.unsaved else Result("done")

    def _checkpoint(self, iteration: int, out: Path) -> None:
        """Write a checkpoint; if the disk fails, print a message and continue the run."""
        after = plural(iteration, "iteration")
        self.display.phase(f"saving after {after}")
        store = self.pool.checkpoints
        decides = program(self.plan)
        try:
            self.signals.saving = True
            saved = store.save(out, iteration, self.recorder, decides, self.run_state, self._wait_for_disk)
            self.unsaved = ""
        except OSError as error:
            checkpoints = checkpoint.list_checkpoints(out)
            older = f"{checkpoints[-1]} stays the last one" if checkpoints else "there is none yet"
            self.unsaved = f"the checkpoint after {after} could not be written: {error}; {older}"
            self.display.say(self.unsaved)
            return
        finally:
            self.signals.saving = False
        try:
            if self.attempt.url:
                self.display.phase(f"sending what was saved after {after}")
                store.send(saved, self.attempt.url)
        except (OSError, Fault) as error:
            self.unsaved = f"the checkpoint after {after} is only in {saved}: {error}"
            self.display.say(self.unsaved)

    def _wait_for_disk(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for calls that read or write weights; no time limit while bytes move."""
        return self._wait(calls, disk=True)

    def _open(self, task: Task) -> None:
        """Announce a task to the docks; raise HostLost if a host is lost (Ray would hang)."""
        fault_points.reach("driver", f"open {task.key}")
        self._wait([dock.open.remote(task) for dock in self.pool.docks])
        fault_points.reach("driver", f"opened {task.key}")

    def _begin(self, task: Task, measure: bool = False) -> _Running:
        """Start a task on all pools; start later iterations on the pools that run ahead."""
        start = time.perf_counter()
        self._prepare(task)
        if task.trains:
            self._go_ahead(task.number, self.async_pools.pipelined)
        request = self.async_pools.task_for_ranks(task)
        ranks = [rank.run.remote(request, measure) for rank in self.async_pools.in_step]
        if task.trains:
            self._go_ahead(task.number, self.async_pools.others)
        else:
            for pool in self.async_pools.others:
                self.async_pools.begin(pool, task, task.number, measure)
        fault_points.reach("driver", f"begun {task.key}")
        return _Running(task, start, [*ranks, *self.async_pools.reports.pop(task.key, ()), *self.tasks.calls_of(task)])

    def _go_ahead(self, now: int, pools: Sequence[str]) -> None:
        """Start iterations that `pools` may begin while updates compute iteration `now`."""
        last = now + 1 if self.signals.asked else self.plan.deploy.run.iterations
        for pool, number in self.async_pools.due(now, last, self.run_state.knows_data, pools):
            task = self.run_state.task(number)
            if number > now:
                self._prepare(task)
            self.async_pools.begin(pool, task, now, self._measured(number))

    def _prepare(self, task: Task) -> None:
        """Announce a task and start its functions early, so that its prompts are ready."""
        if task.key not in self.tasks.calls:
            self._open(task)
            self.tasks.begin(task)

    def _end(self, running: _Running) -> tuple[float, list[Report]]:
        """Wait until a task has ended; return its duration in seconds and its reports."""
        self.display.begin(running.task)
        reports = self._wait(running.streams, training=running.task.number if running.task.trains else -1)
        number = running.task.number
        pools = self.async_pools
        while running.task.trains and not self.signals.asked and pools.must_begin(number, pools.others):
            if not (under_way := pools.pending_references()):
                break
            self._wait(under_way, training=number)
        self.tasks.end(running.task)
        fault_points.reach("driver", f"ended {running.task.key}")
        return time.perf_counter() - running.start, reports

    def _clear(self, task: Task, reports: list[Report]) -> tuple[dict[str, int], int]:
        """Drop an ended task's rows; return bytes per dock action, and the message count."""
        fault_points.reach("driver", f"clear {task.key}")
        for remark in [*(text for report in reports for text in report.remarks), *failures(self.plan, task, reports)]:
            self.display.say(remark)
        if self.attempt.options.record:
            out = str(Path(self.attempt.out).absolute())
            call = self.functions.ask(0, "record", task, out, lane=lane(task))
            for error in filter(None, self._wait([call])):
                self.display.say(error)
        moved: dict[str, int] = {}
        for report in reports:
            for action, size in report.moved.items():
                moved[action] = moved.get(action, 0) + size
        messages = sum(self._wait([dock.drop.remote(task.key) for dock in self.pool.docks]))
        fault_points.reach("driver", f"cleared {task.key}")
        return moved, messages

    def _wait(self, calls: Sequence[Any], deadline: float = 0.0, training: int = -1, disk: bool = False) -> list[Any]:
        """Wait for calls, and start iterations after `training` meanwhile (-1: none).

        Raises if a call fails, a process cannot be replaced, or no row (`disk`: no byte) moves for `deadline` seconds.
        """
        pending = list(calls)
        stall = StallClock(disk)
        counted = not deadline
        deadline = deadline or self.plan.docks.deadline
        often = min(LOOK / 5 if self.attempt.ports.open else LOOK, deadline)
        while pending:
            others = [*self.async_pools.pending_references(), *self.tasks.awaited_references()] if training >= 0 else []
            watched = list(dict.fromkeys([*map(reference, pending), *others]))
            ended, _ = self.ray.wait(watched, num_returns=1, timeout=often)
            for name in self.functions.replace_dead():  # calls of a replaced process have new references now
                self.display.say(f"{self.describe_deaths([name])}; started again")
                self.display.restarted(name)
                stall.note_progress()
            done = [call for call in pending if reference(call) in ended]
            self.ray.get([reference(call) for call in done])
            if training >= 0:
                for task, report in self.async_pools.take_ended(self.ray, ended):
                    self.run_state.take_report(task, report)
                self.tasks.record_ended(ended)
                self._go_ahead(training, self.async_pools.others)
            pending = [call for call in pending if call not in done]
            if self._look(not done):
                stall.hear(self.docks.statuses)
            if done:
                stall.note_progress()
            progress = "byte was read or written" if disk else "row has moved"
            if counted and self.signals.asked and (seconds := stall.seconds(self.signals.since)) > self._patience(disk):
                self.display.say(f"for {seconds:.0f} s no {progress}: ending at once{self.describe_waits()}")
                raise KeyboardInterrupt
            if stall.seconds() > deadline + AFTER:
                # The dock would have reported a wait by now: this is work that does not end.
                raise self._stuck_error(f"for {deadline:g} s no {progress}", pending)
        return list(self.ray.get([reference(call) for call in calls]))

    def _stuck_error(self, message: str, pending: Sequence[Any]) -> RunError:
        """Return RunError if user code is stuck, else ProcessStuck, which can be retried."""
        waits = self.describe_waits()
        last = ", ".join(f"`{status.last}`" for status in self.docks.statuses if status.last)
        if self.processes_in_user_code():
            return RunError(f"{message}; {last or 'a function'} took rows last and has not returned{waits}")
        busy = self.pool.owners_of([reference(call) for call in pending])
        return ProcessStuck(f"{message}; {' and '.join(busy) or 'a process'} has not returned{waits}")

    def processes_in_user_code(self) -> list[str]:
        """Return the processes that run the user's code while other processes wait."""
        calls = self.functions.open_calls if self.pool.functions else []
        busy = {function_hosts.name(*self.functions.places[i]) for i, pending in enumerate(calls) if pending}
        busy |= {f"rank {rank}" for rank in range(len(self.pool.ranks))}
        return processes_in_user_code(self.plan, self.docks.statuses, busy)

    def _patience(self, disk: bool) -> float:
        """Return the longest allowed stall, in seconds, after a signal to end the run."""
        return max(PATIENCE if disk else STILL, 2 * self.longest)

    def _look(self, idle: bool) -> bool:
        """Query the docks if `idle` or if users watch the run; raise if a host is lost."""
        watched = bool(self.display.wanted())
        if not watched and not (idle and time.monotonic() - self.looked >= 0.8 * LOOK):
            return False
        self.looked = time.monotonic()
        self.docks.look(self.ray, self.pool.docks, 2.0, watched)
        if statuses := self.docks.statuses:
            self.display.phase(statuses[0].last)
            self.display.look(statuses)
        self.fates.hear(self.docks.statuses)
        for reason in self.fates.take_reasons_by_prefix("dock", "a process of").values():
            self.display.say(f"{reason}; started again" if reason.startswith("dock") else reason)
        if lost := self.docks.lost_hosts(self.pool.nodes):
            raise HostLost(wait_report.describe_lost_hosts(lost))
        for dock in self.docks.silent_docks(self.limits.stopped):
            self.pool.examine(dock, self.limits)
        return True

    def describe_deaths(self, names: Sequence[str]) -> str:
        """Describe how processes died; processes killed for not responding come first."""
        self.fates.hear(self.docks.statuses)
        killed = self.fates.take_reasons(names)
        others = [name for name in names if name not in killed]
        died = [f"{' and '.join(others)} died{self.describe_places(others)}"] if others else []
        return "; ".join([*killed.values(), *died])

    def describe_places(self, names: list[str]) -> str:
        """Describe what each process did, according to its last report to a dock."""
        places = wait_report.places(self._ask_docks(), names)
        return f" {' and '.join(places)}" if places else f", after {self.display.last}" if self.display.last else ""

    def describe_waits(self, reported: str = "") -> str:
        """Describe each waiting process in a line; skip waits that `reported` describes."""
        return "".join(f"\n  {line}" for line in wait_report.waits(self._ask_docks(), reported))

    def _ask_docks(self) -> list[Status]:
        with suppress(self.ray.exceptions.RayError):
            self.docks.look(self.ray, self.pool.docks, 2.0)
        return self.docks.statuses

    def _measured(self, number: int) -> bool:
        """Return whether to measure memory: in iteration 1, or in the only iteration."""
        return self.attempt.options.measure_memory and number == min(1, self.plan.deploy.run.iterations - 1)

    def _evaluate(self, evaluation: Evaluation, iteration: int, sizes: dict[str, int]) -> None:
        self.display.phase(f"evaluating {evaluation.task}")
        task = self.run_state.evaluation(evaluation, iteration, sizes[evaluation.data])
        seconds, reports = self._end(self._begin(task))
        needed = [self.functions.ask(0, "figures", task, lane=lane(task))] if evaluation.needs_rows else []
        figures = dict[str, float](*self._wait(needed))
        self._clear(task, reports)
        self.recorder.evaluation(evaluation, iteration, seconds, reports, figures)
