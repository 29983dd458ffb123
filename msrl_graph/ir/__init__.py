"""The intermediate representation: the graph of an algorithm and the plan.

Invariant: a graph and a plan are plain, immutable data.
"""
