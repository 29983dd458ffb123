"""The algorithms (`*.rlg`) and the functions that msrl_graph itself provides.

Invariant: a program can call a function by its name if three conditions hold:

- The function is defined in a module that MODULES lists.
- The function is decorated with a decorator of registry.py.
- The function's name does not begin with `_`.

The names and signatures are parsed from the source files, without an import. A module is imported only when one of its
functions is called.
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
    """Return the signature and module of each built-in function.

    A key is a pair: the kind of the function, for example a loss term, and the name of the function.
    """
    signatures_by_name = {}
    for module in MODULES:
        for name, signature in read_signatures((FOLDER / f"{module}.py").read_text(encoding="utf-8")).items():
            if not name.startswith("_"):
                signatures_by_name[signature.kind, name] = (signature, module)
    return signatures_by_name


def load(kind: CallKind, name: str) -> Callable[..., Any]:
    """Import a built-in function and return it.

    Raises KeyError if no built-in function has this kind and name.
    """
    function: Callable[..., Any] = getattr(import_module(f".{library()[kind, name][1]}", __name__), name)
    return function


def check_schedule(call: Expr) -> None:
    """Check a learning-rate schedule's options by calling the schedule for step 1.

    Raises ValueError if the options contradict each other.
    """
    filled = {"step": 1, "last": 1}
    load("schedule", str(call.value))(
        **{name: filled[name] for name in library()["schedule", str(call.value)][0].fills}, **call.options()
    )


@lru_cache(maxsize=1 << 10)
def optimizer(call: Expr) -> OptimizerSpec:
    """Call an optimizer function; return the result, a specification of the optimizer.

    The specification does not contain the learning rate, because the learning rate is set at each optimizer step.
    Raises ValueError if the options contradict each other.
    """
    spec: OptimizerSpec = load("optimizer", str(call.value))(
        lr=0.0, **{option: value for option, value in call.options().items() if option != "lr"}
    )
    return spec
