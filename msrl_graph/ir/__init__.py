"""The intermediate representation: the graph of an algorithm and the plan.

Invariant: both are plain, immutable data.
"""
