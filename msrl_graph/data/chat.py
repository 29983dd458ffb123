"""Messages of a conversation, as they occur in data and in values of functions.

Invariant: this module only decides whether a value is a list of messages. The chat template of the model that reads the
messages makes text of them.
"""

from __future__ import annotations

import json
from typing import Any

from .characters import half_character_within

Messages = list[dict[str, Any]]


def are_messages(value: Any) -> bool:
    """Return whether a value is a non-empty list of messages.

    A message is an object with a string `role`, and with `content` or `tool_calls`.
    """
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and bool(value.keys() & {"content", "tool_calls"})
    )


def messages(text: str) -> Messages | None:
    """Parse a text as a JSON list of messages; return None for any other text.

    The function also returns None if a string in the text contains half of a character.
    """
    if not text.lstrip().startswith("["):
        return None
    try:
        value: Messages = json.loads(text)
    except (ValueError, RecursionError):  # whatever a function or a model wrote
        return None
    return value if are_messages(value) and not half_character_within(value) else None
