"""msrl_graph: a language and compiler for reinforcement learning of LLMs.

A program is an .rlg file, or an object that you build in Python with `Algorithm`, `Cluster`, `Deploy` and `Imported`
(docs/guides/python.md).

- `compile` returns the Plan of a program. `check` returns the Graph of a program: the algorithm without its placement.
- `parse` returns the syntax tree of a program's text. `to_rlg` returns the text of a syntax tree, or of a program that
  was built in Python.
- `simulate` predicts how long the iterations of a plan take when the lengths of rows differ.
- `run` trains as a plan says; it needs the optional dependencies `msrl_graph[run]`. `export` writes the trained weights
  as Hugging Face folders.
- An error is raised as a `Fault`. A likely mistake is reported as a `ProgramWarning`.
- `function` and `loss_term` are decorators for functions and loss terms in your own files (docs/guides/functions.md,
  docs/guides/own_loss.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import emit as _emit
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

# A name is imported on first use. Only training imports torch and ray. Only compiling imports the compiler, which the
# processes of a run never need.
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

# `emit` shows graphs and plans. It is a layer above `ir`, so it is set here.
_views.facade = _emit


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
