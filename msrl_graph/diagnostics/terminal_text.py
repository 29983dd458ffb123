"""Text of others, for a terminal: names, paths and messages may hold what moves its cursor or turns text around.

Invariant: what is shown has no character that a terminal acts on, but for tabs and the ends of lines.
"""

# Each is shown by a sign of its own, one column wide.
SIGNS = {c: 0x2400 + c for c in range(32) if c != 9} | {0x7F: 0x2421}
SIGNS |= dict.fromkeys(
    (*range(0x80, 0xA0), 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD
)
_KEPT = {c: sign for c, sign in SIGNS.items() if c != 10}


def shown(text: str) -> str:
    """The text of several lines as it may be shown."""
    return text if text.isascii() and text.isprintable() else text.translate(_KEPT)
