"""What an engine that trains holds at its peak beside weights and optimizer states, and what its spec says of it: on
ranks without a plan, every row at its bound."""

import gc
import json
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import engines
import numpy as np
import pytest
import ranks
import torch
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.backends.memory import sizes
from msrl_graph.backends.optimizer import gradients as gradients_module
from msrl_graph.backends.optimizer import shards, steps
from msrl_graph.backends.spec import BYTES
from msrl_graph.cost.holdings import largest_moment
from msrl_graph.ir.optimizer_spec import with_moments
from msrl_graph.ir.workload import Recomputation, Workload
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import full_box

EXPERTS = {"family": "qwen3_moe", "experts": (8, 2, 64)}
ROWS = 8
EACH = 4
PROMPT = 12
RESPONSE = 30
BATCHES = 2


def small(folder, family="llama", experts=(), **changes):
    """A model of random weights, in which what is computed of tokens outweighs them; `experts`: so many, of which a
    token gets so many, of such a width."""
    from safetensors.torch import save_file

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 160, "vocab_size": 512, **heads}
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3_moe": "Qwen3Moe"}
    config |= {"model_type": family, "architectures": [f"{names[family]}ForCausalLM"], "max_position_embeddings": 128}
    config |= {"tie_word_embeddings": False, "dtype": "float32"}
    if experts:
        config |= dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), experts, strict=True))
        config |= {"norm_topk_prob": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    found = models.load(str(folder), Path("/"))
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for tensor in (*found.weights, found.scoring.weights[-1]):
        for name, _, box in tensor.in_files(full_box(tensor.shape)):
            size = [stop - start for start, stop in box]
            weights[name] = (0.2 * torch.randn(size, generator=draw)).to(
                torch.bfloat16 if found.dtype == "bf16" else torch.float32
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def peaks(name, model, layout, entropy=False, recompute="none", gradients="f32", moments="f32", chunk=sizes.CHUNK):
    """By verb, the bytes that an engine holds at most, of the busiest rank, what that was, and what its spec says.
    `chunk`: the elements of an optimizer's buffer."""
    spec = ENGINES[name]
    work = Workload(
        model,
        layout,
        model.dtype,
        ROWS,
        ROWS // EACH,
        PROMPT,
        RESPONSE,
        batches=BATCHES * layout.pp,
        divided=spec.divides_weights(layout),
        trained=True,
        recompute=Recomputation.of_option(recompute),
        entropy=entropy,
        optimizer=with_moments(adamw(lr=1e-4), BYTES[moments]),
        gradients=gradients,
        on_host=True,
        replays_routes=bool(model.experts),
    )
    found = {}
    with tempfile.TemporaryDirectory() as out:
        ranks.run(layout.devices, _peaks, name, work, recompute, out, chunk)
        for file in sorted(Path(out).iterdir()):
            for verb, (size, moment) in json.loads(file.read_text()).items():
                found[verb] = max(found.get(verb, (0, "")), (size, moment))
    with chunks_of(chunk):
        return {verb: (*found[verb], largest_moment(spec.memory.peaks(verb, work))) for verb in found}


@contextmanager
def chunks_of(size):
    with pytest.MonkeyPatch.context() as patch:
        for module in (gradients_module, shards, sizes, steps):
            patch.setattr(module, "CHUNK", size)
        yield


def assert_close(found):
    for verb, (held, moment, (name, items)) in found.items():
        told = f"{verb}: {held:,} bytes, after {moment}\nsaid for {name}: {items}"
        assert sum(items.values()) == pytest.approx(held, rel=0.05), told


def _peaks(rank, _, name, work, recompute, out, chunk):
    with chunks_of(chunk):
        _measure(rank, name, work, recompute, out)


def _measure(rank, name, work, recompute, out):
    gc.collect()
    layout = work.layout
    mesh = engines.mesh(layout) if layout.devices > 1 else None
    options = {"recompute": recompute, "gradients": work.gradients}
    engine = engines.built(name, work.model, layout, rank, mesh, work.optimizer, **options)
    draw = np.random.default_rng(rank if mesh is None else layout.coordinates(rank).dp)
    batches = [_batch(draw, work) for _ in range(work.batches)]
    drops = work.model.lora is not None and work.model.lora.dropout > 0
    asked = ForwardRequest(entropy=work.entropy, dropout=7 if drops else None)

    def update():
        engine.train(batches, _loss, asked)
        engine.step(StepRequest(1e-4, 1.0))

    verbs = {"infer": lambda: engine.score(batches, ForwardRequest()), "update": update}
    for act in verbs.values():
        act()  # what a first call makes and keeps
    found = {}
    for verb, act in verbs.items():
        gc.collect()
        before = memory.live_bytes()["device"]
        with memory.Peak() as peak:
            act()
        counts = Counter(m for m in peak.largest if m[1] != "before").most_common()
        most = sorted(counts, key=lambda c: -c[0][0] * c[1])[:30]
        lines = [f"{n:4} x {size:>12,} {made} {shape}" for (size, made, shape), n in most]
        found[verb] = peak.peak["device"] - before, "\n".join([peak.moment, *lines])
    (Path(out) / str(rank)).write_text(json.dumps(found))
    dist.barrier()


def _batch(draw, work):
    size = work.model.vocabulary
    prompts = [draw.integers(0, size, work.prompt) for _ in range(work.prompts)]
    contexts = ragged([prompts[i * work.prompts // work.rows] for i in range(work.rows)], np.int32)
    responses = ragged([*draw.integers(0, size, (work.rows, work.response))], np.int32)
    packed = pack([contexts], [responses], np.arange(work.rows))
    if experts := work.model.expert_mlp:  # plans count even shares; rows that begin alike have the same routes there
        offsets = packed["offsets"].numpy()
        position = np.arange(len(packed["ids"])) - np.repeat(offsets[:-1], np.diff(offsets))
        routes = (position[:, None, None] * experts.active + np.arange(experts.active)) % experts.number
        routes = np.broadcast_to(routes, (len(position), len(work.model.expert_layers), experts.active))
        packed["routes"] = torch.from_numpy(routes.astype(np.int16))
    return packed


def _loss(made, _):
    if made.values is not None:
        return (made.values**2).sum()
    total = (made.logp * torch.linspace(-1, 1, len(made.logp))).sum()
    return total if made.entropy is None or not made.entropy.requires_grad else total + 0.1 * made.entropy.sum()
