"""Columns of rows, the files that fill them, and checks of their values."""
