"""Functions that have no home in a file, kept by value: lambdas, those within functions or under an `if`, those of
notebooks.

Invariant: what is given is a Python file like any other, whose signature the compiler reads and whose function the
processes of a run load; beside it lies the function itself, as cloudpickle wrote it. A plan that names it runs as long
as both lie there.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType

from ..files import private
from ..files.paths import is_file

Given = FunctionType | MethodType | partial  # type: ignore[type-arg]

TEXT = '''"""`{shown}`, kept by value for the processes of a run; its parameters are for the compiler."""
from pathlib import Path

import cloudpickle


def {name}{signature}: ...


{name} = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''


def home(function: Callable[..., object]) -> tuple[Path, str] | None:
    """The file at whose top level a function stands, and its name there; None where processes could not find it so."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(str(getattr(function, "__module__", "")))
    path = Path(str(getattr(module, "__file__", None) or ""))
    # A decorated function's code may stand elsewhere; its name is where it was put.
    there = isinstance(name, str) and name.isidentifier() and getattr(module, name, None) is function
    there = there and is_file(path) and path.suffix == ".py" and _stands(function, path, name)
    return (path.resolve(), name) if there else None


def _stands(function: Callable[..., object], path: Path, name: str) -> bool:
    """Whether the file defines it at its top level. Under an `if`, as of `__main__`, neither the compiler nor a process
    would find it."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [item for item in ast.parse(path.read_bytes()).body if isinstance(item, kinds) and item.name == name]
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).resolve() != path.resolve():
        return bool(found)
    # One of the same name under an `if` may have taken its place.
    return any(
        min(x.lineno for x in (i, *i.decorator_list)) <= code.co_firstlineno <= (i.end_lineno or i.lineno)
        for i in found
    )


def ship(function: Given) -> tuple[Path, str]:
    """Keeps a function by value: the file that stands for it, and its name there. TypeError, ValueError: it cannot be
    kept, and why."""
    import cloudpickle

    shown = getattr(function, "__qualname__", "") or type(function).__name__
    name = re.sub(r"\W", "", str(shown).rpartition(".")[2]) or "function"
    name = f"{name}_" if name in ("lambda", "partial") else name
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:  # whatever a reduction of the user's raises
        raise ValueError(str(error)) from None
    text = TEXT.format(shown=shown, name=name, signature=_written(inspect.signature(function)))
    try:
        folder = private.cache("functions")  # a pickle is loaded from there
        path = folder / f"{name}-{hashlib.sha256(text.encode() + data).hexdigest()[:16]}.py"
        for target, content in ((path.with_suffix(".pickle"), data), (path, text.encode())):
            mine = target.with_name(f"{target.name}.{os.getpid()}")
            mine.unlink(missing_ok=True)
            private.write(mine, content)
            mine.replace(target)
    except private.NotPrivate as error:
        raise ValueError(f"{error}; name a folder of your own: XDG_CACHE_HOME") from None
    return path, name


def _written(signature: inspect.Signature) -> str:
    """A signature as source: annotations as they were written, a default as `None`, since only that there is one
    counts."""

    def annotation(value: object) -> object:
        if value is inspect.Parameter.empty:
            return value
        return _Raw(value if isinstance(value, str) else inspect.formatannotation(value))

    empty = inspect.Parameter.empty
    parameters = [
        p.replace(annotation=annotation(p.annotation), default=empty if p.default is empty else None)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=annotation(signature.return_annotation)))


class _Raw:
    """An annotation that is shown as its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


__all__ = ["Given", "home", "ship"]
