"""msrl_graph: a language and compiler for reinforcement learning of LLMs.

A program is an .rlg file, or is built in Python with `Algorithm`, `Cluster`, `Deploy` and `Imported`
(docs/guides/python.md).

- `compile` returns its Plan, `check` its Graph (the algorithm without its placement), `parse` the syntax tree of a
  text, and `to_rlg` the text of a tree or of what was built.
- `simulate` predicts how long a plan's iterations take when rows differ.
- `run` trains with a plan (it needs the extra `run`), and `export` writes the trained weights as Hugging Face folders.
- Errors are raised as a `Fault`, suspicious things are reported as a `ProgramWarning`.
- `function` and `loss_term` mark functions and loss terms in your own files (docs/guides/functions.md,
  docs/guides/own_loss.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .ir import views as _views

if TYPE_CHECKING:
    from .algorithms.registry import function, loss_term
    from .api import export, run
    from .builder import Algorithm, Cluster, Deploy, Imported, to_rlg
    from .compiler.pipeline import check, compile
    from .diagnostics import Fault, ProgramWarning
    from .dsl.parse import parse
    from .ir.graph import Graph
    from .simulation import simulate

__all__ = [
    "Algorithm",
    "Cluster",
    "Deploy",
    "Fault",
    "Graph",
    "Imported",
    "ProgramWarning",
    "check",
    "compile",
    "export",
    "function",
    "loss_term",
    "parse",
    "run",
    "simulate",
    "to_rlg",
]

# Loaded on demand: torch and ray only for training, and the compiler only for compiling, which the processes of a run
# do not do.
_HOMES = {
    **dict.fromkeys(("check", "compile"), ".compiler.pipeline"),
    **dict.fromkeys(("Fault", "ProgramWarning"), ".diagnostics"),
    "Graph": ".ir.graph",
    **dict.fromkeys(("function", "loss_term"), ".algorithms.registry"),
    "parse": ".dsl.parse",
    **dict.fromkeys(("Algorithm", "Cluster", "Deploy", "Imported", "to_rlg"), ".builder"),
    **dict.fromkeys(("export", "run"), ".api"),
    "simulate": ".simulation",
}

# How a graph or a plan is shown is the task of `emit`, a layer above `ir`.
_views.emitter = lambda name: import_module(f".emit.{name}", __name__)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
