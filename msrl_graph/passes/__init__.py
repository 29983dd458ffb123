"""The passes: pure, deterministic functions from a plan to a plan.

Each module contains one pass. Invariant: a pass fills its own fields of the plan and may add notes. It reads only
fields that are filled by the passes in its attribute `needs` (spec.py). order.py lists all passes.
"""
