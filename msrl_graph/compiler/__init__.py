"""Compilation of a program from text to a plan."""
