"""Tools for a user's environment: untrusted code in a sandbox."""

from .sandbox import SandboxResult, SandboxUnavailable, run_python

__all__ = ["SandboxResult", "SandboxUnavailable", "run_python"]
