"""msrl_graph: a small language and its compiler for reinforcement learning of large language models.

`compile` gives the Plan of an .rlg program, `parse` its syntax tree, `simulate` says what iterations of a plan take when rows differ,
`run` trains by one (it needs the extra `run`); `Graph` is an algorithm apart from where it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# At once, not on demand: the function must take the name from the module that it lives in.
from .compile import compile
from .dsl.parse import parse
from .graph import Graph

if TYPE_CHECKING:
    from .runtime.supervisor import run
    from .simulation import simulate

__all__ = ["Graph", "compile", "parse", "run", "simulate"]


def __getattr__(name: str) -> object:
    # torch and ray are loaded by those who train, not by those who compile.
    if name == "run":
        from .runtime.supervisor import run

        return run
    if name == "simulate":
        from .simulation import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
