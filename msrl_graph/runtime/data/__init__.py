"""Columns of rows, the files from which columns are read, and checks of values."""
