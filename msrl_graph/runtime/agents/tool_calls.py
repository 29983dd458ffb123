"""Parsing of the tool calls that a policy wrote.

Invariant: this module only parses tool calls; the chat template writes them. A text without a complete tool call is an
ordinary answer.
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
Calls = Callable[[str], tuple[str, list[Call]]]  # from a text to the text around the calls, and the calls


@dataclass(frozen=True)
class Format:
    """A format in which a policy writes tool calls.

    - `mark`: a text that occurs in each chat template with this format.
    - `pattern`: the regular expression that matches a tool call in a text. Each match contains the JSON of one call or
      of a list of calls.
    - `arguments`: the key of a call's arguments in this JSON.
    """

    mark: str
    pattern: re.Pattern[str]
    arguments: str = "arguments"

    def __call__(self, text: str) -> tuple[str, list[Call]]:
        all_calls: list[Call] = []
        for match in self.pattern.finditer(text):
            calls = list(self._parse_calls(match[1]))
            if not calls:
                return text, []  # not JSON: the policy wrote text and called nothing
            all_calls += calls
        rest = self.pattern.sub("", text).strip() if all_calls else text
        return rest, all_calls

    def _parse_calls(self, text: str) -> Iterator[Call]:
        with suppress(ValueError, RecursionError):  # text that the policy wrote may be anything
            value = json.loads(text)
            if half_character_within(value):
                return
            for call in value if isinstance(value, list) else [value]:
                arguments = call.get(self.arguments, {}) if isinstance(call, dict) else None
                if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
                    return
                yield call["name"], arguments


# A new format is one more line. If a template contains several marks, the first counts.
FORMATS = {
    "hermes": Format("<tool_call>", re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)),  # Qwen2.5, Qwen3
    "mistral": Format("[TOOL_CALLS]", re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.S)),
    "llama3": Format(
        '"parameters"', re.compile(r'^\s*(?:<\|python_tag\|>)?\s*(\{\s*"name".*\})\s*$', re.S), "parameters"
    ),
}


def find_format(template: str) -> Format | None:
    """Return the format of tool calls that a chat template uses; None if unknown."""
    return next((format_ for format_ in FORMATS.values() if format_.mark in template), None)
