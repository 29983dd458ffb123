"""Engines on one GPU: a rank's life by each pair of them, and vLLM asleep and awake.

Each test has a process of its own: vLLM's allocator sleeps for one engine a process. Nothing else may use the GPU: a
worker of vLLM that falls asleep ends where less is free afterwards than before. What is compared with another engine is
compared in the rounding of its kernels; the same engine, asleep and awake again, to the bit.
"""

import json
import os
from pathlib import Path

import engines
import numpy as np
import pytest
import torch
from life import lived
from mixture import latent, mixture
from stage import EXAMPLE, PROMPTS, same
from torch import distributed as dist
from torch import multiprocessing

from msrl_graph.backends import hf_modules
from msrl_graph.backends.devices import TorchDevice
from msrl_graph.backends.engine_protocols import GenerateRequest, Sampling, collect_responses
from msrl_graph.backends.vllm.core import SURROUNDINGS
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.hardware.device_kinds import CUDA
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.sharding.layout import Layout

GPU = TorchDevice(CUDA)
PLAIN = Sampling(4, 20, 1.0, 1.0, 0, ends=(1,))
ROUNDING = {"f32": 5e-3, "bf16": 0.15}  # of a token's log-probability: vLLM's kernels multiply f32 in TF32

# vLLM's kernels for latent attention take one size of latents, those of DeepSeek-V3, and no float32.
SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS = {
    "dense": lambda _: str(EXAMPLE / "model"),
    "mixture": mixture,
    "latent": lambda folder: latent(folder, **SIZES),
}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def apart(function, *arguments):
    """Runs it in a process of its own, a rank alone on the GPU."""
    multiprocessing.spawn(_ranked, (function, arguments), nprocs=1)


def _ranked(_, function, arguments):
    os.environ.update(SURROUNDINGS)
    torch.set_num_threads(1)
    GPU.claim()
    dist.init_process_group(CUDA.backends(), store=dist.HashStore(), rank=0, world_size=1)
    function(*arguments)
    dist.destroy_process_group()


def _lived(folder, generator, trainer):
    chosen = (("generate = hf", f"generate = {generator}"), ("update = fsdp", f"update = {trainer}"))
    drawn, went_on, again = lived(folder, ('device = "cpu"', 'device = "h100"'), *chosen)
    (folder / "drawn.json").write_text(json.dumps(drawn[0].tolist()))
    assert torch.equal(drawn[1], drawn[2]) and same(went_on, again)


@pytest.mark.parametrize("trainer", ["fsdp", "megatron"])
@pytest.mark.parametrize("generator", ["hf", "vllm"])
def test_a_rank_lives_as_on_a_hosts_cores(generator, trainer, alone, tmp_path):
    for name in ("gpu", "host"):
        (tmp_path / name).mkdir()
    apart(_lived, tmp_path / "gpu", generator, trainer)
    drawn, *_ = lived(tmp_path / "host")
    found = json.loads((tmp_path / "gpu" / "drawn.json").read_text())
    assert found == drawn[0].tolist()


def model(kind, dtype, folder):
    return models.load(MODELS[kind](folder), Path("/"), dtype, NOWHERE)


def generator(of):
    work = Workload(of, Layout(), of.dtype, rows=16, prompts=4, prompt=26, response=20, samples=4)
    return engines.built("vllm", of, Layout(), 0, engines.mesh(Layout(), device=GPU), work=work, device=GPU)


def filled(engine, of, scale=1.0):
    hf_modules.fill(of, shards := engine.allocate())
    for shard in shards:
        if "norm" in shard.name:
            shard.tensor.mul_(scale)
    engine.filled()
    return engine


def drawn(engine):
    return collect_responses(engine.generate(GenerateRequest(PROMPTS, np.arange(16), PLAIN)))


def compared(one, other):
    """How many rows drew the same, and how far log-probabilities are apart as long as rows drew the same."""
    alike = 0
    off = 0.0
    for tokens, wanted, said, told in zip(one[0], other[0], one[1], other[1], strict=True):
        most = min(len(tokens), len(wanted))
        same = int((np.append(tokens[:most] == wanted[:most], False)).argmin())
        alike += same == len(tokens) == len(wanted)
        off = max(off, np.abs(said[:same] - told[:same]).max(initial=0.0))
    return alike, off


def _asleep_and_awake(kind, dtype, folder):
    of = model(kind, dtype, folder)
    engine = filled(generator(of), of)
    places = [s.tensor.data_ptr() for s in engine._shards]
    tokens, said = drawn(engine)
    other = filled(engines.generator(of, device=GPU), of)
    wanted, told = drawn(other)
    alike, off = compared((tokens, said), (wanted, told))
    print(f"{kind} {dtype}: {alike} of 16 rows drawn alike, log-probabilities at most {off:.2g} apart")
    before = GPU.memory().free
    engine.release()
    given = GPU.memory().free - before
    print(f"  gave {given / 1e6:.0f} MB")
    assert given > sum(s.tensor.nbytes for s in engine._shards)
    for scale, same_again in ((1.3, False), (1.0, True)):
        filled(engine, of, scale)
        assert [s.tensor.data_ptr() for s in engine._shards] == places
        now, again = drawn(engine)
        assert same_again == all(map(np.array_equal, now, tokens))
        if same_again:
            assert all(map(np.array_equal, again, said))
        engine.release()
    assert alike >= 12 and off < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("kind", "dtype"), [(k, d) for k in MODELS for d in ROUNDING if (k, d) != ("latent", "f32")], ids=str
)
def test_vllm_asleep_and_awake(kind, dtype, tmp_path):
    apart(_asleep_and_awake, kind, dtype, tmp_path)


def _light(kind, folder):
    of = model(kind, "f32", folder)
    on_gpu = filled(engines.generator(of, device=GPU), of)
    on_host = filled(engines.generator(of), of)
    first = drawn(on_gpu)
    again = drawn(on_gpu)
    wanted = drawn(on_host)
    assert all(map(np.array_equal, first[0], again[0]))
    alike, off = compared(first, wanted)
    print(f"{kind}: {alike} of 16 rows drawn as on the host, log-probabilities at most {off:.2g} apart")
    assert alike == 16 and off < 1e-3
    on_gpu.release()
    assert all(not s.tensor.untyped_storage().nbytes() for s in on_gpu._shards)


@pytest.mark.parametrize("kind", MODELS)
def test_the_light_engine_draws_as_on_a_hosts_cores(kind, tmp_path):
    apart(_light, kind, tmp_path)
