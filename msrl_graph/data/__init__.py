"""The rows of a program's data files, and the values that their fields can have."""
