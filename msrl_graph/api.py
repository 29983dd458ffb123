"""`run` and `export` for Python callers, with msrl-run's flags as arguments.

Invariant: the options that `run` takes are the fields of RunOptions (ir/run_options.py). A mistake that can be known
before a process starts is raised as a Fault. Examples are an argument of the wrong type, and a script that the
processes of the run would execute again.
"""

from __future__ import annotations

import ast
import inspect
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, ParamSpec, Protocol

from .compiler.pipeline import render_all
from .diagnostics import NOWHERE, Diagnostic, Fault, ProgramWarning, Span, kind_of, public
from .diagnostics.surface import show_on
from .diagnostics.terminal_text import make_printable
from .files.paths import is_file
from .ir.plan import Plan
from .ir.run_options import OptionDeclaration, RunOptions
from .runtime.driver import supervisor
from .runtime.driver.callbacks import CallbackFailed, OnIteration
from .runtime.driver.outcome import Interrupted, RunFailed
from .runtime.driver.supervisor import Outcome
from .runtime.process.cluster_join import files_loaded
from .runtime.process.start_variables import MARK

P = ParamSpec("P")
HELP = 'put the call that starts the run under `if __name__ == "__main__":`, or the functions into a file of their own'


@dataclass(frozen=True)
class RunArguments(RunOptions):
    """The arguments of `run` after the plan."""

    _: KW_ONLY
    stderr: IO[str] | None = None
    on_iteration: OnIteration | None = None


RunArguments.__init__.__qualname__ = "run"  # the name in Python's message about an unknown argument


class RunFunction(Protocol[P]):
    """A function of a plan and the arguments `P`."""

    def __call__(self, plan: Plan, *args: P.args, **keywords: P.kwargs) -> Outcome: ...


def _with_arguments(
    kind: Callable[P, RunArguments],
) -> Callable[[Callable[[Plan, RunArguments], Outcome]], RunFunction[P]]:
    """Decorate a function so that the fields of a dataclass are its arguments.

    The function takes a plan and an object of the dataclass `kind`. Type checkers, `help` and editors see each field as
    an argument. In the docstring, the line `{options}` becomes a list of the declared options.
    """

    def decorate(function: Callable[[Plan, RunArguments], Outcome]) -> RunFunction[P]:
        @wraps(function)
        def called(plan: Plan, *args: P.args, **keywords: P.kwargs) -> Outcome:
            __tracebackhide__ = True  # a notebook leaves this frame out
            return function(plan, kind(*args, **keywords))

        signature = inspect.signature(function)
        arguments = inspect.signature(kind).parameters.values()
        parameters = [signature.parameters["plan"], *arguments]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("{options}", _list_options())
        return called

    return decorate


def _list_options() -> str:
    """Return the list of options in the docstring of `run`."""
    with show_on("Python"):
        return "\n".join(
            textwrap.fill(
                f"- `{option.argument}={option.value or True}`: {option.meaning()}.",
                116,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
            for option in RunOptions.declared()
        )


@public
@_with_arguments(RunArguments)
def run(plan: Plan, arguments: RunArguments) -> Outcome:
    """Run a plan to its end and return the outcome.

    The run writes metrics, curve, trace, logs, checkpoints and weights.

    {options}
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
        _check_arguments(plan, arguments)
        _check_main_guard(plan, sys._getframe(1))
        options = RunOptions.collect(arguments)
        if not options.dry_run:
            return supervisor.run(plan, options, arguments.stderr, arguments.on_iteration)
        prepared = supervisor.prepare(plan, options)
        prepared.drop()
        print(make_printable("\n".join(prepared.lines())))
        return Outcome(prepared.url or prepared.folder, {})
    except Fault as fault:
        fault.text = "\n".join(render_all(None, fault.diagnostics))
        raise
    except (RunFailed, Interrupted) as error:
        # The place in the package does not help the user: the traceback ends at the call.
        raise error.with_traceback(None) from error.__cause__
    except KeyboardInterrupt:
        raise Interrupted(128 + signal.SIGINT, "while it was prepared: nothing was started") from None
    except CallbackFailed as failed:
        raise failed.error from None


@public
def export(
    checkpoint: Path | str,
    to: Path | str | None = None,
    *,
    worker: str | None = None,
    merged: bool = False,
    plan: Plan | None = None,
) -> dict[str, Path]:
    """Export a checkpoint as Hugging Face folders; return the folders by worker.

    `checkpoint` is the folder or URL of a checkpoint, or of a run. For a run, its newest checkpoint is exported. The
    weights of each worker are written to `to/WORKER`. With `worker`, only the weights of this worker are written, to
    `to` itself. The default of `to` is `exported/` in the run's folder. `plan` describes the models; the default is the
    plan in the run's folder. An adapter is written alone, as the library PEFT does; with `merged`, its model's weights
    are written with the adapter merged into them. The function starts no process.

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
        exported = written(str(checkpoint), plan, worker or "", str(to or ""), merged)
    except Fault as fault:
        fault.text = "\n".join(render_all(None, fault.diagnostics))
        raise
    for note in exported.warnings:
        warnings.warn(f"{note.message}; {note.help}", ProgramWarning, stacklevel=3)
    return exported.folders


def _check_arguments(plan: object, arguments: RunArguments) -> None:
    """Raise Fault if an argument of `run` is wrong, or does not go with another one."""
    if not isinstance(plan, Plan):
        _refuse(f"`run` takes a plan, not {kind_of(plan)}", "make one: run(compile(program))")
    for option in arguments.stated():
        value = getattr(arguments, option.name)
        if option.kind == "location":
            _check_folder(option.name, value)
        elif option.kind == "text" and not isinstance(value, str):
            _refuse(f"`{option.name}` is a str, not {kind_of(value)}")
        elif option.kind == "switch" and not isinstance(value, bool):
            _refuse(f"`{option.name}` is True or False, not {kind_of(value)}")
        elif option.kind == "number":
            _check_number(option, value)
    if arguments.on_iteration is not None and not callable(arguments.on_iteration):
        _refuse(f"`on_iteration` is a function of an iteration's metrics, not {kind_of(arguments.on_iteration)}")
    if conflict := arguments.find_conflict():
        _refuse(f"`evaluate` trains nothing: `{conflict.name}` does not go with it")


def _check_number(option: OptionDeclaration, value: object) -> None:
    most = 2**53 if option.most is None else option.most
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        shown = value if isinstance(value, int) else kind_of(value)
        _refuse(f"`{option.name}` is a whole number from 0 to {option.most or '2^53'}, not {shown}")


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
