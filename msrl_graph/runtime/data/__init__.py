"""Rows: columns of them, where they come from, and whether what they hold can be trained on."""
