"""Functions that all commands share.

The functions print diagnostics to stderr, load a plan from a file, and report an internal error in one line.

Invariant: a command never shows a traceback unless MSRL_DEBUG=1 is set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..diagnostics import Diagnostic, Fault, render, render_json
from ..diagnostics.surface import show_on
from ..diagnostics.terminal_text import make_printable

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan

COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "hint": "\x1b[1;36m"}


def load_plan(name: str, run: bool = False) -> Plan:
    """Load a plan from a file that msrl-compile wrote.

    `run` says whether the plan is loaded for a run. Raises a Fault if the file cannot be read, contains no plan, or has
    a plan of another format version.
    """
    from ..compiler.loading import load

    try:
        return load(Path(name).read_bytes(), name, run)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Fault(Diagnostic("missing-file", f"the plan {name} cannot be read: {why}")) from None


def print_diagnostics(
    diagnostics: Sequence[Diagnostic], source: ProgramSource | None, options: argparse.Namespace
) -> None:
    """Print diagnostics to stderr, in the order of their positions in the program."""
    from ..compiler.sources import collect_texts

    sorted_diagnostics = sorted(
        diagnostics,
        key=lambda diagnostic: (
            diagnostic.span.file,
            diagnostic.span.line,
            diagnostic.span.column,
            diagnostic.code,
            diagnostic.message,
        ),
    )
    if options.diagnostics == "json":
        # A JSON reader always gets a list, even an empty one.
        print(render_json(sorted_diagnostics), file=sys.stderr)
        return
    sources = collect_texts(source, sorted_diagnostics)
    colour = options.color == "always" or (
        options.color == "auto" and sys.stderr.isatty() and "NO_COLOR" not in os.environ
    )
    separator = "\n" if options.diagnostics == "concise" else "\n\n"
    rendered = [render(diagnostic, sources, options.diagnostics) for diagnostic in sorted_diagnostics]
    if colour:
        titles = [f"{diagnostic.severity}[{diagnostic.code}]" for diagnostic in sorted_diagnostics]
        rendered = [
            text.replace(title, f"{COLOURS[diagnostic.severity]}{title}\x1b[0m", 1)
            for text, title, diagnostic in zip(rendered, titles, sorted_diagnostics, strict=True)
        ]
    if rendered:
        print(separator.join(rendered), file=sys.stderr)


def run_guarded(program: str, main: object, argv: list[str]) -> int:
    """Run a command and return its exit status.

    An internal error is reported in one line, with a folder of files that reproduce the error. After an internal error,
    the exit status is 2.
    """
    assert callable(main)
    try:
        with show_on("command line"):
            code = main(argv)
        assert isinstance(code, int)
        return code
    except BrokenPipeError:
        # The reader has closed the pipe. stdout is redirected to devnull, so that Python's flush at exit does not fail.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("MSRL_DEBUG") == "1":
            raise
        where = _reproducer(program, argv)
        print(
            (
                f"{program}: internal error: {type(error).__name__}: {make_printable(str(error))}; files that "
                f"reproduce it are in {where}"
            ),
            file=sys.stderr,
        )
        return 2


def _reproducer(program: str, argv: Sequence[str]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="msrl-bug-"))
    (folder / "command.txt").write_text(
        f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([program, *argv])}\n", encoding="utf-8"
    )
    (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
    for argument in argv:
        path = Path(argument)
        if path.suffix == ".rlg" and path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)
