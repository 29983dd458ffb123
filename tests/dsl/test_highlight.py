"""The lexer of `.rlg` for Pygments: what it highlights is what the grammar says."""

import itertools
import re
import string
import subprocess
import sys

import pytest
from folders import ROOT
from lark import Lark, Tree
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String

from msrl_graph.dsl.highlight import LITERALS, PUNCTUATION, RlgLexer, lexer_rules
from msrl_graph.dsl.parse import parse_tokens

GRAMMAR = (ROOT / "msrl_graph" / "dsl" / "grammar.lark").read_text(encoding="utf-8")
LARK = Lark(GRAMMAR, parser=None, lexer="basic")
TERMINALS = {t.name: t.pattern for t in LARK.terminals}
WORDS = {word for p in TERMINALS.values() if (word := p.value.removesuffix(r"\b")).isidentifier()}
SKIPPED = {*LITERALS, *LARK.ignore_tokens}
SYMBOLS = {
    symbol
    for length in (1, 2)
    for symbol in map("".join, itertools.product(string.punctuation, repeat=length))
    if any(re.fullmatch(p.to_regexp(), symbol) for name, p in TERMINALS.items() if name not in SKIPPED)
}
FOLDERS = ("tests/programs", "msrl_graph/algorithms", "examples")
PROGRAMS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.rlg"))


def lex(text, lexer=RlgLexer):
    """Return the tokens of a text that are not blanks, as (position, token type, text)."""
    return [(start, kind, part) for start, kind, part in lexer().get_tokens_unprocessed(text) if not part.isspace()]


@pytest.mark.parametrize("word", sorted(WORDS))
def test_keywords(word):
    assert lex(f"{word} x")[0][1] in Keyword
    assert lex(f"{word}_ x")[0][1] is Name
    assert lex(word) == [(0, lex(f"{word} x")[0][1], word)]


@pytest.mark.parametrize("symbol", sorted(SYMBOLS))
def test_symbols(symbol):
    ((_, kind, part),) = lex(symbol)
    assert part == symbol
    assert kind is (Punctuation if symbol in PUNCTUATION else Operator)


def test_the_grammar_has_words_and_symbols():
    assert {"algorithm", "on", "true"} < WORDS
    assert {"->", "=>", "<=", "..", "+", "{"} < SYMBOLS


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("# a node", Comment.Single),
        (r'"a \" # b"', String),
        ("12", Number.Integer),
        ("2e-4", Number.Float),
        ("64 GiB", Number),
        ("reward", Name),
        ('"open', Error),
    ],
)
def test_other_tokens(text, kind):
    assert lex(text)[0][1] is kind


def test_a_word_that_is_not_reserved_is_a_name_where_the_grammar_has_one():
    kinds = {part: kind for _, kind, part in lex("run { nodes = 4, data == 2 }\n host.place(x)")}
    assert [kinds[word] for word in ("run", "nodes", "data", "place")] == [Keyword, Name.Attribute, Name, Name.Function]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_are_highlighted_as_they_are_parsed(path):
    text = path.read_text(encoding="utf-8")
    tokens = list(RlgLexer().get_tokens_unprocessed(text))
    assert "".join(part for _, _, part in tokens) == text
    assert [part for _, kind, part in tokens if kind is Error] == []
    keywords = {start for start, kind, _ in tokens if kind in Keyword}
    assert keywords == set(parsed_keywords(parse_tokens(text, path.name)))


def parsed_keywords(tree):
    """Yield the positions of keywords; a word that the parser accepts as the key of an attribute is not one."""
    for part in tree.children:
        if isinstance(part, Tree):
            yield from parsed_keywords(part) if part.data != "key" else ()
        elif part is not None and part.type != "NAME" and part.isidentifier():
            yield part.start_pos


def test_a_new_word_in_the_grammar_is_highlighted():
    grammar = GRAMMAR.replace("_astmt: param |", "_astmt: _FREEZE NAME | param |") + "_FREEZE.2: /freeze\\b/\n"
    lexer = type("NewLexer", (RlgLexer,), {"tokens": {"root": lexer_rules(grammar)}})
    assert lex("freeze actor")[0][1] is Name
    assert lex("freeze actor", lexer) == [(0, Keyword, "freeze"), (7, Name, "actor")]


def test_pygments_finds_the_installed_lexer():
    """If it does not, install the package again: pip reads entry points when it installs."""
    assert isinstance(get_lexer_by_name("rlg"), RlgLexer)
    assert isinstance(get_lexer_for_filename("program.rlg"), RlgLexer)


def test_compiling_does_not_import_pygments():
    program = ROOT / "examples" / "arithmetic" / "grpo.rlg"
    code = f"import sys, msrl_graph; msrl_graph.compile({str(program)!r}); sys.exit('pygments' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
