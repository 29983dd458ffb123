"""The algorithms of the package (`*.rlg`) and the functions that programs name.

Invariant: each function in one of MODULES that has a mark of registry.py is one name in the language. The compiler
only reads the sources. The runtime imports the module of a function that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..ir.graph import Expr
from ..ir.optimizer_spec import OptimizerSpec
from ..ir.signatures import CallKind, Signature, read_signatures

FOLDER = Path(__file__).parent
MODULES = ("losses", "optimizers", "advantages", "rewards", "filters", "states", "texts")


@cache
def library() -> dict[tuple[CallKind, str], tuple[Signature, str]]:
    """Return the signature and module of every built-in name, by kind and name."""
    signatures_by_name = {}
    for module in MODULES:
        for name, signature in read_signatures((FOLDER / f"{module}.py").read_text(encoding="utf-8")).items():
            if not name.startswith("_"):
                signatures_by_name[signature.kind, name] = (signature, module)
    return signatures_by_name


def load(kind: CallKind, name: str) -> Callable[..., Any]:
    """Import a function. Raises KeyError if there is none."""
    function: Callable[..., Any] = getattr(import_module(f".{library()[kind, name][1]}", __name__), name)
    return function


def check_schedule(call: Expr) -> None:
    """Call a schedule for the first step of a run, to check its options.

    Raises ValueError if they do not go together.
    """
    filled = {"step": 1, "last": 1}
    load("schedule", str(call.value))(
        **{name: filled[name] for name in library()["schedule", str(call.value)][0].fills}, **call.options()
    )


@lru_cache(maxsize=1 << 10)
def optimizer(call: Expr) -> OptimizerSpec:
    """Call an optimizer and return its specification.

    The learning rate is left out, since it comes with each step. Raises ValueError if the options do not go
    together.
    """
    spec: OptimizerSpec = load("optimizer", str(call.value))(
        lr=0.0, **{option: value for option, value in call.options().items() if option != "lr"}
    )
    return spec
