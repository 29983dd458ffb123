"""References to functions and classes in a user's file: `"file.py:name"`.

Invariant: the file is parsed, never executed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Span, nearest
from ..ir.signatures import coroutines, describe_binding
from . import ast, foreign_names
from .calls import Folder, Library
from .expressions import mistake

T = TypeVar("T")


def file_call(expr: ast.Expr) -> ast.Call | None:
    """Return the call if an expression calls a user's function; otherwise return None.

    `"file.py:name"` without parentheses counts as a call without arguments.
    """
    if isinstance(expr, ast.Literal_) and expr.kind == "string":
        return ast.Call(ast.Name(str(expr.value), expr.span), (), expr.span, quoted=True)
    return expr if isinstance(expr, ast.Call) and expr.quoted else None


def find_in_file(
    folder: Folder,
    target: str,
    span: Span,
    sought: str,
    read: Callable[[str], dict[str, T]],
    awaited: bool = False,
    library: Library | None = None,
) -> tuple[Path, str, dict[str, T]]:
    """Find the function or class that `target`, such as `"file.py:name"`, refers to.

    Returns the path of the file, the name, and a dict of all definitions in the file. The keys of the dict are the
    names of the definitions.

    - `read`: returns this dict for a Python source text.
    - `sought`: "function" or "class", for error messages.
    - `awaited`: whether the definition may be `async def`.
    - `folder`: returns the folder of the file that contains a span.
    - `library`: the functions that may be meant if `target` names no file.

    Raises a Fault if the file cannot be read or does not define the name.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        help = (
            foreign_names.called(target, package_functions(library) if library else ()) or f'write `"file.py:{sought}"`'
        )
        # `unknown-function`: without its class there is no environment, so what it writes is unknown too.
        raise mistake(
            "bad-value" if sought == "function" else "unknown-function",
            f'`"{target}"` does not name a {sought}',
            span,
            help,
        )
    path = folder(span) / file
    try:
        definitions = read(source := path.read_text(encoding="utf-8-sig"))
    except OSError:
        raise mistake(
            "missing-file", f"`{file}` cannot be read", span, "the path is relative to the program's folder"
        ) from None
    except SyntaxError as error:
        where = f" at its line {error.lineno}" if error.lineno else ""
        raise mistake("unknown-function", f"`{file}` is not Python{where}: {error.msg}", span) from None
    except (ValueError, RecursionError, MemoryError):
        raise mistake("unknown-function", f"`{file}` is not Python", span) from None
    if not awaited and name in coroutines(source):
        waits = f"`{name}` of `{file}` is `async def`, and a {sought} here is called without `await`"
        help = (
            f"write `def {name}(…)` that returns `asyncio.run(…)` of it; `call`, `environment` and `agent` may be "
            "`async`"
        )
        raise mistake("unknown-function", waits, span, help)
    if name not in definitions and (kind := describe_binding(source, name)) and sought == "function":
        raise mistake(
            "unknown-function",
            f"`{name}` is {kind} in `{file}`, but files are only parsed, not run, before a run starts",
            span,
            f"write `def {name}(…)` there, with the columns as parameters, that returns the result",
        )
    if name not in definitions:
        raise mistake("unknown-function", f"`{file}` has no {sought} `{name}`", span, nearest(name, definitions))
    return path, name, definitions


def package_functions(library: Library) -> list[str]:
    """Return the names of the functions that msrl_graph itself provides."""
    return [name for kind, name in library if kind == "function"]
