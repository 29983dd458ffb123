"""vLLM's sleep on devices: the order in which its worker takes it, and that views into parameters hold."""

import pytest
import torch
from ascend_worker import Worker, runner
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.backends import devices
from msrl_graph.backends.vllm.core import make_shards
from msrl_graph.backends.vllm.memory import SleepingMemory

HIDDEN = 4
INNER = 3
EXPERTS = 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        # As vllm-ascend's kernels read them, [experts, in, out].
        self.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 2 * INNER))
        self.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, INNER, HIDDEN))
        self.register_buffer("angles", torch.arange(3.0))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Layer()


def made(nz=False):
    model = Model().requires_grad_(False)
    worker = Worker(runner(model), nz)
    return model, worker, SleepingMemory(worker)


@given(st.lists(st.sampled_from(["weights", "cache", "give"]), max_size=12))
def test_in_whatever_order_the_engine_asks_the_workers_order_is_kept(acts):
    model, worker, memory = made()
    before = dict(model.named_parameters())
    kinds = {"weights": [*model.parameters(), *model.buffers()], "kv_cache": worker.caches}
    for act in acts:
        getattr(memory, act)()
        assert all(p is before[name] for name, p in model.named_parameters())
        if act == "weights":
            assert "weights" in worker.mapped
        asleep = {
            k
            for k, tensors in kinds.items()
            if all(not devices.count_allocated_bytes(t.untyped_storage()) for t in tensors)
        }
        assert asleep == {*kinds} - worker.mapped
    memory.cache()
    assert "kv_cache" in worker.mapped and not any(map(torch.any, worker.caches))
    memory.weights()


def test_an_iteration_wakes_weights_then_the_cache_and_sleeps_at_level_2():
    _, worker, memory = made()
    memory.give()
    for _ in range(2):
        for act in ("weights", "cache", "give", "give"):
            getattr(memory, act)()
    assert worker.told == ["sleep 2", *["wake weights", "wake kv_cache", "sleep 2"] * 2]


def test_what_is_written_after_waking_is_what_kernels_read_experts_too():
    model, _, memory = made()
    boxes = {
        "mlp.*.gate_proj.weight": ((0, EXPERTS), (0, INNER), (0, HIDDEN)),
        "mlp.*.up_proj.weight": ((0, EXPERTS), (0, INNER), (0, HIDDEN)),
        "mlp.*.down_proj.weight": ((0, EXPERTS), (0, HIDDEN), (0, INNER)),
        "mlp.q_proj.weight": ((0, HIDDEN), (0, HIDDEN)),
    }
    shards = {s.name: s.tensor for s in make_shards(boxes, dict(model.named_parameters()), {}, turned=True)}
    for version in (1.0, 2.0):
        memory.give()
        assert all(torch.isnan(p).all() for p in model.parameters())
        memory.weights()
        sent = {name: torch.randn(tensor.shape) + version for name, tensor in shards.items()}
        for name, tensor in shards.items():
            tensor.copy_(sent[name])
        layer = model.mlp
        gate, up, down = (sent[f"mlp.*.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(layer.w13_weight, torch.cat([gate, up], 1).transpose(1, 2))
        assert torch.equal(layer.w2_weight, down.transpose(1, 2))
        assert torch.equal(layer.q_proj.weight, sent["mlp.q_proj.weight"])
        assert torch.equal(layer.angles, torch.arange(3.0))


def test_the_recorded_worker_refuses_what_the_real_one_does():
    _, worker, _ = made()
    worker.sleep(level=2)
    with pytest.raises(RuntimeError, match="unmapped"):
        worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    with pytest.raises(RuntimeError, match="mapped twice"):
        worker.wake_up(tags=["weights"])
    _, sleeper, memory = made(nz=True)
    memory.give()
    with pytest.raises(ValueError, match="FRACTAL_NZ"):
        memory.weights()
    assert sleeper.told == ["sleep 2", "wake weights"]
