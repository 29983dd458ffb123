"""The command msrl-fmt, which formats programs.

Invariant: a file is replaced completely or not at all, and only by a text that `dsl.format` has checked. A file with a
mistake is not changed. The exit status is one of three:

- 0: success.
- 1: a file has a fault, or `--check` or `--diff` found a file that is not formatted.
- 2: bad usage, or a file that cannot be written.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..compiler.sources import ProgramSource
from ..diagnostics import Diagnostic, Fault
from ..diagnostics.terminal_text import make_printable
from ..dsl.format import format
from .common import print_diagnostics, run_guarded
from .flags import add_display_flags

STDIN = "<stdin>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `msrl-fmt` and return the exit status."""
    return run_guarded("msrl-fmt", _fmt, list(sys.argv[1:] if argv is None else argv))


def _fmt(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="msrl-fmt",
        description="Format .rlg programs in place. Comments and the meaning of a program do not change.",
        epilog=(
            "exit status: 0 success, 1 a fault in a file, or one that --check or --diff would change, 2 bad usage or "
            "a file that cannot be written"
        ),
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a program; `-` reads stdin and writes stdout")
    parser.add_argument("--check", action="store_true", help="write nothing, list the files that would change")
    parser.add_argument("--diff", action="store_true", help="write nothing, show what would change")
    add_display_flags(parser)
    options = parser.parse_args(argv)
    diagnostics: list[Diagnostic] = []
    source = None
    differ = unwritten = False
    for file in options.files:
        name = STDIN if file == "-" else file
        try:
            old = _read(file)
            # Line ends are normalized, as the compiler reads them.
            text = old.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
            source = ProgramSource(name, text, Path()) if file == "-" else source
            new = format(text, name)
        except Fault as fault:
            diagnostics += fault.diagnostics
            continue
        differ |= new != old
        if options.diff:
            sys.stdout.write(_diff_text(old, new, name))
        elif options.check:
            sys.stdout.write(f"{name}\n" if new != old else "")
        elif file == "-":
            sys.stdout.write(new)
        elif new != old:
            try:
                _write(Path(file), new)
            except OSError as error:
                print(f"msrl-fmt: cannot write `{make_printable(str(file))}`: {error.strerror}", file=sys.stderr)
                unwritten = True
    print_diagnostics(diagnostics, source, options)
    return 2 if unwritten else int(bool(diagnostics) or (differ and (options.check or options.diff)))


def _read(file: str) -> str:
    """Return the text of a file with its original line ends and byte order mark."""
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except UnicodeDecodeError:
        raise Fault(Diagnostic("missing-file", f"`{STDIN if file == '-' else file}` is not UTF-8 text")) from None
    except OSError as error:
        raise Fault(
            Diagnostic("missing-file", f"`{file}` cannot be read: {(error.strerror or str(error)).lower()}")
        ) from None


def _write(path: Path, text: str) -> None:
    """Replace the content of a file atomically; the file's mode does not change.

    If the path is a link, the file that it links to is replaced. Raises OSError if the file cannot be written.
    """
    path = path.resolve()
    # Replacing a file does not check its own permission, so open it for writing first.
    with path.open("ab"):
        pass
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _diff_text(old: str, new: str, name: str) -> str:
    """Return a unified diff of two texts; "" if the texts are equal."""
    # Split only at LF, as the files' lines end.
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old, new))
    lines = difflib.unified_diff(before, after, name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
