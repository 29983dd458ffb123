"""Families from end to end: the example's program trains a small model of each.

`make families` runs ten iterations and prints the figures.
"""

import conformance
import pytest
from short_runs import train_family


@pytest.mark.slow
@pytest.mark.parametrize("family", conformance.FAMILIES)
def test_a_family_is_trained_delivered_and_saved_for_transformers(family, tmp_path):
    found = train_family(tmp_path / "run", family)
    assert len({*found.losses}) == len(found.losses)
    assert found.drift < 3 * conformance.BARS["logp"]  # between two engines, over rows of all iterations
    assert found.exported < 3 * conformance.BARS["logp"]
