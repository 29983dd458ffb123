"""What a gated delta net is counted to keep for a backward pass is what autograd saves (memory.py)."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from msrl_graph.backends.recurrent.memory import DeltaSizes
from msrl_graph.model.layers import GatedDeltaNet
from msrl_graph.sharding.layout import Layout

SIZES = {"hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
SIZES |= {"linear_key_head_dim": 32, "linear_value_head_dim": 48}


def count_saved(mixer, states):
    """The bytes of the storages that a forward pass saves, without weights and the input."""
    known = {value.untyped_storage().data_ptr() for value in (*mixer.parameters(), states)}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = mixer(states)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 150])
@pytest.mark.parametrize("split", [False, True])
def test_what_is_kept_is_what_autograd_saves(split, width, dtype):
    rows = 3
    kinds = (Qwen3NextConfig, Qwen3NextGatedDeltaNet), (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet)
    config, module = kinds[split]
    mixer = module(config(**SIZES), 0).to(dtype)
    states = torch.randn(rows, width, 64, dtype=dtype, requires_grad=True)
    item = dtype.itemsize
    whole = SimpleNamespace(item=item, split=lambda size: size, work=SimpleNamespace(layout=Layout()))
    sizes = DeltaSizes(whole, GatedDeltaNet(2, 4, 32, 48, 4, split), rows, width)
    output = sizes.outputs  # the input of the last projection
    assert sizes.kept + output == pytest.approx(count_saved(mixer, states), rel=0.05)
