"""Each light engine computes each family's models as transformers does, on every small layout."""

import conformance
import pytest

from msrl_graph.model.families import FAMILIES

# Logits and log-probabilities in nats, the rest relative; float32 rounds by 1e-7 of the largest number of a sum.
BARS = {"logits": 2e-4, "logp": 2e-4, "gradient": 1e-4, "step": 1e-3}
LIGHT = ("fsdp", "hf")


def test_every_family_has_a_small_model():
    assert {name.partition(" ")[0] for name in conformance.WRITTEN} == {family.name for family in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", conformance.WRITTEN)
def test_a_family_is_computed_as_by_transformers(family, tmp_path):
    found = conformance.measure(family, LIGHT, tmp_path)
    assert {"one rank", "tp 2", "dp 2"} <= {layout for _, layout in found}
    for cell, values in found.items():
        for what, value in values.items():
            assert value < BARS[what], (cell, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "broken"),
    [("qwen3", conformance.without_head_norms), ("gemma", conformance.without_embedding_scale)],
)
def test_what_an_engine_leaves_out_is_seen(family, broken, tmp_path):
    for cell, values in conformance.measure(family, LIGHT, tmp_path, broken).items():
        assert values["logp"] > 10 * BARS["logp"], (cell, values)
