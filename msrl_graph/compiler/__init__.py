"""Compilation from text to a plan."""
