"""A Pygments lexer that highlights `.rlg` code in pages, editors and terminals.

Pygments finds this module by the entry point in pyproject.toml; nothing in the package imports it.

Invariant: words and symbols come from the grammar, so that a new word is highlighted without a change in this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lark import Lark
from lark.lexer import TerminalDef
from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

# Terminals that are neither keywords nor symbols.
LITERALS = {
    "NAME": Name,
    "STRING": String,
    "INT": Number.Integer,
    "FLOAT": Number.Float,
    "QUANTITY": Number,
    "TRUE": Keyword.Constant,
    "FALSE": Keyword.Constant,
}
PUNCTUATION = frozenset("{}[](),.:")
# A keyword that is not reserved is a name if a symbol other than a brace is next to it: `nodes = 4`, `actor.run`.
NOT_AFTER_SYMBOL = r"(?<![.,(=:>])(?<![,=:>] )"
NOT_BEFORE_SYMBOL = r"""(?![ \t]*[^\s\w"{}#])"""
NOT_AFTER_DOT = r"(?<!\.)"
BEFORE_VALUE = r"(?=[ \t]*=(?![=>]))"
BEFORE_ARGUMENTS = r"(?=\()"


def lexer_rules(grammar: str) -> list[tuple[str, Any]]:
    """Return the patterns and token types of a lark grammar.

    The patterns are in the order in which the lexer must try them.
    """
    lark = Lark(grammar, parser=None, lexer="basic")
    name = next(terminal.pattern.to_regexp() for terminal in lark.terminals if terminal.name == "NAME")
    rules = [
        (NOT_AFTER_DOT + name + BEFORE_VALUE, Name.Attribute),
        (name + BEFORE_ARGUMENTS, Name.Function),
    ]
    for terminal in sorted(lark.terminals, key=_rank):
        pattern = terminal.pattern.to_regexp()
        if terminal.name in lark.ignore_tokens:
            rules.append((pattern, Whitespace if re.match(pattern, " ") else Comment.Single))
        elif terminal.name in LITERALS:
            rules.append((pattern, LITERALS[terminal.name]))
        elif not (word := terminal.pattern.value.removesuffix(r"\b")).isidentifier():
            rules.append((pattern, Punctuation if word in PUNCTUATION else Operator))
        elif re.fullmatch(name, word):
            rules.append((NOT_AFTER_SYMBOL + pattern + NOT_BEFORE_SYMBOL, Keyword))
        else:
            rules.append((pattern, Keyword))
    return rules


def _rank(terminal: TerminalDef) -> tuple[int, int, int, str]:
    """Return a sort key: terminals are sorted in the order in which lark tries them."""
    pattern = terminal.pattern
    return -terminal.priority, -pattern.max_width, -len(pattern.value), terminal.name


class RlgLexer(RegexLexer):  # type: ignore[misc]
    """A lexer of `.rlg` files, which also splits invalid text into tokens."""

    name = "msrl_graph"
    aliases = ("rlg",)
    filenames = ("*.rlg",)
    tokens = {"root": lexer_rules((Path(__file__).parent / "grammar.lark").read_text(encoding="utf-8"))}  # noqa: RUF012
