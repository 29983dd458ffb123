r"""Checks that text consists of whole characters.

Invariant: a Python string can contain half of a character (a lone surrogate, such as `json.loads('"\\ud83d"')`). No
tokenizer, file or message accepts such a half. All text that enters a run is checked by this module.
"""

from __future__ import annotations

import json
from typing import Any


def half_character(text: str) -> str:
    """Describe the first half character of a text; "" if there is none.

    A description is, for example, "half a character (U+D83D)".
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

    All strings in the value and all keys of its objects are checked.
    """
    return half_character(json.dumps(value, ensure_ascii=False))


def escape_half_characters(text: str) -> str:
    r"""Return a text in which each half character is replaced by an escape sequence.

    The result is for messages. The escape sequence has the form `\udXXX`. A half character in a log has the same form.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
