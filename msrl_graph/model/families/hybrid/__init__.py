"""Families whose models have recurrent layers, besides layers of attention."""
