"""LoRA adapters in the layers of transformers' models, compared with the library PEFT in float64."""

from functools import partial
from pathlib import Path

import dense_families as families
import mixture
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from msrl_graph.backends import adapters, hf_modules
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.backends.kernels.keyed_dropout import InputDropout, is_dropped
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import lora, models
from msrl_graph.model.architecture import HEAD
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.weights.hf_export import write_folder
from msrl_graph.sharding.layout import full_box, slices

ALL = (lora.ALL_LINEAR,)
ATTENTION = ("q_proj", "v_proj")
MODELS = (mixture.llama, mixture.qwen2, mixture.dense, mixture.gemma)
CASES = [(write, targets) for write in MODELS for targets in (ATTENTION, ALL)]
CASES += [(families.phi3, targets) for targets in (("qkv_proj",), ("gate_up_proj", "o_proj"), ALL)]
CASES += [(families.glm4, targets) for targets in (("v_proj", "gate_up_proj"), ALL)]
BEHIND = "base_model.model."  # before the names of weights, in PEFT


def load(folder):
    """Load a model that computes in float64, also its norms."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for part in net.modules():
        if "RMSNorm" in type(part).__name__:
            part.forward = partial(normalize, part, 1.0 if "Gemma" in type(part).__name__ else 0.0)
    return net


def split_fused(net, model):
    """Replace the projections that the files fuse by several, with the same weights."""
    whole = dict(net.named_parameters())
    hf_modules._split_fused(net, model)
    for tensor in model.tensors:
        if tensor.fused and tensor.role == "base":
            ((name, _, box),) = tensor.in_files(full_box(tensor.shape))
            part = net.get_submodule(tensor.name.removesuffix(".weight"))
            part.weight = torch.nn.Parameter(whole[name][slices(box)].detach().clone())


def normalize(norm, offset, x):
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight + offset, epsilon)


def compute_loss(net, ids):
    logps = net(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    return (logps[..., 0] * torch.linspace(-1, 1, ids.shape[1] - 1)).sum()


class InjectedMask(torch.nn.Module):
    """A dropout of PEFT's with our masks."""

    def __init__(self, said, name, size, tokens):
        super().__init__()
        self.features = InputDropout(said, name, (0, size), tokens).features
        self.tokens = tokens
        self.share = said.dropout

    def forward(self, x):
        dropped = is_dropped(self.tokens.keys, self.features, self.share).view(x.shape)
        return x.masked_fill(dropped, 0) / (1 - self.share)


def inject(net, said, tokens):
    for path, part in net.named_modules():
        if hasattr(part, "lora_dropout"):
            name = f"{path.removeprefix(BEHIND)}.weight"
            part.lora_dropout["default"] = InjectedMask(said, name, part.in_features, tokens)


@pytest.mark.parametrize(("write", "targets"), CASES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_loss_and_gradients_are_those_of_peft(write, targets, dropout, tmp_path):
    said = Lora(rank=4, alpha=12, targets=targets, dropout=dropout)
    folder = write(tmp_path / "model")
    model = lora.adapt(models.load(folder, Path("/"), None, NOWHERE), said)
    names = "all-linear" if targets == ALL else [*targets]
    theirs = get_peft_model(load(folder), LoraConfig(r=4, lora_alpha=12, target_modules=names, lora_dropout=dropout))
    ours = load(folder)
    split_fused(ours, model)
    tokens = adapters.install(ours, model)
    own = {name: value for name, value in ours.named_parameters() if lora.is_adapter(name)}
    assert {tensor.name: tensor.shape for tensor in model.trained} == {n: (*v.shape,) for n, v in own.items()}
    others = {name.removeprefix(BEHIND).replace(".default", ""): value for name, value in theirs.named_parameters()}
    others = {name: value for name, value in others.items() if lora.is_adapter(name)}
    places = {}  # by our name: the name in PEFT, and the rows there
    for tensor in model.trained:
        ((name, _, box),) = tensor.in_files(full_box(tensor.shape))
        places[tensor.name] = name, slices(box)
    assert {name for name, _ in places.values()} == others.keys()
    torch.manual_seed(1)
    for name, value in own.items():
        torch.nn.init.normal_(value, std=0.2)
        place, rows = places[name]
        others[place].data[rows] = value
    ids = torch.randint(0, 16, (3, 7))
    plain = compute_loss(ours, ids)
    if dropout:
        tokens.keys = torch.randint(-(2**31), 2**31, (ids.numel(),), dtype=torch.int32)
        inject(theirs, model.lora, tokens)
    losses = [compute_loss(net, ids) for net in (ours, theirs)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-9, atol=0)
    assert bool(dropout) != torch.allclose(losses[0], plain, rtol=1e-6)
    for name, value in own.items():
        assert value.grad.abs().max() > 0
        place, rows = places[name]
        wanted = others[place].grad[rows]
        assert (value.grad - wanted).abs().max() <= 1e-9 * wanted.abs().max()


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


def draw_values(model):
    """Values of the tensors in a folder of a model's adapter, at random."""
    draw = torch.Generator().manual_seed(5)
    return {tensor.name: 0.2 * torch.randn(tensor.shape, generator=draw) for tensor in model.saved}


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("write", [mixture.qwen2, mixture.mixture, families.phi3])
def test_what_an_export_writes_is_what_an_engine_reads(write, scores, tmp_path):
    """A score head too; another worker of the same folder gets a new one."""
    write(tmp_path / "model")
    base = models.load("./model", tmp_path, None, NOWHERE)
    model = lora.adapt(base.scoring if scores else base, Lora(4, 8.0, ALL))
    values = draw_values(model)
    write_folder(model, values, tmp_path / "adapter")
    found = models.load("./adapter", tmp_path, None, NOWHERE)
    assert found.path == base.path
    for kind in (found.scoring, found) if scores else (found.scoring,):
        again = lora.adapt(kind, found.initial)
        shards = [Shard(name, full_box(value.shape), torch.empty_like(value)) for name, value in values.items()]
        others = adapters.fill(again, shards)
        assert [shard.name for shard in others] == ([] if kind.scores or not scores else [HEAD])
        for shard in shards:
            assert shard in others or torch.equal(shard.tensor, values[shard.name])


@pytest.mark.parametrize("write", [families.phi3, families.glm4])
def test_exports_of_fused_projections_compute_the_same_in_peft_and_merged(write, tmp_path):
    write(tmp_path / "model")
    model = lora.adapt(models.load("./model", tmp_path, None, NOWHERE), Lora(4, 8.0, ALL))
    values = draw_values(model)
    write_folder(model, values, tmp_path / "adapter")
    write_folder(model, values, tmp_path / "merged", merged=True)
    nets = (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        *(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("merged", "model")),
    )
    with torch.no_grad():
        theirs, merged, without = (net(torch.arange(2, 14)[None]).logits for net in nets)
    assert (theirs - merged).abs().max() < 1e-5 and (theirs - without).abs().max() > 1e-2
