"""Recurrent layers over prefix trees compute what transformers computes of each row alone, in rows of any length."""

import engines
import hybrid_families
import mamba_families
import numpy as np
import pytest
import ranks
import torch

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import row_blocks
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout

WRITTEN = hybrid_families.WRITTEN | mamba_families.WRITTEN
MADE = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h with experts", "granitemoehybrid with one group"]
LONG = 150  # tokens: more than two chunks of a scan


def written(family, folder):
    path = WRITTEN[family](folder, max_position_embeddings=256)
    return path, models.load(path, folder, "f32", NOWHERE)


def drawn_rows(lengths):
    """Rows of two prompts; the responses to each begin alike."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 16, 70).astype(np.int32), draw.integers(2, 16, 3).astype(np.int32)]
    begun = [draw.integers(2, 16, 2).astype(np.int32) for _ in prompts]
    responses = [
        np.concatenate([begun[i % 2], draw.integers(2, 16, n).astype(np.int32)]) for i, n in enumerate(lengths)
    ]
    return [prompts[i % 2] for i in range(len(lengths))], responses


def packed_rows(prompts, responses, rows):
    return pack([ragged(prompts, np.int32)], [ragged(responses, np.int32)], np.array(rows))


@pytest.mark.parametrize("family", MADE)
def test_rows_are_those_of_transformers_and_do_not_depend_on_other_rows(family, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(row_blocks, "FEW", 0)  # several blocks
    path, model = written(family, tmp_path)
    engine = engines.trainer(model)
    prompts, responses = drawn_rows([LONG - 70, 1, 5, LONG, 0, 40])
    (together,) = engine.score([packed_rows(prompts, responses, range(6))], ForwardRequest())
    net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logps = together.logp.split([len(response) for response in responses])
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        (alone,) = engine.score([packed_rows(prompts, responses, [row])], ForwardRequest())
        torch.testing.assert_close(logps[row], alone.logp, atol=1e-5, rtol=0)
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logits = net(ids[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(logps[row], expected, atol=2e-5, rtol=0)
    assert not torch.isclose(logps[0][1:], logps[3][1 : len(logps[0])]).all()  # rows differ


def train_on_rank(rank, folder, path, layout, options):
    """Compare losses and the norm of the gradient with those of one rank without options."""
    model = models.load(path, folder, "f32", NOWHERE)
    prompts, responses = drawn_rows([LONG - 70, 1, 5, 40])
    packed = packed_rows(prompts, responses, range(4))
    found = []
    mesh = engines.mesh(layout)
    for few, own, at, stated in ((row_blocks.FEW, Layout(), None, {}), (0, layout, mesh, options)):
        row_blocks.FEW = few  # one block, then several
        engine = engines.built("fsdp", model, own, rank if at else 0, at, adamw(lr=0.0), **stated)
        logps = []
        loss = lambda made, _, logps=logps: (logps.append(made.logp.detach()), made.logp.exp().sum())[1]  # noqa: E731
        engine.train([packed], loss, ForwardRequest())
        found.append((logps[0], engine.step(StepRequest(0.0, 1e9)) / own.dp))
    (logp, norm), (other, other_norm) = found
    torch.testing.assert_close(other, logp, atol=2e-5, rtol=0)
    assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3_next", Layout(), {"recompute": "full"}),
        ("qwen3_next", Layout(tp=2), {"recompute": "full"}),
        ("qwen3_next", Layout(dp=2, zero=3), {"activations": "offload"}),
        ("qwen3_5_text", Layout(tp=2), {"activations": "offload"}),
        ("qwen3_5_text", Layout(dp=2, zero=3), {"recompute": "full"}),
        ("nemotron_h with experts", Layout(), {"recompute": "full"}),
        ("nemotron_h", Layout(tp=2), {"activations": "offload"}),
        ("nemotron_h", Layout(tp=2, dp=2, zero=3), {"recompute": "full"}),
        ("granitemoehybrid with one group", Layout(tp=2), {"recompute": "full"}),
        ("granitemoehybrid with experts", Layout(dp=2, zero=3), {"activations": "offload"}),
        pytest.param("nemotron_h", Layout(), {"compile": "layers"}, marks=pytest.mark.long),
        pytest.param("qwen3_5_text", Layout(), {"compile": "layers"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_what_saves_memory(family, layout, options, tmp_path):
    path, _ = written(family, tmp_path)
    ranks.run(layout.devices, train_on_rank, path, layout, options)
