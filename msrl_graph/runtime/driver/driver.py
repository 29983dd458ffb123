"""The driver of a run: starts iterations and collects metrics. No sample passes through it.

Invariant: what it leaves in the run's folder is whole whenever it dies: lines of metrics are flushed, checkpoints
renamed into place. It tells the supervisor how it ended. When the supervisor is gone it is killed, with all that it
started (processes.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...diagnostics import Fault
from ...emit.page import many
from ...ir.located import here
from ...ir.plan import Evaluation, Plan
from ..dock.host import DockTimeout
from ..dock.wire import Status
from ..metrics.display import Display, Screen, Tail, comparison
from ..metrics.record import Recorder
from ..metrics.serve import Watching
from ..metrics.symptoms import Symptoms
from ..process import points
from ..process.report import Loaded, RankFailed, Report, RunError, Unjoined
from ..process.task import Task
from ..weights import checkpoint
from . import words
from .carried import Carried
from .devices import TooFew
from .docks import Docks, HostLost
from .function_hosts import Call, FunctionHosts, reference
from .leaving import LOOK, leave, watch
from .pool import Pool
from .probe import Silent
from .signals import HEEDED, Signals
from .supervisor import Attempt, Result

# Seconds that a driver leaves the docks to tell of a wait before it does.
AFTER = 2.0
# Seconds that an iteration which is to be the last may stand still, twice the longest so far where that is more.
STILL = 5.0
DISK = 3600.0  # seconds that reading or writing weights may take


def main(folder: str) -> int:
    """Runs the attempt that the supervisor described in `folder`."""
    attempt = msgspec.json.decode((Path(folder) / "attempt.json").read_bytes(), type=Attempt)
    # What Ray's own threads write to stderr goes where stdout goes, into the driver's log; what a person reads goes to
    # the old one.
    screen = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(1, 2)
    console = Screen(file=screen)
    console = console if console.is_terminal else Screen(file=screen, width=120)
    display = Display(attempt.plan, console, attempt.options.watch)
    display.facts.restarts["run"] = attempt.restarts
    watching = Watching(attempt.plan, display.facts, attempt.ports)
    signals = Signals(display.say)
    pool = Pool(attempt, display.say)
    over = threading.Event()
    threading.Thread(target=watch, args=(attempt, pool, over), daemon=True).start()
    tail = Tail(Path(attempt.out) / "logs", display.say) if attempt.options.verbose else None
    try:
        (Path(folder) / "ready").touch()
        result = _result(attempt, pool, display, signals)
    except KeyboardInterrupt:
        result = Result("interrupted", status=128 + signals.last)
    except Exception as error:
        traceback.print_exc(file=sys.stdout)  # which is the driver's log
        result = Result("failed", f"{type(error).__name__}: {error}; more is in logs/driver.log")
    if tail is not None:
        tail.close()
    display.close()
    watching.end(result.kind, result.message)
    over.set()
    for number in HEEDED:
        signal.signal(number, signal.SIG_IGN)
    if pool.attached:
        pool.close()
    for stream in (sys.stdout, sys.stderr, screen):
        with suppress(OSError):
            stream.flush()
    leave(attempt, result)


def _result(attempt: Attempt, pool: Pool, display: Display, signals: Signals) -> Result:
    import ray

    driver = Driver(attempt, pool, display, signals)
    try:
        return driver.whole()
    # First: what Ray raises for a process's Fault or RunError is one too, in Ray's words.
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, Fault):
            return Result("fault", diagnostics=list(cause.diagnostics))
        # An engine that raised in a collective may have lost its partner; whatever else raised is the reason itself.
        joint = isinstance(cause, RankFailed) and cause.joint
        if isinstance(cause, RunError) and not isinstance(cause, DockTimeout | Unjoined) and not joint:
            return Result("failed", str(cause))
        waits = driver.words(str(cause))
        if isinstance(cause, DockTimeout):
            return Result("failed", f"{cause}{waits}")
        # A rank whose partner is gone learns of it before Ray does, if a whole host is gone: long before.
        dead = pool.dead(20.0 if joint or isinstance(cause, RuntimeError | Unjoined) else 2.0)
        if dead or isinstance(error, ray.exceptions.RayActorError):
            gone = pool.gone()
            lost = f"; {words.silent(gone)}" if gone else ""
            return Result("died", f"{' and '.join(dead) or 'a process of Ray'} died{driver.place(dead)}{lost}{waits}")
        if isinstance(cause, Unjoined):
            return Result("died", str(cause))
        if joint:
            return Result("failed", str(cause))
        told = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
        return Result("failed", f"{told}{waits}")
    except Silent as fault:
        told = fault.diagnostics[0].message
        return Result("died", told) if attempt.restarts else Result("fault", diagnostics=list(fault.diagnostics))
    except Fault as fault:
        hosts = fault.hosts if isinstance(fault, TooFew) else 0
        return Result("fault", diagnostics=list(fault.diagnostics), hosts=hosts)
    except HostLost as error:
        return Result("died", f"{error}{driver.words()}")
    except (RunError, OSError, checkpoint.Unsound) as error:
        return Result("failed", str(error))


class _Running(NamedTuple):
    """A task under way: when it began (perf_counter), and a reference to each process's report."""

    task: Task
    start: float
    streams: list[Any]


class Driver:
    """One attempt."""

    def __init__(self, attempt: Attempt, pool: Pool, display: Display, signals: Signals) -> None:
        import ray

        self.ray = ray
        self.attempt, self.pool, self.display, self.signals = attempt, pool, display, signals
        self.plan: Plan = here(attempt.plan)
        self.docks = Docks()
        self.looked = 0.0  # when the docks were asked (time.monotonic)
        self.longest = 0.0  # seconds of an iteration
        self.unsaved = ""  # why the last checkpoint that was asked for is not there
        self.ahead: dict[str, list[Call]] = {}  # by key: the functions' reports of a task that the ranks have not begun

    @property
    def functions(self) -> FunctionHosts:
        assert self.pool.functions is not None
        return self.pool.functions

    def whole(self) -> Result:
        pool, display, out = self.pool, self.display, Path(self.attempt.out)
        pool.connect()
        self.signals.heed()
        pool.start()
        loaded: dict[str, Loaded] = self._wait(pool.started, DISK)[0]
        (out / "plan.json").write_text(self.attempt.plan.to_json(), encoding="utf-8")
        for name, data in loaded.items():
            if data.left_out:
                display.say(f"{name}: {data.left_out}")
        self.recorder = Recorder(out, self.plan, self.attempt.lines)
        display.knows(self.recorder.lines, self.recorder.evaluations)
        try:
            result = self._train({name: data.rows for name, data in loaded.items()}, out)
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

    def _train(self, sizes: dict[str, int], out: Path) -> Result:
        plan, run, begin = self.plan, self.plan.deploy.run, 0
        self.carried = Carried(plan, sizes["source"])
        if self.attempt.resume:
            folder = Path(self.attempt.resume)
            manifest = checkpoint.manifest_of(folder)
            self.pool.parted.bring(folder, manifest, self._written)
            self.carried.restore(folder, manifest)
            begin = manifest.iteration
            self._wait([r.resume.remote(str(folder), manifest) for r in self.pool.ranks], DISK)
            self.display.resume(begin)
        if self.attempt.options.replay:
            self._wait([r.replay.remote(str(Path(self.attempt.options.replay).absolute())) for r in self.pool.ranks])
        if not self.attempt.lines:
            for evaluation in plan.deploy.evaluations:
                self._evaluate(evaluation, 0, sizes)
        scalars = [c.name for c in plan.graph.columns if c.element == "f32" and not c.dims]
        symptoms = Symptoms(plan)
        for line in self.recorder.lines:  # of what was told already
            symptoms.look(line)
        self.signals.training = True
        running = None
        for i in range(begin, run.iterations):
            running = running or self._begin(self.carried.task(i), self._measured(i))
            done, last = running, i + 1 == run.iterations
            saves = bool(run.save) and (last or (i + 1) % run.save == 0)
            evaluations = [e for e in plan.deploy.evaluations if e.every and (i + 1) % e.every == 0]
            # The ranks go on while this iteration's figures are written down, unless something else has its turn first.
            goes_on = not (last or saves or evaluations or self.attempt.options.record)
            # Where the dock's capacity is bounded, rows of an iteration that comes must not take what this one needs.
            if goes_on and self.carried.known and not plan.docks.capacity:
                self._prepare(self.carried.task(i + 1))
            seconds, reports = self._end(done)
            self.longest = max(self.longest, seconds)
            self.carried.after(done.task, reports)
            goes_on = goes_on and not self.signals.asked
            running = self._begin(self.carried.task(i + 1), self._measured(i + 1)) if goes_on else None
            if self._measured(i):
                self.recorder.memory(reports)
            line = self.recorder.training(i, seconds, reports, *self._clear(done.task, reports))
            self.display.iteration(line, scalars, reports)
            for remark in symptoms.look(line):
                self.display.say(remark)
            for evaluation in evaluations:
                self._evaluate(evaluation, i + 1, sizes)
            if running is not None:
                continue
            if self.signals.asked or saves:
                self._checkpoint(i + 1, out)
            if self.signals.asked:
                go_on = "" if self.unsaved else f"; go on with --resume {self.attempt.url or out}"
                self.display.say(f"ended after {many(i + 1, 'iteration')}{go_on}")
                return Result("interrupted", status=128 + self.signals.asked)
        self.signals.training = False
        # After the checkpoint: a longer run that is resumed from it would not have had these.
        for evaluation in plan.deploy.evaluations if run.iterations else ():
            if not evaluation.every or run.iterations % evaluation.every:
                self._evaluate(evaluation, run.iterations, sizes)
        for worker in dict.fromkeys(plan.graph.node(n.name).worker for n in plan.graph.verb("update")):
            folder = (out / "weights" / worker).absolute()
            self._wait([r.save.remote(worker, str(folder)) for r in self.pool.ranks], DISK)
            self.pool.parted.collect(folder)
        if self.attempt.url:
            self.pool.parted.leave(out.absolute(), self.attempt.url)
        # All else is done; but who asked for checkpoints must not take this run for one that has its last.
        return Result("failed", self.unsaved) if self.unsaved else Result("done")

    def _checkpoint(self, iteration: int, out: Path) -> None:
        """Writes a checkpoint; where the disk does not take it, the run goes on with the last one."""
        self.display.phase(f"saving after {many(iteration, 'iteration')}")
        try:
            program = checkpoint.program(self.plan)
            saved = self.pool.parted.save(out, iteration, self.recorder.written, program, self.carried, self._written)
            self.unsaved = ""
        except OSError as error:
            kept = checkpoint.found(out)
            older = f"{kept[-1]} stays the last one" if kept else "there is none yet"
            self.unsaved = f"the checkpoint after {many(iteration, 'iteration')} could not be written: {error}; {older}"
            self.display.say(self.unsaved)
            return
        try:
            if self.attempt.url:
                self.display.phase(f"sending what was saved after {many(iteration, 'iteration')}")
                self.pool.parted.send(saved, self.attempt.url)
        except (OSError, Fault) as error:
            self.unsaved = f"the checkpoint after {many(iteration, 'iteration')} lies in {saved} alone: {error}"
            self.display.say(self.unsaved)

    def _written(self, asked: Sequence[Any]) -> list[Any]:
        """The results of what reads or writes weights."""
        return self._wait(asked, DISK)

    def _open(self, task: Task) -> None:
        """Makes a task known to the docks."""
        points.reach("driver", f"open {task.key}")
        self._wait([d.open.remote(task) for d in self.pool.docks])  # Ray would wait for ever for one of a lost host
        points.reach("driver", f"opened {task.key}")

    def _begin(self, task: Task, measure: bool = False) -> _Running:
        """Starts the streams of all pools for one task."""
        start = time.perf_counter()
        if task.key not in self.ahead:
            self._prepare(task)
        ranks = [r.run.remote(task, measure) for r in self.pool.ranks]
        points.reach("driver", f"begun {task.key}")
        return _Running(task, start, [*ranks, *self.ahead.pop(task.key)])

    def _prepare(self, task: Task) -> None:
        """Opens a task and starts the hosts' functions on it: ahead of the ranks where it follows without anything
        between, so that its prompts are there when it begins."""
        self._open(task)
        tables = self.carried.tables() if task.trains else {}
        hosts = range(self.plan.cluster.nodes)
        self.ahead[task.key] = [self.functions.ask(host, "run", task, {} if host else tables) for host in hosts]

    def _end(self, running: _Running) -> tuple[float, list[Report]]:
        """Waits for the streams: seconds, reports."""
        self.display.begin(running.task)
        reports = self._wait(running.streams)
        points.reach("driver", f"ended {running.task.key}")
        return time.perf_counter() - running.start, reports

    def _clear(self, task: Task, reports: list[Report]) -> tuple[dict[str, int], int]:
        """Forgets the rows of a task that has ended; bytes moved by the dock, and the messages that it took."""
        pool = self.pool
        points.reach("driver", f"clear {task.key}")
        for remark in [r for report in reports for r in report.remarks]:
            self.display.say(remark)
        if task.trains and self.attempt.options.record:
            asked = [self.functions.ask(0, "record", task, str(Path(self.attempt.out).absolute()))]
            for wrong in filter(None, self._wait(asked)):
                self.display.say(wrong)
        moved: dict[str, int] = {}
        for report in reports:
            for what, size in report.moved.items():
                moved[what] = moved.get(what, 0) + size
        messages = sum(self._wait([d.drop.remote(task.key) for d in pool.docks]))
        points.reach("driver", f"cleared {task.key}")
        return moved, messages

    def _wait(self, asked: Sequence[Any], deadline: float = 0.0) -> list[Any]:
        """The results, of Ray's references and of calls of function hosts. It fails as soon as one of them fails, or
        a process dies that is not replaced; and when for `deadline` seconds (0: the dock's) nothing has ended and no
        row has moved. Meanwhile it keeps the display alive."""
        left, moves, since, rows = list(asked), -1, time.monotonic(), not deadline
        deadline = deadline or self.plan.docks.deadline
        often = min(LOOK / 5 if self.attempt.ports.open else LOOK, deadline)
        while left:
            ended, _ = self.ray.wait([reference(x) for x in left], num_returns=1, timeout=often)
            for host in self.functions.mend():  # the calls of a process that died have other references now
                name = f"functions of host {host}"
                self.display.say(f"{name} died{self.place([name])}; started again")
                self.display.restarted(name)
            done = [x for x in left if reference(x) in ended]
            self.ray.get([reference(x) for x in done])
            left = [x for x in left if x not in done]
            now = moves
            if self._look(not done):
                now = sum(s.moves for s in self.docks.statuses)
            if done or now != moves:
                moves, since = now, time.monotonic()
            elif (
                rows
                and self.signals.asked
                and (still := time.monotonic() - max(since, self.signals.since)) > self._patience()
            ):
                self.display.say(f"for {still:.0f} s no row has moved: ending at once{self.words()}")
                raise KeyboardInterrupt
            elif time.monotonic() - since > deadline + AFTER:
                # The dock's own deadline would have told of a wait by now: this is work that does not end.
                last = ", ".join(f"`{s.last}`" for s in self.docks.statuses if s.last)
                raise RunError(
                    f"for {deadline:g} s no row has moved; {last} took rows last and has not come back{self.words()}"
                )
        return list(self.ray.get([reference(x) for x in asked]))

    def _patience(self) -> float:
        """How long an iteration may stand still after which the run is to end: what takes minutes each time is work,
        and ends."""
        return max(STILL, 2 * self.longest)

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
        if lost := self.docks.lost(self.pool.nodes):
            raise HostLost(words.silent(lost))
        return True

    def place(self, names: list[str]) -> str:
        """What these processes did when they were last heard of, in words."""
        told = words.places(self._heard(), names)
        return f" {' and '.join(told)}" if told else f", after {self.display.last}" if self.display.last else ""

    def words(self, told: str = "") -> str:
        """Who waits for what: the wait-for graph in lines, without the wait that was `told` already."""
        return "".join(f"\n  {line}" for line in words.waits(self._heard(), told))

    def _heard(self) -> list[Status]:
        """What the docks that can still tell say now, and the others said last."""
        with suppress(self.ray.exceptions.RayError):
            self.docks.look(self.ray, self.pool.docks, 2.0)
        return self.docks.statuses

    def _measured(self, number: int) -> bool:
        """Whether memory is looked at in this iteration: one that is not the first, if there are more."""
        return self.attempt.options.measure and number == min(1, self.plan.deploy.run.iterations - 1)

    def _evaluate(self, evaluation: Evaluation, iteration: int, sizes: dict[str, int]) -> None:
        self.display.phase(f"evaluating {evaluation.data}")
        task = Task(evaluation.data, iteration, sizes[evaluation.data], evaluation.samples, 0, self.carried.of_run())
        seconds, reports = self._end(self._begin(task))
        self._clear(task, reports)
        found = self.recorder.evaluation(evaluation.data, iteration, seconds, reports, evaluation.report)
        if not self.display.live:
            shown = "  ".join(f"{k} {v:.3f}" for k, v in found.items())
            self.display.say(f"after {many(iteration, 'iteration')}, {evaluation.data}: {shown}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
