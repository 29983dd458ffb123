"""Presets against what is published, and against transformers' own class of each."""

from __future__ import annotations

from pathlib import Path

import published_counts
import pytest

from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model.models import load
from msrl_graph.model.presets import PRESETS
from msrl_graph.sharding.layout import Layout

PUBLISHED = {*PRESETS} - {"tiny"}


def test_every_preset_is_compared_with_a_published_count() -> None:
    assert published_counts.PARAMETERS.keys() | published_counts.ROUNDED.keys() == PUBLISHED


@pytest.mark.parametrize("name", published_counts.PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    parameters, source = published_counts.PARAMETERS[name]
    assert load(name, Path()).parameters == parameters, source


@pytest.mark.parametrize("name", published_counts.ROUNDED)
def test_a_preset_has_the_published_size(name: str) -> None:
    published = published_counts.ROUNDED[name]
    digits = len(published.partition(".")[2])
    assert f"{load(name, Path()).parameters / 1e9:.{digits}f}" == published


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_transformers_class(name: str) -> None:
    """Of the class that the preset's fields build, with the router's corrections, which are buffers there."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = PRESETS[name]
    build = getattr(transformers, config["architectures"][0])  # type: ignore[index]
    fields = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    with torch.device("meta"):
        peer = build(build.config_class(**fields))
    corrections = (value for key, value in peer.named_buffers() if key.endswith("e_score_correction_bias"))
    theirs = sum(value.numel() for value in (*peer.parameters(), *corrections))  # a tied head counts once
    assert load(name, Path()).parameters == theirs


@pytest.mark.parametrize("name", published_counts.CACHE)
def test_a_token_leaves_the_published_bytes_in_the_cache(name: str) -> None:
    assert kv_bytes(load(name, Path()), Layout(), 1, 2) == published_counts.CACHE[name]
