"""What follows from a graph or a plan: sequences, rows, staleness, shares of rows.

Invariant: each module is pure functions of a graph or a plan, which it does not change.
"""
