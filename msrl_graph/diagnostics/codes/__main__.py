"""Print the catalogue of codes, docs/reference/codes.md."""

from . import catalogue

print(catalogue(), end="")
