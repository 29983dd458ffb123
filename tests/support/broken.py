"""Broken programs by the thousand, and what must hold of all that is told of them.

Invariant of a mutation: the same program and the same `random.Random` give the same text. Mutations know tokens, lines
and statements of the language, so that most of what they make gets past the parser and is wrong in its meaning.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from language import PROGRAMS, TESTS

from msrl_graph import algorithms
from msrl_graph.backends import ENGINES
from msrl_graph.compiler.pipeline import Compilation, translate
from msrl_graph.compiler.sources import ProgramSource, collect_texts
from msrl_graph.diagnostics import Diagnostic, Fault, Span, codes, render, render_json
from msrl_graph.diagnostics.terminal_text import make_printable
from msrl_graph.dsl.syntax_errors import ALGORITHM, DEPLOY, RESERVED, SCAN, UNITS
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.options import LayoutOptions
from msrl_graph.ir.statements import STATEMENTS

ROOT = TESTS.parent
FILES = [
    *PROGRAMS,
    *sorted(algorithms.FOLDER.glob("*.rlg")),
    *sorted((ROOT / "examples").rglob("*.rlg")),
    *sorted((TESTS / "corpus").glob("*.rlg")),
]
TEXTS = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in FILES if p.is_relative_to(ROOT)}
# Programs that a plan comes of, with the options that it takes: what breaks them reaches the passes.
PLANNED: dict[str, dict[str, str]] = {
    "tests/programs/grpo_page.rlg": {},
    "tests/programs/apart_two.rlg": {},
    "tests/programs/apart_four.rlg": {},
    "tests/programs/small.rlg": {},
    "tests/programs/stale.rlg": {},
    "msrl_graph/algorithms/grpo.rlg": {"model": "tiny"},
    "examples/arithmetic/grpo.rlg": {},
    "examples/arithmetic/control.rlg": {},
    "examples/arithmetic/one_rank.rlg": {},
    "examples/arithmetic/two_ranks.rlg": {},
    "examples/paper/paper.rlg": {"deploy": "dense7"},
}
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "-0.0",
    "1e-400",
    "1e308",
    "1e400",
    "9" * 16,
    "9" * 18,
    "9" * 400,
    "9007199254740993",
)
NUMBERS += ("inf", "nan", "NaN", "1_000", "0x10", "1.", ".5", "1e", "true", '""', "[]", "()", "00012", "١٢")
WORDS = (
    *RESERVED,
    *ALGORITHM,
    *DEPLOY,
    "on",
    "as",
    "per",
    "extends",
    "frozen",
    "together",
    "nodes",
    "devices",
    "samples",
    "tp",
    "staleness",
)
WORDS += (
    "batch",
    "row",
    "refill",
    "partial",
    "keep",
    "select",
    "stream",
    "stream_tokens",
    "balance",
    "every",
    "after",
    "environment",
    "turns",
    "weights",
)
SIGNS = (
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    ":",
    ".",
    "..",
    "=",
    "->",
    "=>",
    "<=",
    "==",
    "!=",
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "#",
    '"',
    "'",
)
CHARACTERS = (
    "\x00",
    "\t",
    "\r",
    "\r\n",
    "\n",
    "\f",
    "\v",
    "\x85",
    "\xa0",
    "\u2028",
    "\u200b",
    "\u3000",
    "\ufeff",
    "\ufffd",
    "e\u0301",
)
CHARACTERS += (
    "\x1b[31m",
    "\x7f",
    "ü",
    "漢",
    "😀",
    "👩‍👩‍👧",
    "\u202e",
    "\\",
    "\\u0041",
    "$",
    "@",
    "`",
    ";",
    "?",
    "\ud7ff",
    "½",
    "²",
)

VALUES = (
    *NUMBERS,
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "8",
    "10",
    "12",
    "16",
    "64",
    "1000",
    "100000",
    "100000000",
    "0.1",
    "1e-9",
    "-0.5",
    "1e18",
)
VALUES += (
    "1 B",
    "0 GB",
    "64 GiB",
    "1 KB/s",
    "300 MB/s",
    "1e300 PB",
    "1e-300 B",
    "0.001 us",
    "1e300 h",
    "5 min",
    "1 FLOP",
    "376 TFLOP/s",
)
VALUES += (
    "true",
    "false",
    '"x"',
    "tokens",
    "prompt",
    "batch",
    "ring",
    "full",
    "none",
    "bf16",
    "central",
    "naive",
    "staged",
    "skip",
    "low_var",
)
VALUES += (
    "[1]",
    "[14, 14]",
    "[reward]",
    "clip(0.2)",
    "kl(low_var)",
    "group_norm()",
    "math_verify()",
    "adamw(lr = 1e-6)",
    "shuffle()",
)
VALUES += ("1 / 0", "prompts * group", "group // 3", "reward > 0.5", *(f'"{d}"' for d in DEVICES))
KEYS = sorted({key for said in STATEMENTS.values() for key in said.declared()})


def tokens(text: str) -> list[re.Match[str]]:
    return [m for m in SCAN.finditer(text) if m.lastgroup != "blank"]


def _token(text: str, other: str, rng: random.Random) -> str:
    """One token deleted, doubled, swapped with another or replaced."""
    found = tokens(text)
    if not found:
        return other
    at = rng.choice(found)
    start = at.start()
    end = at.end()
    word = at[0]
    # Another token of the same kind keeps a program's syntax: most of these get to the checks.
    same = [m for m in found if m.lastgroup == at.lastgroup] or found
    change = rng.randrange(9)
    if change == 0:
        return text[:start] + text[end:]
    if change == 1:
        return f"{text[:end]} {word}{text[end:]}"
    if change == 2:
        first, second = sorted((at, rng.choice(same)), key=lambda m: m.start())
        if first.start() == second.start():
            return text
        between = text[first.end() : second.start()]
        return text[: first.start()] + second[0] + between + first[0] + text[second.end() :]
    if change == 3:
        return f"{text[:start]}{rng.choice((*WORDS, *SIGNS, *NUMBERS))} {text[start:]}"
    if change == 4:
        return text[:start] + rng.choice((*WORDS, *SIGNS)) + text[end:]
    if change == 5:
        elsewhere = [m for m in tokens(other) if m.lastgroup == at.lastgroup]
        return text[:start] + (rng.choice(elsewhere)[0] if elsewhere else "") + text[end:]
    return text[:start] + rng.choice(same)[0] + text[end:]


def _number(text: str, other: str, rng: random.Random) -> str:
    """A number or its unit changed."""
    found = [m for m in SCAN.finditer(text) if m.lastgroup == "number" or m["number"]]
    if not found:
        return text
    at = rng.choice(found)
    unit = re.match(r"[ \t]*[A-Za-z]+(/s)?", text[at.end() :])
    after = at.end() + (unit.end() if unit else 0)
    change = rng.randrange(5)
    if change == 0:
        return f"{text[: at.end()]} {rng.choice((*UNITS, 'GiB/s', 'FLOP/s', 'MB/h', 'Gb', 'tokens'))}{text[after:]}"
    if change == 1 and unit:
        return text[: at.end()] + text[after:]
    return text[: at.start()] + rng.choice(NUMBERS) + text[at.end() :]


def _value(text: str, rng: random.Random) -> str:
    """Something that may stand behind `=`."""
    if rng.random() < 0.7:
        return rng.choice(VALUES)
    names = re.findall(r"\b[a-z_]+\b", text) or ["x"]
    return rng.choice(
        (
            rng.choice(names),
            f"[{rng.choice(VALUES)}, {rng.choice(names)}]",
            f"{rng.choice(names)}({rng.choice(names)})",
            (
                f"{rng.choice(VALUES)} {rng.choice(('+', '-', '*', '/', '//', '%', '==', '<=', '>'))} "
                f"{rng.choice((*VALUES, *names))}"
            ),
            f"-({rng.choice((*VALUES, *names))})",
        )
    )


def _states(text: str, rng: random.Random) -> str:
    found = re.findall(r"\b(?:actor|critic|reference|host|judge)(?:\.\w+)?\b", text) or ["actor"]
    return ", ".join(rng.choice(found) for _ in range(rng.choice((1, 1, 2, 3))))


def _attribute(text: str, other: str, rng: random.Random) -> str:
    """An attribute given to a statement, or another value to one that has it."""
    keyed = list(re.finditer(r"\b(\w+)[ ]*= (?!=)([^,\n}]*)", text))
    if keyed and rng.random() < 0.5:
        at = rng.choice(keyed)
        return text[: at.start(2)] + _value(text, rng) + text[at.end(2) :]
    braces = [m for m in tokens(text) if m[0] == "{"]
    if not braces:
        return text
    end = rng.choice(braces).end()
    return f"{text[:end]} {rng.choice(KEYS)} = {_value(text, rng)},{text[end:]}"


def _deployed(text: str, other: str, rng: random.Random) -> str:
    """A statement in a deploy that says where or how."""
    deploys = list(re.finditer(r"^deploy .*\{", text, re.MULTILINE))
    if not deploys:
        return text
    kind = rng.choice(
        (
            "layout",
            "layout",
            "engine",
            "place",
            "apart",
            "dock",
            "reshard",
            "evaluate",
            "run",
            "set",
            "model",
            "data",
            "edge",
        )
    )

    def attributes(keys: Sequence[str]) -> str:
        return (
            "{ "
            + ", ".join(
                f"{k} = {_value(text, rng)}" for k in rng.sample(sorted(keys), rng.randrange(min(4, len(keys) + 1)))
            )
            + " }"
        )

    def span() -> str:
        first = rng.choice((0, 0, 1, 2, 3, 7, 8, 10**6))
        return f"{first}..{rng.choice((0, 1, 2, 3, 7, 15, 10**6, 10**17))}" if rng.random() < 0.6 else str(first)

    if kind == "engine":
        engine = rng.choice(sorted(ENGINES))
        line = f"engine {_states(text, rng)} = {engine} {attributes([*ENGINES[engine].capabilities.options])}"
    elif kind == "layout":
        sizes = ", ".join(
            f"{k} = {rng.choice((1, 1, 2, 3, 4, 8, 10**8))}"
            for k in rng.sample(("tp", "cp", "pp", "dp", "ep", "etp", "vpp"), 2)
        )
        line = f"layout {_states(text, rng)} " + (
            f"{{ {sizes} }}" if rng.random() < 0.6 else attributes([*LayoutOptions.declared()])
        )
    elif kind == "place":
        devices = f" devices {span()}" if rng.random() < 0.5 else ""
        line = f"place {_states(text, rng)}{rng.choice(('', ' together'))}" + (
            f" on nodes {span()}{devices}" if rng.random() < 0.7 else ""
        )
    elif kind == "edge":
        keys = ("stream", "stream_tokens", "balance", "staleness", "every")
        line = f"{_states(text, rng)} {rng.choice(('->', '=>'))} {_states(text, rng)} {attributes(keys)}"
    else:
        line = {
            "apart": f"apart {_states(text, rng)}",
            "evaluate": (
                f"evaluate {rng.choice(('held_out', 'test', 'source'))} "
                f"{attributes([*STATEMENTS['evaluate'].declared()])}"
            ),
            "set": f"set {rng.choice(re.findall('param ([a-z_]+)', text) or ['x'])} = {_value(text, rng)}",
            "model": (
                f"model {rng.choice(('policy', 'value', 'actor'))} = "
                f'"{rng.choice(("tiny", "qwen2.5-7b", "./model", "", "x" * 300))}"'
            ),
            "data": f'data {rng.choice(("source", "held_out"))} = "train.jsonl" {{ prompt = {_value(text, rng)} }}',
        }.get(kind) or f"{kind} {attributes([*STATEMENTS[kind].declared()])}"
    end = rng.choice(deploys).end()
    return f"{text[:end]}\n  {line}{text[end:]}"


def _character(text: str, other: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    new = rng.choice((*CHARACTERS, *SIGNS, chr(rng.randrange(1, 0xD800))))
    return text[:at] + new + text[at + rng.randrange(3) :]


def _cut(text: str, other: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] if rng.random() < 0.7 else text[at:]


def _lines(text: str, other: str, rng: random.Random) -> str:
    """Lines in another order, left out, or doubled."""
    lines = text.split("\n")
    change = rng.randrange(5)
    i = rng.randrange(len(lines))
    j = rng.randrange(len(lines))
    if change == 0:
        rng.shuffle(lines)
    elif change == 1:
        lines[i], lines[j] = lines[j], lines[i]
    elif change == 2:
        del lines[i]
    elif change == 3:
        lines.insert(j, lines[i])
    else:
        lines.insert(i, rng.choice(other.split("\n")))
    return "\n".join(lines)


def _statement(text: str, other: str, rng: random.Random) -> str:
    """Statements of an algorithm or a deploy left out, doubled, or taken from another program."""
    statement = re.compile(r"^  (?! |\}).*(?:\n(?:   |  \}).*)*$", re.MULTILINE)
    found = list(statement.finditer(text))
    more = list(statement.finditer(other))
    if not found or not more:
        return text
    at = rng.choice(found)
    change = rng.randrange(4)
    if change == 0:
        return text[: at.start()] + text[at.end() :]
    if change == 1:
        return f"{text[: at.end()]}\n{rng.choice(found)[0]}{text[at.end() :]}"
    return f"{text[: at.start() if change == 2 else at.end()]}\n{rng.choice(more)[0]}{text[at.end() :]}"


def _spliced(text: str, other: str, rng: random.Random) -> str:
    a = text.split("\n")
    b = other.split("\n")
    return "\n".join(a[: rng.randrange(len(a) + 1)] + b[rng.randrange(len(b) + 1) :])


MUTATIONS: Mapping[str, Callable[[str, str, random.Random], str]] = {
    "token": _token,
    "number": _number,
    "attribute": _attribute,
    "deployed": _deployed,
    "character": _character,
    "cut": _cut,
    "lines": _lines,
    "statement": _statement,
    "spliced": _spliced,
}
OFTEN = (
    "token",
    "token",
    "number",
    "attribute",
    "attribute",
    "deployed",
    "deployed",
    "statement",
    "lines",
    "character",
    "cut",
    "spliced",
)


def mutated(name: str, rng: random.Random, kinds: Sequence[str] = OFTEN) -> str:
    """A program with one to four changes."""
    text = TEXTS[name]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        text = MUTATIONS[rng.choice(kinds)](text, TEXTS[rng.choice(sorted(TEXTS))], rng)
    return text


def compiled(
    text: str, name: str = "program.rlg", folder: Path = TESTS, **options: str
) -> tuple[Compilation | None, list[Diagnostic]]:
    """The outcome of a compilation, whose diagnostics are as they should be. Whatever is raised but a Fault is for the
    caller."""
    source = ProgramSource(name, text.removeprefix("\ufeff"), folder)
    try:
        result = translate(source, **options)  # type: ignore[arg-type]
        found = list(result.warnings)
        assert not [d for d in found if d.severity == "error"], found
    except Fault as fault:
        result = None
        found = list(fault.diagnostics)
        assert [d for d in found if d.severity == "error"], "a fault without an error"
    hold(source, found)
    return result, found


def hold(source: ProgramSource | None, found: Sequence[Diagnostic]) -> None:
    """What holds of all diagnostics: a known code, a message, spans inside of a text, and all forms of them can be
    shown."""
    known = collect_texts(source, found)
    for d in found:
        assert d.code in codes.known() and d.message.strip() and "\n" not in d.message, d
        assert d.span.line or d.code in NO_PLACE, d
        for span in (d.span, *(s for s, _ in d.related)):
            if span.line:
                assert span.file in known, d
                within(span, known[span.file])
        for style in ("full", "concise"):
            assert make_printable(d.message) in render(d, known, style)
    assert len(json.loads(render_json(found))) == len(found)


NO_PLACE = {"no-deploy", "missing-file", "unknown-model", "unknown-name"}


def within(span: Span, text: str) -> None:
    lines = text.split("\n")
    for line, column in ((span.line, span.column), (span.end_line, span.end_column)):
        assert 1 <= line <= len(lines), span
        assert 1 <= column <= len(lines[line - 1]) + 1, span
    assert (span.end_line, span.end_column) >= (span.line, span.column), span
