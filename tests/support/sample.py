"""How much of the tests runs: everything, or a sample of it (`pytest --sample`, `make test`).

Invariant: a sample runs every test function, with one of its cases and fewer random examples. It depends on nothing
but the tests, so that a failure comes back in the next sample.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

SHARE = 10  # a sample runs 1/SHARE of the random examples, but at least LEAST
LEAST = 5

_sampled = False


def begin(sampled: bool) -> None:
    """Set how much runs, before a test file is imported.

    No example has a deadline: its time depends on the machine.
    """
    global _sampled
    _sampled = sampled
    settings.register_profile("tests", deadline=None, max_examples=count(100))
    settings.load_profile("tests")


def count(most: int) -> int:
    """Return the number of random examples that run, at most `most`."""
    return min(most, max(LEAST, most // SHARE)) if _sampled else most


def examples(most: int, **others: Any) -> settings:
    """Return the settings of a property that is tried with `most` random examples."""
    return settings(max_examples=count(most), deadline=None, **others)


def choose(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of a sample (the last case of each function), and the others."""
    cases: dict[tuple[str, str], pytest.Item] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        cases[str(item.path), f"{item.cls or ''}.{name}"] = item  # type: ignore[attr-defined]
    chosen = {*cases.values()}
    return [item for item in items if item in chosen], [item for item in items if item not in chosen]
