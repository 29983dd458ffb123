"""Weights on their way: resharded, sent, saved and restored."""
