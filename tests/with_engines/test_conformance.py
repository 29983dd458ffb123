"""Megatron-Core and vLLM compute each family's models as transformers does, on every small layout that they have."""

import conformance
import pytest


@pytest.mark.parametrize("family", conformance.WRITTEN)
@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_family_is_computed_as_by_transformers(family, engine, tmp_path):
    if not (found := conformance.measure(family, [engine], tmp_path)):
        pytest.skip(f"{engine} lacks features of {family}")
    assert {"one rank", "tp 2", "pp 2", "dp 2"} <= {layout for _, layout in found}
    conformance.assert_close(found)
