"""Calls of tools in what a policy wrote, by the format that its chat template teaches it.

Invariant: what stands here only reads; how calls are written again is the template's. A text that holds no whole call
is an answer like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...data.characters import half_character_within

Call = tuple[str, dict[str, Any]]  # the name of a tool, and its arguments
Calls = Callable[[str], tuple[str, list[Call]]]  # from a text to what is said beside the calls, and these


@dataclass(frozen=True)
class Format:
    """How calls are written: `mark` is what a template that teaches it holds; each match of `pattern` is JSON of one
    call, or of a list of them, with the arguments under the key `arguments`."""

    mark: str
    pattern: re.Pattern[str]
    arguments: str = "arguments"

    def __call__(self, text: str) -> tuple[str, list[Call]]:
        found: list[Call] = []
        for match in self.pattern.finditer(text):
            calls = list(self._read(match[1]))
            if not calls:
                return text, []  # one that is no JSON: the policy said something, and called nothing
            found += calls
        said = self.pattern.sub("", text).strip() if found else text
        return said, found

    def _read(self, text: str) -> Iterator[Call]:
        with suppress(ValueError, RecursionError):  # whatever a policy wrote
            value = json.loads(text)
            if half_character_within(value):
                return
            for call in value if isinstance(value, list) else [value]:
                arguments = call.get(self.arguments, {}) if isinstance(call, dict) else None
                if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
                    return
                yield call["name"], arguments


# Another one is a line. Of a template that holds several marks the first counts.
FORMATS = {
    "hermes": Format("<tool_call>", re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)),  # Qwen2.5, Qwen3
    "mistral": Format("[TOOL_CALLS]", re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.S)),
    "llama3": Format(
        '"parameters"', re.compile(r'^\s*(?:<\|python_tag\|>)?\s*(\{\s*"name".*\})\s*$', re.S), "parameters"
    ),
}


def taught(template: str) -> Format | None:
    """The format that a chat template teaches; None where it is none of these."""
    return next((f for f in FORMATS.values() if f.mark in template), None)
