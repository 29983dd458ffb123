"""What a program names in a file of the user's, `"file.py:name"`.

Invariant: the file is read, never run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Span, nearest
from ..ir.signatures import coroutines, describe_binding
from . import ast, foreign_names
from .calls import CallingNode, Library
from .expressions import mistake

T = TypeVar("T")


def call_in(expr: ast.Expr) -> ast.Call | None:
    """The call of something in a file, `"file.py:name"(…)`, also where its brackets are left out."""
    if isinstance(expr, ast.Literal_) and expr.kind == "string":
        return ast.Call(ast.Name(str(expr.value), expr.span), (), expr.span, quoted=True)
    return expr if isinstance(expr, ast.Call) and expr.quoted else None


def in_file(
    caller: CallingNode, target: str, span: Span, what: str, read: Callable[[str], dict[str, T]], awaited: bool = False
) -> tuple[Path, str, dict[str, T]]:
    """The file and the name of `"file.py:name"`, and all of its kind that `read` finds there. `awaited`: it may be
    `async def`."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        help = (
            foreign_names.called(target, functions(caller.library) if what == "function" else ())
            or f'write `"file.py:{what}"`'
        )
        # Without its class an environment is none, and nothing can be said of what it writes.
        raise mistake(
            "bad-value" if what == "function" else "unknown-function", f'`"{target}"` names no {what}', span, help
        )
    path = caller.folder(span) / file
    try:
        found = read(source := path.read_text(encoding="utf-8-sig"))
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
        waits = f"`{name}` of `{file}` is `async def`, and a {what} here is called, not awaited"
        help = (
            f"write `def {name}(…)` that returns `asyncio.run(…)` of it; `call`, `environment` and `agent` may be "
            "`async`"
        )
        raise mistake("unknown-function", waits, span, help)
    if name not in found and (kind := describe_binding(source, name)) and what == "function":
        raise mistake(
            "unknown-function",
            f"`{name}` is {kind} in `{file}`, and a file is read, not run, before a run starts",
            span,
            f"write `def {name}(…)` there, with the columns as parameters, that returns what it gives",
        )
    if name not in found:
        raise mistake("unknown-function", f"`{file}` has no {what} `{name}`", span, nearest(name, found))
    return path, name, found


def functions(library: Library) -> list[str]:
    """The functions of the package."""
    return [n for k, n in library if k == "function"]
