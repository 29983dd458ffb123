"""Functions that no file defines at its top level, stored as pickles.

Examples are lambdas, functions inside functions or under an `if`, and functions of notebooks.

Invariant: for each stored function, there is a Python file that looks like any other. The compiler reads the function's
signature from this file, and the processes of a run load the function from this file. The function itself is in a
second file in the same folder, as cloudpickle wrote it. A plan that names the function can be run as long as both files
exist.
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


def find_home(function: Callable[..., object]) -> tuple[Path, str] | None:
    """Return the file that defines a function at its top level, and the name there.

    Returns None if a process that imports the file would not find the function under this name.
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(str(getattr(function, "__module__", "")))
    path = Path(str(getattr(module, "__file__", None) or ""))
    # The code of a decorated function may be in another file, so compare the object with the module's attribute.
    is_home = isinstance(name, str) and name.isidentifier() and getattr(module, name, None) is function
    is_home = is_home and is_file(path) and path.suffix == ".py" and _is_defined_in(function, path, name)
    return (path.resolve(), name) if is_home else None


def _is_defined_in(function: Callable[..., object], path: Path, name: str) -> bool:
    """Return whether a file defines a function at its top level.

    A definition under an `if`, such as `if __name__ == "__main__"`, does not count: neither the compiler nor a process
    that imports the file would find such a function.
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    definitions = [item for item in ast.parse(path.read_bytes()).body if isinstance(item, kinds) and item.name == name]
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).resolve() != path.resolve():
        return bool(definitions)
    # A function of the same name under an `if` may have replaced it.
    return any(
        min(node.lineno for node in (definition, *definition.decorator_list))
        <= code.co_firstlineno
        <= (definition.end_lineno or definition.lineno)
        for definition in definitions
    )


def ship(function: Given) -> tuple[Path, str]:
    """Store a function as a pickle; return the file that loads it, and its name there.

    Raises TypeError or ValueError with the reason if the function cannot be pickled or stored.
    """
    import cloudpickle

    shown = getattr(function, "__qualname__", "") or type(function).__name__
    name = re.sub(r"\W", "", str(shown).rpartition(".")[2]) or "function"
    name = f"{name}_" if name in ("lambda", "partial") else name
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:  # any error from user-defined pickling
        raise ValueError(str(error)) from None
    text = TEXT.format(shown=shown, name=name, signature=_signature_text(inspect.signature(function)))
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


def _signature_text(signature: inspect.Signature) -> str:
    """Return a signature as Python source.

    The annotations are written as in the signature. Each default is written as `None`, since the compiler only needs to
    know whether there is a default.
    """

    def annotation(value: object) -> object:
        if value is inspect.Parameter.empty:
            return value
        return _Raw(value if isinstance(value, str) else inspect.formatannotation(value))

    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(
            annotation=annotation(parameter.annotation), default=empty if parameter.default is empty else None
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=annotation(signature.return_annotation)))


class _Raw:
    """An annotation whose `repr` is its source text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


__all__ = ["Given", "find_home", "ship"]
