"""`run` and `export` for Python callers, with msrl-run's flags as arguments.

Invariant: a mistake that can be known before a process starts is raised as a Fault. Examples are an argument of the
wrong type, and a script that the processes of the run would execute again.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from .diagnostics import NOWHERE, Diagnostic, Fault, ProgramWarning, Span, kind_of, public
from .diagnostics.terminal_text import make_printable
from .files.paths import is_file
from .ir.plan import Plan
from .runtime.driver import supervisor
from .runtime.driver.callbacks import CallbackFailed, OnIteration
from .runtime.driver.outcome import Interrupted, RunFailed
from .runtime.driver.supervisor import Outcome, WatchOptions
from .runtime.process.cluster_join import files_loaded
from .runtime.process.start_variables import MARK

HELP = 'put the call that starts the run under `if __name__ == "__main__":`, or the functions into a file of their own'


@public
def run(
    plan: Plan,
    out: Path | str | None = None,
    *,
    resume: Path | str | None = None,
    overwrite: bool = False,
    record: bool = False,
    replay: Path | str | None = None,
    iterations: int | None = None,
    seed: int | None = None,
    evaluate: bool = False,
    dry_run: bool = False,
    verbose: bool = False,
    measure_memory: bool = False,
    nice: int = 0,
    watch: bool = False,
    metrics_port: int | None = None,
    stderr: IO[str] | None = None,
    on_iteration: OnIteration | None = None,
) -> Outcome:
    """Run a plan to its end and return the outcome.

    The run writes metrics, curve, trace, logs, checkpoints and weights under `out`, which may be a URL. By default,
    `out` is a new folder under runs/, or with `resume` the folder of the resumed run.

    - `resume`: the folder or URL of a run or of a checkpoint to resume.
    - `overwrite`: replace the results that `out` already contains. With `resume`, replace the checkpoints that are
      newer than the resumed checkpoint.
    - `iterations`, `seed`: values that replace the values of the plan.
    - `evaluate`: run the plan's evaluations once, without training. The weights are those of `resume`, or without
      `resume` the initial weights of the models. The results are written to a folder of their own.
    - `record`: write the rows of each iteration.
    - `replay`: the folder of a recorded run, whose responses replace generation.
    - `dry_run`: check all that can be checked, print what would run, and start nothing.
    - `verbose`: show what the processes of the run print.
    - `measure_memory`: report the memory of each rank's tensors.
    - `nice`: a number from 0 to 19. The processes that compute have the niceness of this process plus this number.
    - `watch`: serve a web page that shows the run.
    - `metrics_port`: the port at which metrics are served for Prometheus; 0 means any free port.
    - `stderr`: the stream to which progress is reported. The default is the stderr of this process.
    - `on_iteration`: a function that is called after each iteration with the metrics of the iteration. The metrics are
      a dict with the content of a line of metrics.jsonl. If the function raises, the run ends as it does after one
      SIGINT, and `run` raises the exception.

    Raises:

    - Fault for input that cannot be run. Its subclass NoResources means that the machines do not have the required
      resources.
    - RunFailed if processes died more often than the plan's `restarts` allows.
    - Interrupted if SIGINT, SIGTERM or SIGHUP ended the run.
    - any exception that `on_iteration` raised.
    """
    __tracebackhide__ = True  # a notebook leaves this frame out
    try:
        checked = _check_arguments(
            plan,
            {"iterations": iterations, "seed": seed, "nice": nice, "metrics_port": metrics_port},
            {"out": out, "resume": resume, "replay": replay},
        )
        if on_iteration is not None and not callable(on_iteration):
            _refuse(f"`on_iteration` is a function of an iteration's metrics, not {kind_of(on_iteration)}")
        _check_main_guard(plan, sys._getframe(1))
        known = plan.deploy.run
        run_options = replace(
            known, iterations=checked.get("iterations", known.iterations), seed=checked.get("seed", known.seed)
        )
        plan = replace(plan, deploy=replace(plan.deploy, run=run_options))
        options = WatchOptions(
            measure_memory,
            verbose,
            record,
            str(replay or ""),
            overwrite,
            checked.get("nice", 0),
            watch,
            checked.get("metrics_port"),
            evaluate,
        )
        for name, value in (("iterations", iterations), ("replay", replay), ("measure_memory", measure_memory or None)):
            if evaluate and value is not None:
                _refuse(f"`evaluate` trains nothing: `{name}` does not go with it")
        if not dry_run:
            return supervisor.run(plan, out, str(resume or ""), options, stderr, on_iteration)
        prepared = supervisor.prepare(plan, out, str(resume or ""), options)
        prepared.drop()
        print(make_printable("\n".join(prepared.lines())))
        return Outcome(prepared.url or prepared.folder, {})
    except Fault as fault:
        _rename_flags(fault)
        raise
    except (RunFailed, Interrupted) as error:
        # The place in the package does not help the user: the traceback ends at the call.
        error.args = (_flags_to_arguments(str(error)),)
        raise error.with_traceback(None) from error.__cause__
    except KeyboardInterrupt:
        raise Interrupted(128 + signal.SIGINT, "while it was prepared: nothing was started") from None
    except CallbackFailed as failed:
        failed.error.__notes__ = [_flags_to_arguments(note) for note in failed.error.__notes__]
        raise failed.error from None


@public
def export(
    checkpoint: Path | str, to: Path | str | None = None, *, worker: str | None = None, plan: Plan | None = None
) -> dict[str, Path]:
    """Export a checkpoint as Hugging Face folders; return the folders by worker.

    `checkpoint` is the folder or URL of a checkpoint, or of a run. For a run, its newest checkpoint is exported. The
    weights of each worker are written to `to/WORKER`. With `worker`, only the weights of this worker are written, to
    `to` itself. The default of `to` is `exported/` in the run's folder. `plan` describes the models; the default is the
    plan in the run's folder. The function starts no process.

    Raises Fault if the checkpoint is damaged or belongs to another model, or if a folder to write is not empty.
    """
    __tracebackhide__ = True
    from .runtime.driver.export import export as written

    try:
        if checkpoint is None or checkpoint == "":
            _refuse(f"`checkpoint` is a folder, a str or a Path, not {kind_of(checkpoint)}")
        _check_folder("checkpoint", checkpoint)
        _check_folder("to", to)
        if plan is not None and not isinstance(plan, Plan):
            _refuse(f"`plan` is a plan, not {kind_of(plan)}", "make one: export(checkpoint, plan=compile(program))")
        exported = written(str(checkpoint), plan, worker or "", str(to or ""))
    except Fault as fault:
        _rename_flags(fault)
        raise
    for note in exported.warnings:
        warnings.warn(
            f"{_flags_to_arguments(note.message)}; {_flags_to_arguments(note.help)}", ProgramWarning, stacklevel=2
        )
    return exported.folders


def _rename_flags(fault: Fault) -> None:
    """Replace flags of msrl-run by arguments of `run` in the messages of a fault."""
    from .compiler.pipeline import render_all

    fault.diagnostics = tuple(
        replace(diagnostic, message=_flags_to_arguments(diagnostic.message), help=_flags_to_arguments(diagnostic.help))
        for diagnostic in fault.diagnostics
    )
    fault.text = "\n".join(render_all(None, fault.diagnostics))


def _flags_to_arguments(text: str) -> str:
    """Replace flags of msrl-run in a text by the arguments of `run`."""
    text = re.sub(r"(?<!\S)--(overwrite|record)\b", r"`\1=True`", text)
    text = re.sub(r"(?<!\S)--(resume|iterations) (?=\S)", r"\1=", text)
    text = text.replace("--metrics-port", "`metrics_port`")
    text = re.sub(r"msrl-run PROGRAM --export (\S+)", r"export(\1, plan=compile(PROGRAM))", text)
    text = re.sub(r"(?<!\S)--(to|worker|export) (?=\w)", r"\1=", text)
    return re.sub(r"(?<!\S)--(out|replay|to)\b", r"`\1`", text)


def _check_arguments(plan: object, numbers: Mapping[str, object], folders: Mapping[str, object]) -> dict[str, int]:
    """Check arguments of `run`; return the arguments in `numbers` that are not None.

    `numbers` has the arguments that must be numbers, and `folders` has the arguments that must be folders. The keys are
    the parameter names.
    """
    if not isinstance(plan, Plan):
        _refuse(f"`run` takes a plan, not {kind_of(plan)}", "make one: run(compile(program))")
    for name, folder in folders.items():
        _check_folder(name, folder)
    numbers_given: dict[str, int] = {}
    for name, value in numbers.items():
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53:
            numbers_given[name] = value
        elif value is not None:
            _refuse(
                f"`{name}` is a whole number from 0 to 2^53, not {value if isinstance(value, int) else kind_of(value)}"
            )
    return numbers_given


def _check_folder(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike | None):
        _refuse(f"`{name}` is a folder, a str or a Path, not {kind_of(value)}")


def _check_main_guard(plan: Plan, frame: FrameType | None) -> None:
    """Raise Fault if the processes of a run would themselves start the run again.

    The processes of a run load functions by executing the file that defines the functions. If the same file calls `run`
    outside of `if __name__ == "__main__":`, each process would call `run` as well. `frame` is the caller of `run`.
    """
    if os.environ.get(MARK):
        _refuse("a process of a run, while loading its functions, would start another run", HELP, "unguarded-run")
    loaded: dict[str, set[str]] = {}
    for path, name, _ in files_loaded(plan):
        loaded.setdefault(os.path.realpath(path), set()).add(name)
    while frame is not None:
        path = frame.f_code.co_filename
        line = frame.f_lineno
        if frame.f_code.co_name == "<module>" and (names := loaded.get(os.path.realpath(path))) and is_file(Path(path)):
            source = Path(path).read_text(encoding="utf-8-sig")
            if not _only_as_main(source, line):
                text = source.splitlines()[line - 1]
                span = Span(path, line, len(text) - len(text.lstrip()) + 1, line, len(text.rstrip()) + 1)
                function_names = ", ".join(f"`{name}`" for name in sorted(names))
                _refuse(
                    f"the processes of the run load {function_names} from this file, and would each start a run",
                    HELP,
                    "unguarded-run",
                    span,
                )
        frame = frame.f_back


def _only_as_main(source: str, line: int) -> bool:
    """Return whether a line of a script is under an `if` that tests `__name__`."""
    guards = [item for item in ast.parse(source).body if isinstance(item, ast.If)]
    main_guards = [
        guard
        for guard in guards
        if any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(guard.test))
    ]
    return any(guard.body[0].lineno <= line <= (guard.body[-1].end_lineno or 0) for guard in main_guards)


def _refuse(message: str, help: str = "", code: str = "bad-value", span: Span = NOWHERE) -> NoReturn:
    raise Fault(Diagnostic(code, message, span, help))


__all__ = ["export", "run"]
