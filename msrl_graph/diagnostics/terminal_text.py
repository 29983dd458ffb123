"""Text from outside the package, made safe for a terminal.

Names, paths and messages can contain characters that move the cursor or reverse text.

Invariant: the result has no character that a terminal interprets, except tabs and line ends.
"""

# Each control character is shown as a visible character, one column wide.
SIGNS = {code: 0x2400 + code for code in range(32) if code != 9} | {0x7F: 0x2421}
SIGNS |= dict.fromkeys(
    (*range(0x80, 0xA0), 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD
)
_KEPT = {code: sign for code, sign in SIGNS.items() if code != 10}


def make_printable(text: str) -> str:
    """Return a text of one or more lines with control characters made visible."""
    return text if text.isascii() and text.isprintable() else text.translate(_KEPT)
