"""Weights in transit: resharded, sent, saved and restored."""
