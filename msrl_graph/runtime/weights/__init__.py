"""Weights that are resharded, sent between pools, saved and restored."""
