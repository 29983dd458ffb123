"""Messages of a conversation, as data and functions have them.

Invariant: what stands here says only whether something is messages; how they become text is the template's of the model
that reads them.
"""

from __future__ import annotations

import json
from typing import Any

from .characters import half_character_within

Messages = list[dict[str, Any]]


def are_messages(value: Any) -> bool:
    """Whether a value is a list of {"role": …, "content": …}, at least one."""
    return isinstance(value, list) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and bool(value.keys() & {"content", "tool_calls"})
    )


def messages(text: str) -> Messages | None:
    """The messages that a text is the JSON of; None for any other text, as for JSON with half a character in it."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value: Messages = json.loads(text)
    except (ValueError, RecursionError):  # whatever a function or a model wrote
        return None
    return value if are_messages(value) and not half_character_within(value) else None
