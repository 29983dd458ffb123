"""The reward of the example: the share of a countdown that is right."""

import re


def counted(prompt: str, response: str) -> float:
    """Return the share of numbers in the right order before the first wrong one.

    It is relative to the number of requested numbers, or of given numbers if there are more.
    """
    wanted = range(int(prompt[:2], 16) - 1, -1, -1)
    numbers = [int(digits, 16) for digits in re.findall("([0-9a-f]{2})[wxyz]", response)]
    right = next((i for i, (one, other) in enumerate(zip(numbers, wanted, strict=False)) if one != other), None)
    return (min(len(numbers), len(wanted)) if right is None else right) / max(len(numbers), len(wanted))
