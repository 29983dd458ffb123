"""Closed formulas for the seconds and the bytes of a plan."""
