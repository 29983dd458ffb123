"""The Python API, described in docs/guides/python.md."""

from .programs import Algorithm, Cluster, Deploy, Imported, Program, to_rlg

__all__ = ["Algorithm", "Cluster", "Deploy", "Imported", "Program", "to_rlg"]
