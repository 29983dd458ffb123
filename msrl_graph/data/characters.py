"""Text that consists of whole characters.

Invariant: Python's strings may hold half of a character (a lone surrogate, such as `json.loads('"\\ud83d"')`), which no
tokenizer, file or message takes. All text that enters a run is checked here.
"""

from __future__ import annotations

import json
from typing import Any


def half_character(text: str) -> str:
    """Describe the first half character of a text, as "half a character (U+D83D)"; empty if there is none."""
    if text.isascii():
        return ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half a character (U+{ord(text[error.start]):04X})"
    return ""


def half_character_within(value: Any) -> str:
    """Describe the first half character in the texts and keys of a JSON value; empty if there is none."""
    return half_character(json.dumps(value, ensure_ascii=False))


def escaped(text: str) -> str:
    """A text for messages and logs, with each half character as its escape `\\udXXX`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
