"""The KV cache that plans count for each preset is the one that vLLM would keep for its model."""

import json
from collections import Counter
from pathlib import Path

import engines
import pytest
import torch

from msrl_graph.backends.devices import Devices
from msrl_graph.backends.vllm.core import ROUTERS, SURROUNDINGS, Replica
from msrl_graph.backends.vllm.transformers_models import keep_classes_unchanged
from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model import models
from msrl_graph.model.layers import AttentionMixer
from msrl_graph.model.presets import PRESETS
from msrl_graph.sharding.layout import Layout

BYTES = 2  # of bfloat16
# Fields of published configs that presets do not need.
FIELDS = {
    "deepseek_v3": ROUTERS["grouped_sigmoid"],
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
}
# One of the models with the same layers. The states of recurrent layers do not grow with tokens.
LOADED = {name: models.load(name, Path()) for name in PRESETS}
CACHED = {name: model for name, model in LOADED.items() if all(isinstance(m, AttentionMixer) for m in model.mixers)}
NAMES = {model.stack: name for name, model in CACHED.items()}.values()


@pytest.fixture(scope="module")
def replica(alone):
    replica = Replica(Devices(engines.HERE))
    from vllm.model_executor.models import registry

    keep_classes_unchanged()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())  # of seconds for each family
        yield replica


def list_specs(folder, replica):
    """Return vLLM's specs of the cache, one for each layer of a model. Nothing is allocated."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 24,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), replica.as_world():
        init_distributed_environment(1, 0, "", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            with torch.device("meta"):
                initialize_model(config)
        finally:
            destroy_model_parallel()
    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    return [layer.get_kv_cache_spec(config) for layer in layers]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_the_bytes_and_the_windows_that_vllm_keeps(name, tmp_path, replica, monkeypatch):
    for variable, value in SURROUNDINGS.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    model = models.load(name, tmp_path)
    config = {"max_position_embeddings": 4096, **PRESETS[name], "model_type": model.family}
    config |= FIELDS.get(model.family, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = list_specs(tmp_path, replica)
    assert len(specs) == model.layers
    assert kv_bytes(model, Layout(), 1, BYTES) == sum(spec.page_size_bytes / spec.block_size for spec in specs)
    windows = Counter()
    for kind in model.layer_kinds:
        windows[kind.mixer.window] += kind.count
    assert windows == Counter(getattr(spec, "sliding_window", None) or 0 for spec in specs)
