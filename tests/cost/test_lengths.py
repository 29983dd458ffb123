"""Sums over rows: what rows share, whole and of a part that was drawn, is what counting the rows' trees gives."""

from __future__ import annotations

import numpy as np
import pytest

from msrl_graph.backends import prefix_tree
from msrl_graph.cost.lengths import Rows
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.rank.packing import count_distinct

PROMPTS = 48
SAMPLES = 8
TOKENS = 5


def responses(spread: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts, and responses drawn token by token, more alike the smaller `spread` is, that end with token 0."""
    rng = np.random.default_rng(0)
    prompts = [np.array([100 + i % 7, 200 + i, 300], np.int32) for i in range(PROMPTS) for _ in range(SAMPLES)]
    found = []
    for _ in prompts:
        drawn = np.minimum(rng.exponential(spread, TOKENS).astype(np.int32) + 1, 90)
        found.append(np.append(drawn[: rng.integers(2, TOKENS + 1)], 0).astype(np.int32))
    return prompts, found


def of(prompts: list[np.ndarray], found: list[np.ndarray]) -> Rows:
    """As runtime/metrics/predicted.py makes them of a run's metrics."""
    prompt = sum(map(len, prompts))
    response = sum(map(len, found))
    beginnings, _ = count_distinct(prompts, np.zeros(len(prompts), int))
    tokens, rows = count_distinct(found, np.arange(len(found)) // SAMPLES)
    return Rows(len(found), prompt, response, 0.0, 0.0, prompt - beginnings, response - tokens, len(found) - rows)


def nodes(prompts: list[np.ndarray], found: list[np.ndarray], some: np.ndarray) -> int:
    return len(prefix_tree.build_tree(pack([ragged(prompts, np.int32)], [ragged(found, np.int32)], some)).ids)


@pytest.mark.parametrize("spread", [0.3, 1.0, 5.0])
def test_what_is_computed_of_all_rows_and_of_some_that_are_drawn(spread: float) -> None:
    prompts, found = responses(spread)
    rows = of(prompts, found)
    assert rows.fed == nodes(prompts, found, np.arange(len(found)))
    rng = np.random.default_rng(1)
    for share in (0.5, 0.25):
        drawn = rows.sample(share, SAMPLES)
        counted = np.mean(
            [nodes(prompts, found, rng.permutation(len(found))[: int(share * len(found))]) for _ in range(20)]
        )
        assert drawn.fed == pytest.approx(counted, rel=0.12)
        # Rows of whole prompts share more.
        assert rows.take_share(share).fed < drawn.fed


def test_all_rows_drawn_are_all_rows() -> None:
    rows = of(*responses(1.0))
    drawn = rows.sample(1.0, SAMPLES)
    assert (drawn.count, drawn.tokens) == (rows.count, rows.tokens) and drawn.fed == pytest.approx(rows.fed, rel=1e-6)


def test_rows_of_which_nothing_is_known_but_their_prompts() -> None:
    bounds = Rows.equal_rows(64, 10, 20, samples=8)
    assert bounds.fed == 8 * 10 + 64 * 20 - 64
    drawn = bounds.sample(0.5, 8)
    assert drawn.alike_response == drawn.twins == 0 and 0 < drawn.alike_prompt < bounds.alike_prompt / 2
    assert Rows.equal_rows(4, 10, 20).sample(0.5, 1) == Rows.equal_rows(2, 10, 20)
