"""The algorithms (`*.rlg`) and the functions that msrl_graph itself provides.

Invariant: a program can call a function by its name if two conditions hold:

- The function is defined in a module that MODULES lists, or in a module that another package provides (plugins.py).
- The function is decorated with a decorator of registry.py. All other functions of the module are helpers.

The names and signatures are parsed from the source files, without an import. A module is imported only when one of its
functions is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..files.plugins import PlugIn, describe, find_entry_points
from ..ir.graph import Expr
from ..ir.optimizer_spec import OptimizerSpec
from ..ir.signatures import CallKind, Signature, read_marked_signatures

FOLDER = Path(__file__).parent
PLUG_INS = "msrl_graph.functions"
MODULES = ("losses", "pair_losses", "optimizers", "advantages", "rewards", "filters", "states", "texts")


@cache
def library() -> dict[tuple[CallKind, str], tuple[Signature, str]]:
    """Return the signature and module of each function, loss term and optimizer.

    A key is a pair: the kind of the function, for example a loss term, and the name of the function. The functions are
    those of this package, then those of other packages. A name that is taken keeps its first meaning.
    """
    files: dict[str, Path | None] = {module: FOLDER / f"{module}.py" for module in MODULES}
    files |= {entry.value: _find_source(entry.value) for entry in find_entry_points(PLUG_INS).values()}
    signatures_by_name: dict[tuple[CallKind, str], tuple[Signature, str]] = {}
    for module, file in files.items():
        for name, signature in read_marked_signatures(file.read_text(encoding="utf-8")).items() if file else ():
            signatures_by_name.setdefault((signature.kind, name), (signature, module))
    return signatures_by_name


def _find_source(module: str) -> Path | None:
    """Return the file of a module; None if there is none.

    The module is not imported.
    """
    try:
        spec = find_spec(module)
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def find_package(name: str) -> PlugIn | None:
    """Return the package that provides the functions called `name`.

    The result is None for functions of this package.
    """
    modules = {module for (_, function), (_, module) in library().items() if function == name}
    entries = find_entry_points(PLUG_INS).values()
    return next((describe(PLUG_INS, entry.name) for entry in entries if entry.value in modules), None)


def load(kind: CallKind, name: str) -> Callable[..., Any]:
    """Import a function of the library and return it.

    Raises KeyError if no function has this kind and name.
    """
    module = library()[kind, name][1]
    function: Callable[..., Any] = getattr(
        import_module(f".{module}", __name__) if module in MODULES else import_module(module), name
    )
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
