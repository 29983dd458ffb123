"""The rules of the grammar in EBNF, for the language reference.

Invariant: the rules are the rules in `dsl/grammar.lark`, without the details that only the parser needs, and with
quotes around each keyword and sign.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from .. import dsl

GRAMMAR = Path(dsl.__path__[0]) / "grammar.lark"
_RULE = re.compile(r"^[?!]?(_?[a-z_]+): *((?:.+(?:\n +\|.*)*))$", re.MULTILINE)
_TERMINAL = re.compile(r"^(_?[A-Z_]+)(?:\.\d+)?: (.+)$", re.MULTILINE)
# Terminals that are shown by name, because a reader learns less from the pattern; the page on words explains them.
NAMED = ("NAME", "STRING", "INT", "FLOAT", "QUANTITY")


@functools.cache
def known() -> dict[str, str]:
    """Return the body of each grammar rule, by rule name, in the order of the grammar."""
    text = GRAMMAR.read_text(encoding="utf-8")
    terminals = {name: _shown(body) for name, body in _TERMINAL.findall(text)}

    def word(match: re.Match[str]) -> str:
        name = match[0]
        if name in NAMED or name.startswith('"'):
            return name
        return terminals[name] if name.isupper() else _plain(name)

    rules = {}
    for name, body in _RULE.findall(text):
        body = re.sub(r" *-> \w+", "", re.sub(r"\s+", " ", re.sub(r"  //.*", "", body)))
        rules[_plain(name)] = re.sub(r'"[^"]*"|\b\w+', word, body)
    return rules


def reserved() -> list[str]:
    """Return the reserved words of the language."""
    match = re.search(r"^NAME: /\(\?!\(([a-z|]+)\)", GRAMMAR.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match[1].split("|")


def rules(names: Iterable[str]) -> str:
    """Return grammar rules, one per line. Raises KeyError for an unknown name."""
    chosen = {name: known()[name] for name in names}
    width = max(map(len, chosen))
    return "\n".join(f"{name:<{width}} = {body}" for name, body in chosen.items())


def _plain(rule: str) -> str:
    return rule.strip("_")


def _shown(pattern: str) -> str:
    """Return the pattern of a terminal symbol as the language reference shows it.

    A keyword is shown in quotes. A choice between several signs is shown in parentheses.
    """
    keyword = re.fullmatch(r"/(\w+)\\b/", pattern)
    return f'"{keyword[1]}"' if keyword else f"({pattern})" if "|" in pattern else pattern
