"""Seconds and bytes of a plan, as closed formulas of its sizes."""
