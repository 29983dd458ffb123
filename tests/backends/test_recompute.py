"""What a backward pass recomputes changes no bit: outputs and gradients are those of a pass that recomputes nothing."""

import conformance
import engines
import numpy as np
import pytest
import ranks
import torch
from hypothesis import example
from hypothesis import given as drawn
from hypothesis import strategies as st
from sample import examples

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends.devices import get_local_tensor
from msrl_graph.backends.engine_protocols import ForwardRequest
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import RECOMPUTED
from msrl_graph.model import freezing, lora, models
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout

DENSE = ("qwen2", "phi3", "gemma3_text", "olmo2", "nemotron_h")
MIXTURES = ("deepseek_v3", "qwen3_moe with mixed layers", "gpt_oss", "qwen3_next with mixed layers")
RECURRENT = ("nemotron_h with experts", "granitemoehybrid with experts")
PARTS = st.lists(st.sampled_from(RECOMPUTED), min_size=1, unique=True).map(tuple)
MANY = ("attention", "activation", "norms")


def load(family, folder):
    return models.load(conformance.WRITTEN[family](folder), folder, "f32", NOWHERE)


def rows():
    """Rows of three prompts, whose responses begin alike."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 16, n).astype(np.int32) for n in (3, 6, 1)]
    contexts = ragged([prompts[i % 3] for i in range(9)], np.int32)
    responses = ragged([draw.integers(2, 4, n).astype(np.int32) for n in (4, 1, 0, 3, 4, 2, 4, 4, 1)], np.int32)
    return pack([contexts], [responses], np.arange(9))


def train(model, packed, layout=engines.ALONE, rank=0, mesh=None, **options):
    """The log-probabilities and the gradients of two micro-batches."""
    engine = engines.built("fsdp", model, layout, rank, mesh, adamw(lr=0.0), **options)
    made = []

    def loss(output, _):
        made.append(output.logp.detach())
        return output.logp.exp().sum()

    drops = model.lora is not None and model.lora.dropout > 0
    engine.train([packed, packed], loss, ForwardRequest(dropout=5 if drops else None))
    gradients = [engine._gradients.take(parameter) for parameter in engine._parameters]
    return [*made, *(gradient if gradient is None else get_local_tensor(gradient) for gradient in gradients)]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By family: the model, and what a step gives that recomputes nothing."""
    known = {}

    def find(family):
        if family not in known:
            model = load(family, tmp_path_factory.mktemp("model"))
            known[family] = model, train(model, rows(), recompute="none")
        return known[family]

    return find


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *RECURRENT])
def test_bits_are_those_of_a_pass_that_recomputes_nothing(family, trained):
    model, wanted = trained(family)

    @examples(6)
    @drawn(PARTS | st.integers(1, 3) | st.just("full"))
    @example(("activation",))
    def check(choice):
        assert_equal(train(model, rows(), recompute=choice), wanted)

    check()


def compare(rank, _, model, layout, choice, options):
    mesh = engines.mesh(layout) if layout.devices > 1 else None
    found = [train(model, rows(), layout, rank, mesh, recompute=stated, **options) for stated in (choice, "none")]
    assert_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "choice", "options"),
    [
        ("qwen3_moe", Layout(dp=2, zero=3, ep=2), ("moe", "norms"), {}),
        ("qwen3_moe", Layout(dp=2, zero=3, ep=2), MANY, {"activations": "offload"}),
        ("qwen3_moe", Layout(tp=2, ep=2), ("attention", "moe"), {}),
        ("deepseek_v3", Layout(tp=2), MANY, {}),
        ("deepseek_v3", Layout(dp=2, zero=2, ep=2), 1, {}),
        ("qwen3_next", Layout(tp=2), ("attention", "activation"), {}),
        ("phi3", Layout(tp=2), ("activation", "norms"), {"activations": "offload"}),
        ("llama", Layout(cp=2), ("attention", "mlp"), {}),
        pytest.param("llama", Layout(), MANY, {"compile": "layers"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_so_they_are_on_several_ranks(family, layout, choice, options, tmp_path):
    ranks.run(layout.devices, compare, load(family, tmp_path), layout, choice, options)


@pytest.mark.parametrize("choice", [MANY, ("mlp", "moe"), 1, "full"], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_so_they_are_of_an_adapter_with_dropout_and_of_frozen_layers(family, choice, tmp_path):
    model = load(family, tmp_path)
    dropout = 0.3 if family == "llama" else 0.0
    for own in (
        lora.adapt(model, Lora(8, 16.0, ("all_linear",), dropout)),
        freezing.freeze(model, ("model.layers.0.*", "model.embed_tokens.*")),
    ):
        assert_equal(train(own, rows(), recompute=choice), train(own, rows(), recompute="none"))
