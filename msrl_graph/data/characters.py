r"""Checks that text consists of whole characters.

Invariant: a Python string may hold half of a character (a lone surrogate, such as `json.loads('"\\ud83d"')`), which
no tokenizer, file or message accepts. All text that enters a run is checked here.
"""

from __future__ import annotations

import json
from typing import Any


def half_character(text: str) -> str:
    """Describe a text's first half character; "" if there is none.

    The description is "half a character (U+D83D)".
    """
    if text.isascii():
        return ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half a character (U+{ord(text[error.start]):04X})"
    return ""


def half_character_within(value: Any) -> str:
    """Describe the first half character in a JSON value; "" if there is none.

    Texts and keys are checked.
    """
    return half_character(json.dumps(value, ensure_ascii=False))


def escape_half_characters(text: str) -> str:
    r"""Escape each half character of a text as `\\udXXX`, for messages and logs."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
