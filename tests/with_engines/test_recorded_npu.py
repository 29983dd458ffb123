"""vLLM in a rank's life on a device: the real engine on CPUs, told that it is on an NPU, whose worker's sleep and whose
torch.npu are recorded ones.

Never run on an NPU: what is held is the order of calls, and that nothing of what sleep loses is read.
"""

import pytest
import torch
from ascend_worker import Worker
from life import lived
from stage import Stage, same
from standing_npu import Standing
from torch import distributed as dist

from msrl_graph.backends.vllm import engine as vllm
from msrl_graph.backends.vllm.core import GRAPHS, ON_HOST
from msrl_graph.backends.vllm.memory import SleepingMemory
from msrl_graph.hardware.device_kinds import HOST

GENERATES = ("engine actor.generate = hf", "engine actor.generate = vllm")


@pytest.fixture
def workers(monkeypatch):
    """The recorded workers, of which each has the runner of a real one. The CPU's vLLM neither sleeps nor captures
    graphs: it is asked for both, and does without."""
    import vllm._custom_ops as operators
    from vllm.engine import arg_utils
    from vllm.model_executor.layers import rotary_embedding

    made = []
    asked = []
    own = []
    real = arg_utils.EngineArgs
    group = dist.new_group
    build = Stage.build

    def arguments(**named):
        asked.append({name: named[name] for name in ("enable_sleep_mode", "enforce_eager", "compilation_config")})
        return real(**named | {"enable_sleep_mode": False, "enforce_eager": True, "compilation_config": {}})

    def sleeping(worker):
        made.append(Worker(worker.model_runner))
        own.append(made[-1])
        return SleepingMemory(made[-1])

    def building(stage):
        # Another rank, which has a process of its own, and none of what vLLM keeps in one.
        own.clear()
        rotary_embedding._ROPE_DICT.clear()
        build(stage)

    def beside(*of, **named):
        assert all(worker.mapped for worker in own), "a process group is made beside an engine that sleeps"
        return group(*of, **named)

    for name, value in ON_HOST.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(operators, "_supports_onednn", False)  # it would pack what is written later
    monkeypatch.setattr(arg_utils, "EngineArgs", arguments)
    monkeypatch.setattr(vllm, "SleepingMemory", sleeping)
    monkeypatch.setattr(dist, "new_group", beside)
    monkeypatch.setattr(Stage, "build", building)
    return made, asked


def test_a_ranks_life_with_vllm_is_that_on_a_hosts_cores_and_it_sleeps_in_the_order_that_works(
    alone, tmp_path, workers
):
    made, asked = workers
    npu = Standing()
    with npu.standing(kernels=HOST.kernels):
        npu.set_device(0)
        on_npu = lived(tmp_path / "npu", GENERATES)
    on_host = lived(tmp_path / "host", GENERATES)
    assert all(map(torch.equal, on_npu[0], on_host[0]))
    for one, other in zip(on_npu[1:], on_host[1:], strict=True):
        assert same(one, other)
    # A rank that goes on from the checkpoint draws what the first one drew after it.
    assert same(on_npu[1], on_npu[2]) and torch.equal(on_npu[0][1], on_npu[0][2])
    wanted = {"enable_sleep_mode": True, "enforce_eager": False, "compilation_config": GRAPHS}
    assert asked[:2] == [wanted] * 2 and not any(one["enable_sleep_mode"] for one in asked[2:])
    first, again = made
    once = ["wake weights", "wake kv_cache", "sleep 2"]
    # As they are built, and filled from the folder, and in each iteration.
    assert first.told == ["sleep 2", *once * 3] and again.told == ["sleep 2", *once * 2]
