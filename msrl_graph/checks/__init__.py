"""Checks of programs, one concern per file; table.py lists them by stage.

Invariant: checks never change a graph or a plan. Each mistake is reported once. If one mistake causes a second mistake,
only the first mistake is reported.
"""
