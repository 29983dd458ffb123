"""`run` and `export`, as Python calls them: what msrl-run takes as flags, by keyword.

Invariant: what is asked for in the wrong kind is a Fault, as all else that can be known before a process is started; so
is a script that its own processes would start again.
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
from .diagnostics.terminal_text import shown
from .files.paths import is_file
from .ir.plan import Plan
from .runtime.driver import supervisor
from .runtime.driver.callbacks import CallbackFailed, OnIteration
from .runtime.driver.outcome import Interrupted, RunFailed
from .runtime.driver.supervisor import Outcome, WatchOptions
from .runtime.process.cluster_join import called
from .runtime.process.processes import MARK

HELP = 'put what starts the run under `if __name__ == "__main__":`, or the functions into a file of their own'


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
    """Runs a plan to its end and writes metrics, curve, trace, logs, checkpoints and weights under `out` (default: a
    new folder under runs/, or with `resume`, the folder of a run or of a checkpoint, the one that is gone on with).
    Both may be URLs.

    `overwrite` replaces the results of a run that is in `out` already, or, with `resume`, the newer checkpoints.
    `iterations` and `seed` take the place of the plan's. `evaluate` does the plan's evaluations once, with the weights
    of `resume` or the models' own, and trains nothing; its results go to a folder of their own. `record` writes the
    rows of each iteration; `replay` is the folder of a run that did, whose responses are taken in place of generated
    ones. `dry_run` checks all that can be checked, prints what would run and starts nothing. `verbose` shows what the
    processes print, `measure_memory` what a rank's tensors take. `nice`, from 0 to 19, is how much nicer than this
    process those are that compute. `watch` serves a page on which the run can be watched, `metrics_port` (0: a free
    one) metrics for Prometheus. What is told on the way goes to `stderr` (default: the process's own). `on_iteration`
    is called with the metrics of each iteration when it has ended, a dict as a line of metrics.jsonl; what it raises
    ends the run as one SIGINT does, and comes out.

    Raises Fault for input that cannot be run (NoResources for machines that lack what it asks for), RunFailed when a
    process died more often than the plan's `restarts`, Interrupted when SIGINT, SIGTERM or SIGHUP ended it, and
    whatever `on_iteration` raised.
    """
    __tracebackhide__ = True  # a notebook leaves this frame out
    try:
        stated = _checked(
            plan,
            {"iterations": iterations, "seed": seed, "nice": nice, "metrics_port": metrics_port},
            {"out": out, "resume": resume, "replay": replay},
        )
        if on_iteration is not None and not callable(on_iteration):
            _refuse(f"`on_iteration` is a function of an iteration's metrics, not {kind_of(on_iteration)}")
        _guarded(plan, sys._getframe(1))
        known = plan.deploy.run
        asked = replace(
            known, iterations=stated.get("iterations", known.iterations), seed=stated.get("seed", known.seed)
        )
        plan = replace(plan, deploy=replace(plan.deploy, run=asked))
        options = WatchOptions(
            measure_memory,
            verbose,
            record,
            str(replay or ""),
            overwrite,
            stated.get("nice", 0),
            watch,
            stated.get("metrics_port"),
            evaluate,
        )
        for name, given in (("iterations", iterations), ("replay", replay), ("measure_memory", measure_memory or None)):
            if evaluate and given is not None:
                _refuse(f"`evaluate` trains nothing: `{name}` does not go with it")
        if not dry_run:
            return supervisor.run(plan, out, str(resume or ""), options, stderr, on_iteration)
        made = supervisor.prepare(plan, out, str(resume or ""), options)
        made.drop()
        print(shown("\n".join(made.lines())))
        return Outcome(made.url or made.folder, {})
    except Fault as fault:
        _tell_by_keyword(fault)
        raise
    except (RunFailed, Interrupted) as ended:
        # Where in the package it was raised says nothing: a traceback ends at the call.
        ended.args = (_by_keyword(str(ended)),)
        raise ended.with_traceback(None) from ended.__cause__
    except KeyboardInterrupt:
        raise Interrupted(128 + signal.SIGINT, "while it was prepared: nothing was started") from None
    except CallbackFailed as failed:
        failed.error.__notes__ = [_by_keyword(note) for note in failed.error.__notes__]
        raise failed.error from None


@public
def export(
    checkpoint: Path | str, to: Path | str | None = None, *, worker: str | None = None, plan: Plan | None = None
) -> dict[str, Path]:
    """Write the weights of a checkpoint as Hugging Face folders and return these, by worker.

    `checkpoint` is the folder of a run, whose newest checkpoint it is, or of a checkpoint, or its URL. The folders are
    `to/WORKER`, with `worker` only that one's, which is `to` itself; by default they are in `exported/` of the run's
    folder. `plan` says where the models are, by default the plan in the run's folder. Starts no process.

    Raises Fault where the checkpoint is unsound, of another model, or a folder is not empty.
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
        found = written(str(checkpoint), plan, worker or "", str(to or ""))
    except Fault as fault:
        _tell_by_keyword(fault)
        raise
    for note in found.warnings:
        warnings.warn(f"{_by_keyword(note.message)}; {_by_keyword(note.help)}", ProgramWarning, stacklevel=2)
    return found.folders


def _tell_by_keyword(fault: Fault) -> None:
    """Have a fault name arguments where it names flags."""
    from .compiler.pipeline import rendered

    fault.diagnostics = tuple(
        replace(d, message=_by_keyword(d.message), help=_by_keyword(d.help)) for d in fault.diagnostics
    )
    fault.text = "\n".join(rendered(None, fault.diagnostics))


def _by_keyword(text: str) -> str:
    """What names flags of msrl-run, with the arguments of `run` in their place."""
    text = re.sub(r"(?<!\S)--(overwrite|record)\b", r"`\1=True`", text)
    text = re.sub(r"(?<!\S)--(resume|iterations) (?=\S)", r"\1=", text)
    text = text.replace("--metrics-port", "`metrics_port`")
    text = re.sub(r"msrl-run PROGRAM --export (\S+)", r"export(\1, plan=compile(PROGRAM))", text)
    text = re.sub(r"(?<!\S)--(to|worker|export) (?=\w)", r"\1=", text)
    return re.sub(r"(?<!\S)--(out|replay|to)\b", r"`\1`", text)


def _checked(plan: object, numbers: Mapping[str, object], folders: Mapping[str, object]) -> dict[str, int]:
    """The numbers that are stated."""
    if not isinstance(plan, Plan):
        _refuse(f"`run` takes a plan, not {kind_of(plan)}", "make one: run(compile(program))")
    for name, folder in folders.items():
        _check_folder(name, folder)
    found: dict[str, int] = {}
    for name, value in numbers.items():
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53:
            found[name] = value
        elif value is not None:
            _refuse(
                f"`{name}` is a whole number from 0 to 2^53, not {value if isinstance(value, int) else kind_of(value)}"
            )
    return found


def _check_folder(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike | None):
        _refuse(f"`{name}` is a folder, a str or a Path, not {kind_of(value)}")


def _guarded(plan: Plan, frame: FrameType | None) -> None:
    """Refuses a run that its own processes would start again: they load functions by running the file that these stand
    in."""
    if os.environ.get(MARK):
        _refuse("a process of a run, which loads its functions, would start a run", HELP, "unguarded-run")
    loaded: dict[str, set[str]] = {}
    for path, name, _ in called(plan):
        loaded.setdefault(os.path.realpath(path), set()).add(name)
    while frame is not None:
        path = frame.f_code.co_filename
        line = frame.f_lineno
        if frame.f_code.co_name == "<module>" and (names := loaded.get(os.path.realpath(path))) and is_file(Path(path)):
            source = Path(path).read_text(encoding="utf-8-sig")
            if not _only_as_main(source, line):
                text = source.splitlines()[line - 1]
                span = Span(path, line, len(text) - len(text.lstrip()) + 1, line, len(text.rstrip()) + 1)
                found = ", ".join(f"`{name}`" for name in sorted(names))
                _refuse(
                    f"the processes of the run load {found} from this file, and would each start a run",
                    HELP,
                    "unguarded-run",
                    span,
                )
        frame = frame.f_back


def _only_as_main(source: str, line: int) -> bool:
    """Whether a line stands under an `if` that asks for `__name__`."""
    guards = [item for item in ast.parse(source).body if isinstance(item, ast.If)]
    asks = [g for g in guards if any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(g.test))]
    return any(g.body[0].lineno <= line <= (g.body[-1].end_lineno or 0) for g in asks)


def _refuse(message: str, help: str = "", code: str = "bad-value", span: Span = NOWHERE) -> NoReturn:
    raise Fault(Diagnostic(code, message, span, help))


__all__ = ["export", "run"]
