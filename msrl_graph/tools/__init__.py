"""Tools for a user's environment: a sandbox for untrusted Python code."""

from .sandbox import SandboxResult, SandboxUnavailable, run_python

__all__ = ["SandboxResult", "SandboxUnavailable", "run_python"]
