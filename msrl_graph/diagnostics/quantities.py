"""Numbers with their units as short text.

Invariant: the same number always gives the same text.
"""

from __future__ import annotations


def size(number: float) -> str:
    """Format a number of bytes in decimal units (kB, MB, …), with three digits."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}" if number < 999.5 * one else f"{number / one:,.0f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds as s, ms or us, with three digits."""
    if seconds == 0:
        return "0"
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one:
            return f"{seconds / one:,.0f} {unit}" if seconds >= 100 * one else f"{seconds / one:.3g} {unit}"
    return "< 1 us"


def plural(number: int, noun: str) -> str:
    """Format a count with its noun: `1 host`, `2 hosts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def staleness(mean: float, bound: int) -> str:
    """Describe the average age of generations' weights, and the greatest age of a row.

    Both ages are in versions: `mean` is the average age, `bound` is the greatest age.
    """
    return f"{mean:.3g} version{'' if mean == 1 else 's'} old on average, and rows at most {bound}"


def format_parameters(number: int) -> str:
    return f"{number / 1e9:.4g} billion" if number >= 1e8 else f"{number / 1e6:.3g} million"
