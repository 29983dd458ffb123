"""The passes: pure, deterministic functions from a plan to a plan.

Each file holds one pass. Invariant: a pass fills its own part of the plan, may add notes, and reads only the parts
filled by the passes that it needs (spec.py). order.py lists all passes.
"""
