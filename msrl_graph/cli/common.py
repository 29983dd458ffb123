"""What the commands share: diagnostics go to stderr, a plan comes from its file, a mistake of our own becomes one line.

Invariant: whatever happens in a command, its user sees no traceback, unless MSRL_DEBUG=1 asks for it.
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
from ..diagnostics.terminal_text import shown

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan

COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "hint": "\x1b[1;36m"}


def load_plan(name: str, run: bool = False) -> Plan:
    """The plan that msrl-compile wrote into a file; `run`: it is to be run. Raises Fault: there is none, or none of
    this version."""
    from ..compiler.loading import load

    try:
        return load(Path(name).read_bytes(), name, run)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Fault(Diagnostic("missing-file", f"the plan {name} cannot be read: {why}")) from None


def natural(text: str) -> int:
    """A flag's whole number."""
    if not text.isdecimal() or int(text) > 2**53:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^53 belongs here, not `{text}`")
    return int(text)


def tell(diagnostics: Sequence[Diagnostic], source: ProgramSource | None, options: argparse.Namespace) -> None:
    """Diagnostics to stderr, in the order of the text."""
    from ..compiler.sources import texts

    found = sorted(diagnostics, key=lambda d: (d.span.file, d.span.line, d.span.column, d.code, d.message))
    if options.diagnostics == "json":
        # A reader of JSON finds a list, even an empty one.
        print(render_json(found), file=sys.stderr)
        return
    sources = texts(source, found)
    colour = options.color == "always" or (
        options.color == "auto" and sys.stderr.isatty() and "NO_COLOR" not in os.environ
    )
    separator = "\n" if options.diagnostics == "concise" else "\n\n"
    shown = [render(d, sources, options.diagnostics) for d in found]
    if colour:
        heads = [f"{d.severity}[{d.code}]" for d in found]
        shown = [
            s.replace(h, f"{COLOURS[d.severity]}{h}\x1b[0m", 1) for s, h, d in zip(shown, heads, found, strict=True)
        ]
    if shown:
        print(separator.join(shown), file=sys.stderr)


def guarded(program: str, main: object, argv: list[str]) -> int:
    """Runs a command; a mistake of our own becomes one line and a folder with what reproduces it."""
    assert callable(main)
    try:
        code = main(argv)
        assert isinstance(code, int)
        return code
    except BrokenPipeError:
        # Whoever read has seen enough. stdout is closed towards nothing, so that Python's own flush at exit does not
        # complain.
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
            f"{program}: internal error: {type(error).__name__}: {shown(str(error))}; what reproduces it is in {where}",
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
