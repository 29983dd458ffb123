"""msrl_graph: a small language and its compiler for reinforcement learning of large language models.

A program is an .rlg file, or is built in Python by `Algorithm`, `Cluster`, `Deploy` and `Imported` (docs/python.md).
`compile` gives its Plan, `check` its Graph (the algorithm apart from where it runs), `parse` the syntax tree of a text,
`to_rlg` the text of a tree or of what was built. `simulate` says what iterations of a plan take when rows differ, `run`
trains by one (it needs the extra `run`), and `export` writes what it learnt as Hugging Face folders. What is wrong is
told by a `Fault`, what is suspicious by a `ProgramWarning`. `function` and `loss_term` mark functions and terms of a
loss in files of one's own (docs/functions.md).
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

# Loaded on demand: torch and ray by those who train, the compiler by those who compile, which the processes of a run do
# not.
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

# What a graph or a plan shows of itself is made by a room above theirs.
_views.emitter = lambda name: import_module(f".emit.{name}", __name__)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
