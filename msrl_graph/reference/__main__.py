"""Print the language reference, docs/language.md."""

from . import document

print(document(), end="")
