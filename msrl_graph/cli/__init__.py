"""The commands: each gets command line flags and returns an exit status."""

from .compile import compile_main
from .run import run_main, run_plan

__all__ = ["compile_main", "run_main", "run_plan"]
