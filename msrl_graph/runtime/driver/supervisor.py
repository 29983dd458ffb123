"""`run`: starts the driver of a run, watches it, and restarts it if needed.

Invariant: errors that can be found early are reported before a process starts. When `run` returns or raises, or this
process (the supervisor) is killed, none of the run's processes and temporary folders remains (processes.py). The driver
(driver.py) is a separate process, because Ray ends its driver process when Ray's servers are lost. When the supervisor
ends, its side of a pipe to the driver closes, and so the driver ends. Until the driver ends, it holds the lock of the
results' folder.
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
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec

from ...compiler.pipeline import with_hosts
from ...diagnostics import MACHINE_FAULTS, Fault
from ...diagnostics.quantities import plural
from ...diagnostics.surface import current_surface, name_option
from ...files import private
from ...ir.plan import Plan
from ...ir.run_options import RunOptions
from ..metrics.display import Screen
from ..metrics.metrics_file import METRICS, parse_line, read_valid_lines
from ..metrics.ports import ListeningSockets
from ..process import shipped_files
from ..process.cluster_join import NoResources
from ..process.heartbeat import Limits
from ..process.preload import PreloadServer
from ..process.processes import Temporary, is_stopped, sweep, worker_niceness
from ..process.run_key import make_ray_key
from ..process.start_variables import MARK, own_ray
from ..weights import checkpoint
from . import preloading, remote_folder, run_inputs, shipping, watchdog
from .attempt import PreparedRun, prepare
from .attempt_messages import NO_SERVER, Attempt, Result
from .callbacks import CallbackFailed, MetricsFollower, OnIteration
from .changed_files import ChangedFiles
from .outcome import Interrupted, Outcome, RunFailed, outcome_of
from .run_folder import DRIVER_MODULE, check_free, check_links, check_own, clear_results, lock_folder, make_folder
from .run_inputs import DigestThread

# -P: no module may come from the folder in which a run is started, which may be anybody's.
PROGRAM = ("-P", "-m", DRIVER_MODULE)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 20.0  # seconds from a signal to end at once until the driver is killed


def run(
    plan: Plan,
    options: RunOptions = RunOptions(),
    stderr: IO[str] | None = None,
    on_iteration: OnIteration | None = None,
    server: PreloadServer | None = None,
) -> Outcome:
    """Run a plan to its end and write its results.

    The results are metrics, curve, trace, logs, checkpoints and weights. Messages are written to `stderr`.
    `on_iteration` is called with the metrics of each iteration. `server` is a preload server that the caller has
    already started.

    Raises Fault for input that cannot be run, and its subclass NoResources if the machines lack what the plan needs.
    Raises RunFailed if the run fails, for example if a process dies more often than the plan's `restarts`. Raises
    Interrupted if SIGINT, SIGTERM or SIGHUP ended the run, and CallbackFailed if `on_iteration` raised.
    """
    with preloading.serving(plan, server) as server:
        return Supervisor(prepare(plan, options), stderr, on_iteration=on_iteration, server=server).run()


class Supervisor:
    """Supervisor of a run; `driver` are the Python arguments that start a driver."""

    def __init__(
        self,
        prepared: PreparedRun,
        stderr: IO[str] | None,
        driver: Sequence[str] = PROGRAM,
        on_iteration: OnIteration | None = None,
        server: PreloadServer | None = None,
    ) -> None:
        self.plan = prepared.plan
        self.prepared = prepared
        self.options = prepared.options
        self.stderr = stderr
        self.driver = driver
        self.preload = server.address if server is not None else NO_SERVER  # of all attempts
        self.console = Screen(file=stderr or sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.child: subprocess.Popen[bytes] | None = None
        self.lock = -1  # on the results' folder
        self.limits = Limits.for_deadline(prepared.plan.docks.deadline)
        self.ready = Path()  # exists once the driver handles signals
        self.asked: list[int] = []  # signals so far
        self.killer: threading.Timer | None = None
        self.files: dict[str, shipped_files.ShippedFile] = {}  # the copies that every process reads
        self.edited: tuple[str, ...] = ()  # those of `files` that changed since the copy, and were reported
        self.first = prepared.manifest.iteration if prepared.manifest else 0  # iteration that the run begins with
        self.follower = (
            MetricsFollower(prepared.folder.absolute() / METRICS, on_iteration, self.first) if on_iteration else None
        )

    def run(self) -> Outcome:
        with closing(ListeningSockets(self.options.watch, self.options.metrics_port)) as self.sockets:
            return self._run()

    def _run(self) -> Outcome:
        fresh = not self.prepared.folder.exists()
        out = (
            self.prepared.folder
            if self.prepared.continues_in_place
            else make_folder(self.plan, self.prepared.folder, self.prepared.stated)
        )
        for warning in self.prepared.warnings:
            self.console.print(f"warning[{warning.code}]: {warning.message}; {warning.help}")
        for line in self.sockets.lines:
            self.console.print(line)
        check_own(out)
        with lock_folder(out) as self.lock, self._signals():
            check_links(out)
            if not (self.prepared.continues_in_place or self.options.overwrite):
                check_free(out)
            try:
                if self.options.overwrite and self.prepared.url and not self.prepared.continues_in_place:
                    remote_folder.clear(self.prepared.url)
                elif self.options.overwrite:
                    clear_results(out, self.prepared.begin if self.prepared.continues_in_place else None)
                self._copy_lines(out)
                self.files = shipping.files(self.plan, shipped=bool(os.environ.get("RAY_ADDRESS")))
                with suppress(OSError):  # a full disk: checkpoints have no room either
                    run_inputs.write(out, self.prepared.inputs)
                before = run_inputs.parse_inputs(self.prepared.manifest.inputs) if self.prepared.manifest else None
                with closing(DigestThread(out, self.prepared.inputs, before, self.console.print)):
                    return self._run_attempts(out)
            except Fault:
                if fresh or self.prepared.url:
                    shutil.rmtree(out, ignore_errors=True)
                raise

    def _run_attempts(self, out: Path) -> Outcome:
        """Run all attempts, then upload the run's results if its folder is at a URL."""
        url = self.prepared.url
        wrong = ""
        try:
            outcome = self._attempts(out)
        except (RunFailed, Interrupted, CallbackFailed):
            self._upload(out)
            raise
        wrong = self._upload(out)
        if wrong:
            raise RunFailed(wrong)
        return replace(outcome, folder=url) if url else outcome

    def _upload(self, out: Path) -> str:
        """Upload the files of an ended run; return a description of a failure, or ""."""
        wrong = ""
        try:
            if self.prepared.url:
                remote_folder.finish(out, self.prepared.url)
        except (Fault, OSError) as error:
            reason = error.diagnostics[0].message if isinstance(error, Fault) else str(error)
            wrong = f"the files of the run are in {out}, and not all of them at {self.prepared.url}: {reason}"
            self.console.print(wrong)
        for copy in self.prepared.copies:
            if copy != out:
                shutil.rmtree(copy, ignore_errors=True)
        return wrong

    def _copy_lines(self, out: Path) -> None:
        """Copy metrics lines of the resumed run, if the run continues in another folder."""
        begin = self.prepared.begin
        manifest = self.prepared.manifest
        if begin is None or manifest is None or self.prepared.continues_in_place or self.options.evaluate:
            return
        lines, _ = read_valid_lines(begin.parent.parent / METRICS)
        (out / METRICS).write_bytes(b"".join(lines[: manifest.lines]))

    def _attempts(self, out: Path) -> Outcome:
        limit = self.plan.deploy.run.restarts
        prepared = self.prepared
        begin = (prepared.begin, prepared.manifest) if prepared.begin and prepared.manifest else None
        known = begin
        before = _size(out / METRICS)
        died = ""
        for restarts in itertools.count(1):
            sweep()
            if restarts > 1 and (other := run_inputs.describe_edit(prepared.inputs)):
                raise RunFailed(f"{died}, and {other}: the run cannot continue as it began{self._describe_files(out)}")
            result = self._attempt(out, known, restarts - 1, self.plan)
            if restarts > 1 and result.hosts:
                result = self._attempt_with_fewer(result, out, known, restarts - 1)
            raised = self.follower.error if self.follower is not None else None
            done = result.kind == "done" and raised is None
            if not done and (self.asked or (result.kind == "interrupted" and raised is None)):
                raise Interrupted(
                    128 + self.asked[0] if self.asked else result.status, self._describe_end(out)
                ) from raised
            if raised is not None:
                raised.add_note(f"the run ended {self._describe_end(out)}")
                raise CallbackFailed(raised)
            if done:
                outcome, wrong = outcome_of(self.plan, out, self.options.evaluate)
                if wrong:
                    self.console.print(f"{out / METRICS}: {wrong}, and what follows is not reported")
                return outcome
            known = checkpoint.find_newest(out) or begin
            if result.kind == "fault":
                if restarts == 1 and _size(out / METRICS) == before:
                    # Nothing was computed: the input is at fault, and no folder stays.
                    missing = any(diagnostic.code in MACHINE_FAULTS for diagnostic in result.diagnostics)
                    raise (NoResources if missing else Fault)(*result.diagnostics)
                result = Result("failed", "; ".join(diagnostic.message for diagnostic in result.diagnostics))
            if result.kind == "failed" or restarts > limit:
                tired = f" (restarted {limit} times already)" if result.kind == "died" and limit else ""
                raise RunFailed(_append_to_first_line(result.message, f"{tired}{self._describe_files(out)}"))
            done_before = plural(known[1].iteration, "iteration") if known else ""
            where = f"from the checkpoint after {done_before}" if known else "from the beginning, without a checkpoint"
            died = result.message.partition("\n")[0]
            self.console.print(_append_to_first_line(result.message, f"; restarting {where} ({restarts} of {limit})"))
        raise AssertionError

    def _describe_end(self, out: Path) -> str:
        """Describe after how many iterations a run ended early, and where its files are."""
        lines, _ = read_valid_lines(out / METRICS)
        done = sum("iteration" in parse_line(line) for line in lines)
        if done > self.first:
            return f"after {plural(done, 'iteration')}{self._describe_files(out)}"
        return f"before iteration {self.first} had ended: nothing was trained"

    def _describe_files(self, out: Path) -> str:
        """Describe where the files of a failed run are, and how to resume the run."""
        place = self.prepared.url or out
        saved = checkpoint.list_checkpoints(out)
        advice = f"; continue from its last checkpoint with {name_option('resume', place)}" if saved else ""
        return f"; the files of the run so far are in {place}{advice}"

    def _attempt_with_fewer(
        self, result: Result, out: Path, known: tuple[Path, checkpoint.Manifest] | None, restarts: int
    ) -> Result:
        """Run on the remaining hosts if they suffice; else wait for the lost hosts."""
        remaining = plural(result.hosts, "host")
        patience = self.plan.docks.deadline
        if (fewer := with_hosts(self.plan, result.hosts)) is not None:
            self.console.print(f"{remaining} of {self.plan.cluster.nodes} left: replanned for {remaining}")
            return self._attempt(out, known, restarts, fewer)
        self.console.print(
            f"{remaining} of {self.plan.cluster.nodes} left, and the program states layouts for more: waiting "
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
        with closing(Temporary()) as temporary, tempfile.TemporaryFile() as answer, watchdog.pipe() as parent:
            folder = temporary.folder
            self.ready = folder / "ready"
            resume, lines = (str(known[0].absolute()), known[1].lines) if known else ("", 0)
            lines = 0 if self.options.evaluate else lines  # the lines so far belong to the evaluated run
            shipped_files.write_files(folder, self.files)
            attempt = Attempt(
                plan,
                str(out),
                str(folder),
                answer=answer.fileno(),
                resume=resume,
                lines=lines,
                options=self.options,
                ports=self.sockets.ports,
                restarts=restarts,
                surface=current_surface(),
                url=self.prepared.url,
                patience=patience,
                edited=self.edited,
                parent=parent,
                lock=self.lock,
                changed=self.prepared.changed if known and known[0] == self.prepared.begin else (),
                data=run_inputs.data(self.prepared.inputs),
                preload=self.preload,
            )
            private.write(folder / "attempt.json", msgspec.json.encode(attempt))  # it has the page's token
            if self.follower is not None:
                self.follower.begin_attempt(lines)
            try:
                reason = self._drive(attempt, out / "logs", temporary)
            finally:
                self.child = None
                self.edited = ChangedFiles.list_reported(folder, self.edited)
                if self.killer is not None:
                    self.killer.cancel()
                if self.console.is_terminal:
                    self.console.show_cursor()
            try:
                answer.seek(0)
                return msgspec.json.decode(answer.read(), type=Result)
            except (OSError, msgspec.MsgspecError):
                return Result("died", reason)

    def _drive(self, attempt: Attempt, logs: Path, temporary: Temporary) -> str:
        """Start a driver and wait for its end; return what explains a missing result."""
        command = [sys.executable, *self.driver, attempt.folder]
        # Only the first failure is reported; Ray would print tracebacks of others.
        environment = {
            **os.environ,
            **worker_niceness(attempt.options.nice),
            **({} if os.environ.get("RAY_ADDRESS") else own_ray() | make_ray_key(Path(attempt.folder))),
            MARK: attempt.folder,
            "RAY_IGNORE_UNHANDLED_ERRORS": "1",
        }
        logs.mkdir(exist_ok=True)
        direct = self.stderr is None or _is_file(self.stderr)
        with (logs / "driver.log").open("ab") as log:  # Ray prints to stdout, which belongs to the results
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
        temporary.end_session_too(child.pid, self.preload.session)
        if self.asked:
            child.send_signal(signal.SIGTERM)
        with watchdog.watch_driver(child.pid, temporary, self.limits, self.console.print):
            status = watchdog.wait(child, self.console.file.write, self._follow)
        return watchdog.describe_end(child, temporary, status)

    def _follow(self) -> None:
        """Call `on_iteration` for ended iterations; if the call raises, end the driver."""
        follower = self.follower
        if follower is None or follower.error is not None:
            return
        follower.look()
        # A run that has no iteration left ends by itself, with all that it has to write.
        if (
            follower.error is not None
            and self.child is not None
            and not follower.has_iteration(self.plan.deploy.run.iterations - 1)
        ):
            with suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward signals to the driver, and kill the driver if it does not react.

        Signals that the caller ignores (nohup) are still ignored.
        """

        def forward(number: int, _frame: Any) -> None:
            self.asked.append(number)
            if self.child is not None:
                with suppress(ProcessLookupError):
                    # A driver that is not ready has nothing to save, and would answer SIGINT with a traceback.
                    self.child.send_signal(number if self.ready.exists() else signal.SIGTERM)
                if is_stopped(self.child.pid):
                    watchdog.handle_stopped_driver(self.child, len(self.asked) > 1, self.limits, self.console.print)
                elif (len(self.asked) > 1 or number == signal.SIGHUP) and self.killer is None:
                    self.killer = threading.Timer(PATIENCE, self.child.kill)
                    self.killer.daemon = True
                    self.killer.start()
            if len(self.asked) > 1 and self.follower is not None and self.follower.calling:
                raise KeyboardInterrupt  # ends the caller's function

        before = {number: signal.getsignal(number) for number in SIGNALS}
        ours = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
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
    """Return whether another process can write to a stream directly.

    If the result is false (for the stream of a notebook, or a stream in memory), this process writes the text itself.
    """
    try:
        return stream.fileno() >= 0
    except (OSError, AttributeError, ValueError):
        return False


def _append_to_first_line(message: str, more: str) -> str:
    """Append `more` to the first line of a message; other lines describe waits."""
    first_line, newline, rest = message.partition("\n")
    return first_line + more + newline + rest


__all__ = ["Outcome", "prepare", "run"]
