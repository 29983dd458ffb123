"""A program's data files, row by row, and what their fields may hold."""
