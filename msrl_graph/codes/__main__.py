"""Print the catalogue of codes, docs/codes.md."""

from . import catalogue

print(catalogue(), end="")
