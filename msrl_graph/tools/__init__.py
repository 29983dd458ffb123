"""What a user's environment may use: code that nobody vouches for, run apart."""

from .sandbox import SandboxResult, SandboxUnavailable, run_python

__all__ = ["SandboxResult", "SandboxUnavailable", "run_python"]
