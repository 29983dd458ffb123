"""The algorithms of the package (`*.rlg`) and the functions that programs name.

Invariant: one function with a mark of registry.py, in one of MODULES, is one new name in the language. The compiler
reads the sources only; the runtime imports the module of the function that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..ir.graph import Expr
from ..ir.optimizer_spec import OptimizerSpec
from ..ir.signatures import CallKind, Signature, signatures

FOLDER = Path(__file__).parent
MODULES = ("losses", "optimizers", "advantages", "rewards", "filters", "states", "texts")


@cache
def library() -> dict[tuple[CallKind, str], tuple[Signature, str]]:
    """The signature and the module of every name of the package, by kind and name."""
    found = {}
    for module in MODULES:
        for name, signature in signatures((FOLDER / f"{module}.py").read_text(encoding="utf-8")).items():
            if not name.startswith("_"):
                found[signature.kind, name] = (signature, module)
    return found


def load(kind: CallKind, name: str) -> Callable[..., Any]:
    """The function itself; KeyError where there is none."""
    function: Callable[..., Any] = getattr(import_module(f".{library()[kind, name][1]}", __name__), name)
    return function


def scheduled(call: Expr) -> None:
    """Calls a schedule for the first step of a run; ValueError where its options do not go together."""
    filled = {"step": 1, "last": 1}
    load("schedule", str(call.value))(
        **{name: filled[name] for name in library()["schedule", str(call.value)][0].fills}, **call.options()
    )


@lru_cache(maxsize=1 << 10)
def optimizer(call: Expr) -> OptimizerSpec:
    """What the call of an optimizer gives, but for the learning rate, which comes with each step; ValueError where its
    options do not go together."""
    made: OptimizerSpec = load("optimizer", str(call.value))(
        lr=0.0, **{k: v for k, v in call.options().items() if k != "lr"}
    )
    return made
