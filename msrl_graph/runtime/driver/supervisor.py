"""`run`: one process that watches another drive the run, and starts it again where something died.

Invariant: everything that can be known to be wrong is told before a process is started; when `run` returns or raises,
or this process is killed, no process and no temporary folder of it is left (processes.py). The driver (driver.py) is a
process of its own since Ray ends the process that drives it when its servers are lost. It ends when this process does
(its end of a pipe closes), and holds the lock of the results' folder until then.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from ...compiler.pipeline import with_hosts
from ...diagnostics import UNFIT, Diagnostic, Fault
from ...emit.humanize import many
from ...files import private
from ...ir.plan import Plan
from ..metrics.display import Screen
from ..metrics.ports import ListeningSockets, Ports
from ..metrics.recorder import METRICS, read, whole_lines
from ..process import shipped_files
from ..process.cluster_join import NoResources, own_ray
from ..process.heartbeat import Limits
from ..process.processes import MARK, Temporary, nicer, stopped, sweep
from ..weights import checkpoint
from . import remote_folder, run_inputs, shipping, watchdog
from .attempt import PLAIN, PreparedRun, WatchOptions, prepare
from .callbacks import CallbackFailed, MetricsFollower, OnIteration
from .changed_files import ChangedFiles
from .outcome import Interrupted, Outcome, RunFailed, outcome_of
from .run_folder import DRIVER_MODULE, check_free, check_links, check_own, clear, lock, make
from .run_inputs import DigestThread

# -P: the folder in which a run is started may be anybody's, and no module is to come from it.
PROGRAM = ("-P", "-m", DRIVER_MODULE)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 20.0  # seconds from a signal that asks to stop at once until the driver is killed


@dataclass(frozen=True)
class Attempt:
    """What a driver is given: `folder` is the temporary one, `answer` the open file that its result goes to, `resume` a
    checkpoint (or nothing), `lines` how many lines of the metrics in `out` belong to it. `restarts`: how many there
    were before it; `url`: where `out` is to lie in the end (or nothing)."""

    plan: Plan
    out: str
    folder: str
    answer: int
    resume: str
    lines: int
    options: WatchOptions
    ports: Ports
    restarts: int
    url: str = ""
    patience: float = 0.0  # seconds for which it waits for hosts that are not there
    edited: tuple[str, ...] = ()  # files that were changed since the run began, and that it has told of
    parent: int = -1  # a pipe, whose other end the supervisor has
    lock: int = -1  # of the folder `out`
    changed: tuple[str, ...] = ()  # what has changed since the checkpoint of the run that it goes on with
    data: dict[str, str] = field(default_factory=dict)  # digests of sampled blocks, as the run began


@dataclass(frozen=True)
class Result:
    """How an attempt ended: done, fault, failed, died (a process of it, and it may be tried again) or interrupted."""

    kind: str
    message: str = ""
    status: int = 0
    diagnostics: list[Diagnostic] = field(default_factory=list)
    hosts: int = 0  # of a fault for want of hosts: how many there are


def run(
    plan: Plan,
    out: Path | str | None = None,
    resume: str = "",
    options: WatchOptions = PLAIN,
    stderr: IO[str] | None = None,
    on_iteration: OnIteration | None = None,
) -> Outcome:
    """Runs a plan to its end and writes metrics, curve, trace, logs, checkpoints and weights under `out` (default: a
    new folder under runs/, or with `resume`, the folder of a run or of a checkpoint, the one that is gone on with).
    What is told on the way goes to `stderr`; `on_iteration` is called with the metrics of each iteration.

    Raises Fault for input that cannot be run (NoResources for machines that lack what it asks for), RunFailed when a
    process died more often than the plan's `restarts`, Interrupted when SIGINT, SIGTERM or SIGHUP ended it, and
    CallbackFailed when `on_iteration` raised.
    """
    made = prepare(plan, out, resume, options)
    return Supervisor(made, options, stderr, on_iteration=on_iteration).whole()


class Supervisor:
    """Runs what was prepared; `driver` are Python's arguments before a driver's folder."""

    def __init__(
        self,
        made: PreparedRun,
        options: WatchOptions,
        stderr: IO[str] | None,
        driver: Sequence[str] = PROGRAM,
        on_iteration: OnIteration | None = None,
    ) -> None:
        self.plan = made.plan
        self.made = made
        self.options = options
        self.stderr = stderr
        self.driver = driver
        self.console = Screen(file=stderr or sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.child: subprocess.Popen[bytes] | None = None
        self.lock = -1  # of the results' folder
        self.limits = Limits.of(made.plan.docks.deadline)
        self.ready = Path()  # is there once the driver heeds signals
        self.asked: list[int] = []  # signals so far
        self.killer: threading.Timer | None = None
        self.files: dict[str, shipped_files.ShippedFile] = {}  # those that every process takes as they are now
        self.edited: tuple[str, ...] = ()  # those of them that were changed since, and told of
        self.first = made.manifest.iteration if made.manifest else 0  # iteration that the run begins with
        self.follower = (
            MetricsFollower(made.folder.absolute() / METRICS, on_iteration, self.first) if on_iteration else None
        )

    def whole(self) -> Outcome:
        with closing(ListeningSockets(self.options.watch, self.options.metrics)) as self.doors:
            return self._whole()

    def _whole(self) -> Outcome:
        fresh = not self.made.folder.exists()
        out = self.made.folder if self.made.goes_on else make(self.plan, self.made.folder, self.made.stated)
        for warning in self.made.warnings:
            self.console.print(f"warning[{warning.code}]: {warning.message}; {warning.help}")
        for line in self.doors.lines:
            self.console.print(line)
        check_own(out)
        with lock(out) as self.lock, self._signals():
            check_links(out)
            if not (self.made.goes_on or self.options.overwrite):
                check_free(out)
            try:
                if self.options.overwrite and self.made.url and not self.made.goes_on:
                    remote_folder.clear(self.made.url)
                elif self.options.overwrite:
                    clear(out, self.made.begin if self.made.goes_on else None)
                self._begin(out)
                self.files = shipping.files(self.plan, shipped=bool(os.environ.get("RAY_ADDRESS")))
                with suppress(OSError):  # a full disk: checkpoints have no room either
                    run_inputs.write(out, self.made.inputs)
                before = run_inputs.recorded(self.made.manifest.inputs) if self.made.manifest else None
                with closing(DigestThread(out, self.made.inputs, before, self.console.print)):
                    return self._finished(out)
            except Fault:
                if fresh or self.made.url:
                    shutil.rmtree(out, ignore_errors=True)
                raise

    def _finished(self, out: Path) -> Outcome:
        """All attempts; where the run's folder is at a URL, what they left is put there, however they end."""
        url = self.made.url
        wrong = ""
        try:
            outcome = self._attempts(out)
        except (RunFailed, Interrupted, CallbackFailed):
            self._sent(out)
            raise
        wrong = self._sent(out)
        if wrong:
            raise RunFailed(wrong)
        return replace(outcome, folder=url) if url else outcome

    def _sent(self, out: Path) -> str:
        """Puts up what is left of a run; what went wrong."""
        wrong = ""
        try:
            if self.made.url:
                remote_folder.finish(out, self.made.url)
        except (Fault, OSError) as error:
            said = error.diagnostics[0].message if isinstance(error, Fault) else str(error)
            wrong = f"the files of the run are in {out}, and not all of them at {self.made.url}: {said}"
            self.console.print(wrong)
        for copy in self.made.copies:
            if copy != out:
                shutil.rmtree(copy, ignore_errors=True)
        return wrong

    def _begin(self, out: Path) -> None:
        """Where a run goes on in another folder, the lines so far are its lines too."""
        begin = self.made.begin
        manifest = self.made.manifest
        if begin is None or manifest is None or self.made.goes_on or self.options.evaluate:
            return
        lines, _ = whole_lines(begin.parent.parent / METRICS)
        (out / METRICS).write_bytes(b"".join(lines[: manifest.lines]))

    def _attempts(self, out: Path) -> Outcome:
        limit = self.plan.deploy.run.restarts
        made = self.made
        begin = (made.begin, made.manifest) if made.begin and made.manifest else None
        known = begin
        before = _size(out / METRICS)
        died = ""
        for restarts in itertools.count(1):
            sweep()
            if restarts > 1 and (other := run_inputs.edited(made.inputs)):
                raise RunFailed(f"{died}, and {other}: the run cannot go on as it began{self._left(out)}")
            result = self._attempt(out, known, restarts - 1, self.plan)
            if restarts > 1 and result.hosts:
                result = self._without(result, out, known, restarts - 1)
            raised = self.follower.error if self.follower is not None else None
            done = result.kind == "done" and raised is None
            if not done and (self.asked or (result.kind == "interrupted" and raised is None)):
                raise Interrupted(128 + self.asked[0] if self.asked else result.status, self._when(out)) from raised
            if raised is not None:
                raised.add_note(f"the run ended {self._when(out)}")
                raise CallbackFailed(raised)
            if done:
                outcome, wrong = outcome_of(self.plan, out, self.options.evaluate)
                if wrong:
                    self.console.print(f"{out / METRICS}: {wrong}, and what follows is not reported")
                return outcome
            known = checkpoint.newest(out) or begin
            if result.kind == "fault":
                if restarts == 1 and _size(out / METRICS) == before:
                    # Nothing was computed: it is the input that is told about, and no folder stays.
                    missing = any(d.code in UNFIT for d in result.diagnostics)
                    raise (NoResources if missing else Fault)(*result.diagnostics)
                result = Result("failed", "; ".join(d.message for d in result.diagnostics))
            if result.kind == "failed" or restarts > limit:
                tired = f" (started anew {limit} times already)" if result.kind == "died" and limit else ""
                raise RunFailed(_first(result.message, f"{tired}{self._left(out)}"))
            done_before = many(known[1].iteration, "iteration") if known else ""
            where = f"from the checkpoint after {done_before}" if known else "from the beginning, without a checkpoint"
            died = result.message.partition("\n")[0]
            self.console.print(_first(result.message, f"; starting anew {where} ({restarts} of {limit})"))
        raise AssertionError

    def _when(self, out: Path) -> str:
        """When a run ended that was to go on, and where its files are."""
        lines, _ = whole_lines(out / METRICS)
        done = sum("iteration" in read(line) for line in lines)
        if done > self.first:
            return f"after {many(done, 'iteration')}{self._left(out)}"
        return f"before iteration {self.first} had ended: nothing was trained"

    def _left(self, out: Path) -> str:
        """Where the files of a run are that failed, and how to go on with it."""
        at = self.made.url or out
        kept = f"; go on from its last checkpoint with --resume {at}" if checkpoint.found(out) else ""
        return f"; the files of the run so far are in {at}{kept}"

    def _without(
        self, result: Result, out: Path, known: tuple[Path, checkpoint.Manifest] | None, restarts: int
    ) -> Result:
        """Goes on without the hosts that a run has lost, where its program fits those that are left, else once they
        are back."""
        left = many(result.hosts, "host")
        patience = self.plan.docks.deadline
        if (fewer := with_hosts(self.plan, result.hosts)) is not None:
            self.console.print(f"{left} of {self.plan.cluster.nodes} left: planned anew for {left}")
            return self._attempt(out, known, restarts, fewer)
        self.console.print(
            f"{left} of {self.plan.cluster.nodes} left, and the program states layouts for more: waiting "
            f"{patience:g} s for the others"
        )
        return self._attempt(out, known, restarts, self.plan, patience)

    def _attempt(
        self,
        out: Path,
        known: tuple[Path, checkpoint.Manifest] | None,
        restarts: int,
        plan: Plan,
        patience: float = 0.0,
    ) -> Result:
        with closing(Temporary()) as kept, tempfile.TemporaryFile() as answer, watchdog.pipe() as parent:
            folder = kept.folder
            self.ready = folder / "ready"
            resume, lines = (str(known[0].absolute()), known[1].lines) if known else ("", 0)
            lines = 0 if self.options.evaluate else lines  # the lines so far belong to the evaluated run
            shipped_files.lay_in(folder, self.files)
            attempt = Attempt(
                plan,
                str(out),
                str(folder),
                answer=answer.fileno(),
                resume=resume,
                lines=lines,
                options=self.options,
                ports=self.doors.ports,
                restarts=restarts,
                url=self.made.url,
                patience=patience,
                edited=self.edited,
                parent=parent,
                lock=self.lock,
                changed=self.made.changed if known and known[0] == self.made.begin else (),
                data=run_inputs.data(self.made.inputs),
            )
            private.write(folder / "attempt.json", msgspec.json.encode(attempt))  # the token of the page is in it
            if self.follower is not None:
                self.follower.attempt(lines)
            try:
                why = self._drive(attempt, out / "logs", kept)
            finally:
                self.child = None
                self.edited = ChangedFiles.told(folder, self.edited)
                if self.killer is not None:
                    self.killer.cancel()
                if self.console.is_terminal:
                    self.console.show_cursor()
            try:
                answer.seek(0)
                return msgspec.json.decode(answer.read(), type=Result)
            except (OSError, msgspec.MsgspecError):
                return Result("died", why)

    def _drive(self, attempt: Attempt, logs: Path, kept: Temporary) -> str:
        """Starts a driver, and waits for its end; why it ended, where it says nothing itself."""
        command = [sys.executable, *self.driver, attempt.folder]
        # The first process that fails is told; of those that fail beside it Ray would print tracebacks.
        environment = {
            **os.environ,
            **nicer(attempt.options.nice),
            **({} if os.environ.get("RAY_ADDRESS") else own_ray()),
            MARK: attempt.folder,
            "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        }
        logs.mkdir(exist_ok=True)
        direct = self.stderr is None or _is_file(self.stderr)
        with (logs / "driver.log").open("ab") as log:  # Ray speaks to stdout, which belongs to the results
            # A session of its own: what a terminal sends to all of its processes reaches the driver through this one
            # only.
            self.child = child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=self.stderr if direct else subprocess.PIPE,
                pass_fds=(attempt.answer, *attempt.ports.open, attempt.parent, attempt.lock),
                start_new_session=True,
            )
        kept.ends(child.pid)
        if self.asked:
            child.send_signal(signal.SIGTERM)
        with watchdog.watched(child.pid, kept, self.limits, self.console.print):
            status = watchdog.wait(child, self.console.file.write, self._follow)
        return watchdog.why(child, kept, status)

    def _follow(self) -> None:
        """Pass on what iterations have ended. Where that raises, the driver is asked to end after its iteration."""
        follower = self.follower
        if follower is None or follower.error is not None:
            return
        follower.look()
        # A run that has no iteration left ends by itself, with all that it has to write.
        if (
            follower.error is not None
            and self.child is not None
            and not follower.has(self.plan.deploy.run.iterations - 1)
        ):
            with suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hands signals on to the driver; one that stays deaf is killed. What the caller has ignored (nohup), stays
        ignored."""

        def forward(number: int, _frame: Any) -> None:
            self.asked.append(number)
            if self.child is not None:
                with suppress(ProcessLookupError):
                    # A driver that is not ready has nothing to save, and would answer SIGINT with a traceback.
                    self.child.send_signal(number if self.ready.exists() else signal.SIGTERM)
                if stopped(self.child.pid):
                    watchdog.deaf(self.child, len(self.asked) > 1, self.limits, self.console.print)
                elif (len(self.asked) > 1 or number == signal.SIGHUP) and self.killer is None:
                    self.killer = threading.Timer(PATIENCE, self.child.kill)
                    self.killer.daemon = True
                    self.killer.start()
            if len(self.asked) > 1 and self.follower is not None and self.follower.calling:
                raise KeyboardInterrupt  # ends the caller's function

        before = {s: signal.getsignal(s) for s in SIGNALS}
        ours = [s for s in SIGNALS if before[s] not in (signal.SIG_IGN, None)]
        if threading.current_thread() is not threading.main_thread():
            ours = []
        for number in ours:
            signal.signal(number, forward)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, before[number])


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_file(stream: IO[str]) -> bool:
    """Whether a process can write to it; a notebook's stream, or one in memory, is fed by this process."""
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError, ValueError):
        return False


def _first(message: str, more: str) -> str:
    """The message with more at the end of its first line: what follows is the wait-for graph."""
    head, newline, rest = message.partition("\n")
    return head + more + newline + rest


__all__ = ["Attempt", "Outcome", "Result", "WatchOptions", "prepare", "run"]
