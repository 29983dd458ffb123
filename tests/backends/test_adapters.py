"""LoRA adapters in the layers of transformers' models, compared with the library PEFT in float64."""

from functools import partial
from pathlib import Path

import mixture
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from msrl_graph.backends import adapters
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import lora, models
from msrl_graph.model.architecture import Lora
from msrl_graph.sharding.layout import full_box

ATTENTION = ("q_proj", "v_proj")
BEHIND = "base_model.model."  # before the names of weights, in PEFT


def load(folder):
    """Load a model that computes in float64, also its norms."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for part in net.modules():
        if "RMSNorm" in type(part).__name__:
            part.forward = partial(normalize, part, 1.0 if "Gemma" in type(part).__name__ else 0.0)
    return net


def normalize(norm, offset, x):
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight + offset, epsilon)


def compute_loss(net, ids):
    logps = net(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    return (logps[..., 0] * torch.linspace(-1, 1, ids.shape[1] - 1)).sum()


@pytest.mark.parametrize("write", [mixture.llama, mixture.qwen2, mixture.dense, mixture.gemma])
@pytest.mark.parametrize("targets", [ATTENTION, (lora.ALL_LINEAR,)])
def test_loss_and_gradients_are_those_of_peft(write, targets, tmp_path):
    said = Lora(rank=4, alpha=12, targets=targets)
    folder = write(tmp_path / "model")
    model = lora.adapt(models.load(folder, Path("/"), None, NOWHERE), said)
    names = "all-linear" if targets == (lora.ALL_LINEAR,) else [*targets]
    theirs = get_peft_model(load(folder), LoraConfig(r=4, lora_alpha=12, target_modules=names, lora_dropout=0.0))
    ours = load(folder)
    adapters.install(ours, model)
    own = {name: value for name, value in ours.named_parameters() if lora.is_adapter(name)}
    assert {tensor.name: tensor.shape for tensor in model.trained} == {n: (*v.shape,) for n, v in own.items()}
    others = {name.removeprefix(BEHIND).replace(".default", ""): value for name, value in theirs.named_parameters()}
    others = {name: value for name, value in others.items() if lora.is_adapter(name)}
    assert own.keys() == others.keys()
    torch.manual_seed(1)
    for name, value in own.items():
        torch.nn.init.normal_(value, std=0.2)
        others[name].data.copy_(value)
    ids = torch.randint(0, 16, (3, 7))
    losses = [compute_loss(net, ids) for net in (ours, theirs)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-9, atol=0)
    for name, value in own.items():
        assert value.grad.abs().max() > 0
        assert (value.grad - others[name].grad).abs().max() <= 1e-9 * others[name].grad.abs().max()


def test_first_values_do_not_depend_on_the_shards_and_b_is_zero(tmp_path):
    said = Lora(rank=4, alpha=8, targets=(lora.ALL_LINEAR,), seed=3)
    model = lora.adapt(models.load(mixture.mixture(tmp_path / "model"), Path("/"), None, NOWHERE), said)
    whole = [Shard(tensor.name, full_box(tensor.shape), torch.empty(tensor.shape)) for tensor in model.trained]
    assert not adapters.fill(model, whole)
    for shard in whole:
        if shard.name.endswith(lora.UP):
            assert not shard.tensor.any()
            continue
        bound = shard.tensor.shape[-1] ** -0.5
        assert 0.7 * bound < shard.tensor.abs().max() <= bound
        box = tuple((stop // 2, stop) for _, stop in shard.box)
        part = Shard(shard.name, box, torch.empty([stop - start for start, stop in box]))
        adapters.fill(model, [part])
        assert torch.equal(part.tensor, shard.tensor[tuple(slice(*dim) for dim in box)])
    assert len({float(shard.tensor.sum()) for shard in whole if shard.name.endswith(lora.DOWN)}) == len(whole) // 2
