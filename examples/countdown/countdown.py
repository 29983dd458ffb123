"""The reward of the example: how much of a count down is right."""

import re


def counted(prompt: str, response: str) -> float:
    """The share of the numbers that come in their turn, before the first that does not: of as many as were asked for,
    or of as many as there are, if these are more."""
    wanted = range(int(prompt[:2], 16) - 1, -1, -1)
    found = [int(digits, 16) for digits in re.findall("([0-9a-f]{2})[wxyz]", response)]
    right = next((i for i, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
    return (min(len(found), len(wanted)) if right is None else right) / max(len(found), len(wanted))
