"""Seconds and bytes of a plan, computed with closed formulas from its sizes."""
