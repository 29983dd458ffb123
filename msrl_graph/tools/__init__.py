"""What a user's environment may use: code that nobody vouches for, run apart."""

from .sandbox import NotClosed, Ran, run_python

__all__ = ["NotClosed", "Ran", "run_python"]
