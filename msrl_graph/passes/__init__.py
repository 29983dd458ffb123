"""Passes: `Plan -> Plan`, pure and deterministic, one idea a file.

Invariant: a pass fills its own part of the plan (and notes on it) and reads only what the passes fill that it needs
(spec.py); order.py lists them all.
"""
