"""The algorithms of the package (`*.rlg`) and the functions that programs name.

Invariant: one function with a mark of registry.py, in one of MODULES, is one new name in the language. The compiler reads the
sources only; the runtime imports the module of the function that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..functions import Kind, Signature, signatures

FOLDER = Path(__file__).parent
MODULES = ("losses", "optimizers", "advantages", "rewards", "filters", "states", "texts")


@cache
def library() -> dict[tuple[Kind, str], tuple[Signature, str]]:
    """The signature and the module of every name of the package, by kind and name."""
    found = {}
    for module in MODULES:
        for name, signature in signatures((FOLDER / f"{module}.py").read_text(encoding="utf-8")).items():
            if not name.startswith("_"):
                found[signature.kind, name] = (signature, module)
    return found


def load(kind: Kind, name: str) -> Callable[..., Any]:
    """The function itself; KeyError where there is none."""
    function: Callable[..., Any] = getattr(import_module(f".{library()[kind, name][1]}", __name__), name)
    return function
