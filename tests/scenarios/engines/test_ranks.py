"""What needs several real ranks: resharding between any two layouts, and engines that compute the same on every
layout."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import engines
import numpy as np
import pytest
import ranks
import torch
from conformance import by_our_names
from mixture import latent, mixture
from rank_models import FOLDER, model
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw, sgd
from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import (
    ForwardRequest,
    GenerateRequest,
    Sampling,
    StepRequest,
    collect_responses,
)
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.process.start_variables import WAITS
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.weights.reshard import HostSwap
from msrl_graph.sharding.layout import Layout


def batch():
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(3, 13, n) for n in draw.integers(4, 7, 12)], np.int32)
    responses = ragged([draw.integers(3, 13, n) for n in draw.integers(1, 5, 12)], np.int32)
    return prompts, responses, torch.from_numpy(draw.normal(size=len(responses.values))).float()


def weighted(own, whole):
    return lambda made: (made.logp * own).sum() / whole


# By name: the engine's rule, torch's own, and a rate. Of AdamW a weight's change is no smooth function of its gradient.
RULES = {
    "adamw": (adamw(lr=0.0, weight_decay=0.01), partial(torch.optim.AdamW, weight_decay=0.01), 1e-3),
    "sgd": (sgd(lr=0.0, momentum=0.9), partial(torch.optim.SGD, momentum=0.9), 0.3),
}


def train(rank, folder, weights, out, cases, by="adamw"):
    """For each layout two optimizer steps on a fixed batch, its rows shared over dp unevenly: the second has all rows
    on dp rank 0."""
    for number, layout in enumerate(cases):
        m = model(weights)
        recompute = "full" if layout.zero == 2 else "none"
        engine = engines.trainer(m, layout, rank, engines.mesh(layout), RULES[by][0], recompute)
        prompts, responses, weight = batch()
        dp = layout.coordinates(rank).dp
        rows = np.arange(12)
        norms = []
        for mine in (np.array_split(rows, layout.dp)[dp], rows if dp == 0 else rows[:0]):
            spans = [np.arange(responses.offsets[r], responses.offsets[r + 1]) for r in mine]
            own = weight[np.concatenate(spans or [np.zeros(0, int)])]
            packed = pack([prompts], [responses], mine)
            engines.train(engine, packed, weighted(own, len(weight)), ForwardRequest(0.7))
            norms.append(engine.step(StepRequest(RULES[by][2], 0.5)))
        logp = engine.score([pack([prompts], [responses], rows)], ForwardRequest(1.0))[0].logp
        held = {s.name: s.tensor for s in engine.shards()} if dist.get_world_size() == 1 else {}
        if rank == 0:
            torch.save((norms, logp, held), Path(out) / f"{dist.get_world_size()}-{number}")


def reference(weights, by="adamw"):
    """The same two steps by transformers and torch alone."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    optimizer = RULES[by][1](net.parameters(), lr=RULES[by][2])
    prompts, responses, weight = batch()

    def logp(temperature):
        found = []
        for i in range(12):
            ids = torch.from_numpy(np.concatenate([prompts[i], responses[i]]).astype(np.int64))
            scores = (net(ids[None]).logits[0] / temperature).log_softmax(-1)
            n = len(prompts[i])
            found.append(scores[n - 1 : -1].gather(-1, ids[n:, None])[:, 0])
        return torch.cat(found)

    described = models.load(str(weights), Path("/"), None, NOWHERE)
    begun = by_our_names(net, described)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        ((logp(0.7) * weight).sum() / len(weight)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
    with torch.no_grad():
        return norms, logp(1.0), {name: (begun[name], value) for name, value in by_our_names(net, described).items()}


def tied(folder):
    """The example's model with one tensor for embedding and head."""
    shutil.copytree(FOLDER / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"] /= 8  # as a head its scale would saturate
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


MIXED = {
    1: [Layout()],
    2: [Layout(dp=2, ep=2), Layout(dp=2, zero=3), Layout(tp=2), Layout(tp=2, ep=2), Layout(dp=2, ep=2, zero=2)],
    4: [
        Layout(cp=2, dp=2, ep=2, zero=3),
        Layout(cp=2, tp=2, ep=4),
        Layout(tp=2, dp=2, ep=4),
        Layout(dp=4, ep=2, zero=1),
    ],
}


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["untied", pytest.param("tied", marks=pytest.mark.long), "mixture", "latent"])
def test_fsdp_computes_the_same_on_every_layout(kind, tmp_path):
    made = {"tied": tied, "mixture": mixture, "latent": latent}
    weights = made[kind](tmp_path / kind) if kind in made else str(FOLDER / "model")
    by = "sgd" if kind == "latent" else "adamw"
    expected = reference(weights, by)
    cases = (
        MIXED
        if kind in ("mixture", "latent")
        else {
            1: [Layout()],
            2: [Layout(dp=2, zero=z) for z in range(4)] + [Layout(tp=2)],
            4: [Layout(tp=2, dp=2, zero=3), Layout(tp=2, dp=2, zero=1)],
        }
    )
    for world, some in cases.items():
        ranks.run(world, train, weights, str(tmp_path), some, by)
        for i, layout in enumerate(some):
            norms, logp, held = torch.load(tmp_path / f"{world}-{i}")
            assert norms == pytest.approx(expected[0], rel=2e-5), layout
            # By AdamW the rounding of small gradients, which is another on each kind of processor, becomes a step.
            assert torch.allclose(logp, expected[1], rtol=3e-4, atol=1e-5), layout
            for name, value in held.items() if by == "sgd" else ():  # on one rank
                begun, wanted = expected[2].pop(name)
                assert (value - wanted).abs().max() < 1e-4 * (wanted - begun).abs().max() + 3e-7, name
            assert by == "adamw" or world > 1 or not expected[2]


def generate(rank, folder, weights, out, cases):
    m = model(weights)
    prompts, _, _ = batch()
    sampling = Sampling(samples=4, max_tokens=5, temperature=1.0, top_p=1.0, top_k=0)
    for i, (layout, wave) in enumerate(cases):
        engine = engines.generator(m, layout, rank, engines.mesh(layout), wave)
        hf_modules.fill(m, engine.allocate())
        engine.filled()
        dp = layout.coordinates(rank).dp
        mine = np.array_split(np.arange(12), layout.dp)[dp]
        rows = (mine[:, None] * 4 + np.arange(4)).reshape(-1)
        found, _ = collect_responses(engine.generate(GenerateRequest([prompts[j] for j in mine], rows, sampling)))
        engine.release()
        torch.save((list(rows), found), Path(out) / f"{dist.get_world_size()}-{i}-{rank}")


def biased(folder):
    """A Llama with biases on all its products."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True, eos_token_id=1
    )
    net = LlamaForCausalLM(config)
    for name, value in net.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.5)
    net.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["example", "biased", "latent"])
def test_no_layout_changes_what_is_drawn(kind, tmp_path):
    made = {"biased": biased, "latent": latent}
    weights = made[kind](tmp_path / kind) if kind in made else str(FOLDER / "model")
    cases = {
        1: [(Layout(), 0), (Layout(), 5)],
        2: [(Layout(tp=2), 0), (Layout(dp=2), 3)],
        4: [(Layout(tp=2, dp=2, inner=2), 0)],
    }
    draws = []
    for world, some in cases.items():
        ranks.run(world, generate, weights, str(tmp_path), some)
        for i in range(len(some)):
            found = {}
            for rank in range(world):
                rows, tokens = torch.load(tmp_path / f"{world}-{i}-{rank}", weights_only=False)
                for row, token in zip(rows, tokens, strict=True):
                    assert row not in found or np.array_equal(found[row], token)
                    found[row] = token
            draws.append(found)
    assert len(draws[0]) == 48
    for other in draws[1:]:
        assert all(np.array_equal(draws[0][row], other[row]) for row in range(48))
    assert len({tuple(t) for t in draws[0].values()}) > 12  # samples of one prompt differ


def swap_engine(rank, folder):
    """Out and in on a real engine whose shards are uneven (16 and 128 rows over 3 ranks), then a step: as without the
    swap."""
    found = []
    for swapped in (False, True):
        layout = Layout(dp=3, zero=3)
        engine = engines.trainer(model(), layout, rank, engines.mesh(layout), adamw(lr=0.0))
        swap = HostSwap(engine.shards())
        prompts, responses, weight = batch()
        for _ in range(2):
            if swapped:
                sizes = [s.tensor.untyped_storage().nbytes() for s in engine.shards()]
                swap.swap_out()
                assert sum(s.tensor.untyped_storage().nbytes() for s in engine.shards()) == 0
                swap.wait()
                assert [s.tensor.untyped_storage().nbytes() for s in engine.shards()] == sizes
            mine = np.arange(12)[rank::3]
            index = np.concatenate([np.arange(responses.offsets[r], responses.offsets[r + 1]) for r in mine])
            own = weight[index]
            packed = pack([prompts], [responses], mine)
            engines.train(engine, packed, weighted(own, len(weight)), ForwardRequest(1.0))
            engine.step(StepRequest(1e-3, 1.0))
        found.append([s.tensor.clone() for s in engine.shards()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_swap_gives_an_engine_back_the_storage_it_had():
    ranks.run(3, swap_engine)


@pytest.mark.slow
def test_threads_of_a_rank_soon_leave_the_core_while_they_wait(tmp_path):
    # OpenMP says itself what it goes by, as torch loads it; outside an actor of Ray's no rank is made, nor Ray started.
    rank = "RankHost.__ray_metadata__.modified_class('', RankSetup(0, 1, '', 'logs', ()))"
    make = f"from msrl_graph.runtime.rank.host import RankHost, RankSetup\n{rank}"
    variables = {k: v for k, v in os.environ.items() if k not in WAITS}
    variables |= {"OMP_DISPLAY_ENV": "verbose", "RAY_ENABLE_AUTO_CONNECT": "0"}
    policy = "OMP_WAIT_POLICY"
    for stated, turns in (({}, "10000"), ({policy: "active"}, "30000000000"), ({policy: "passive"}, "0")):
        done = subprocess.run(
            [sys.executable, "-c", make], env=variables | stated, cwd=tmp_path, capture_output=True, text=True
        )
        told = (tmp_path / "logs" / "rank-0.log").read_text()
        assert f"GOMP_SPINCOUNT = '{turns}'" in told, done.stderr + told
        (tmp_path / "logs" / "rank-0.log").unlink()
