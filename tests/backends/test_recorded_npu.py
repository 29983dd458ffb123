"""The backend of a device that is not its host's cores, through a rank's life, on a recorded torch.npu.

Never run on an NPU: the order of calls is held here, their names and arguments in test_contracts.py.
"""

import pytest
import torch
from life import ENGINES, lived
from stage import Stage, one_rank, same
from standing_npu import Standing

from msrl_graph.backends import devices
from msrl_graph.hardware.device_kinds import DEVICE_KINDS, HOST


@pytest.fixture
def npu():
    return Standing()


def test_a_ranks_life_is_that_on_a_hosts_cores_and_keeps_the_order_that_a_device_wants(alone, tmp_path, npu):
    with npu.standing(kernels=HOST.kernels):  # so that both are to the bit the same
        npu.set_device(0)
        on_npu = lived(tmp_path / "npu")
    assert not npu.operators.calls
    told = [*npu.told]
    on_host = lived(tmp_path / "host")
    assert npu.told == told  # a host's cores are asked nothing of the kind
    assert all(map(torch.equal, on_npu[0], on_host[0]))
    for one, other in zip(on_npu[1:], on_host[1:], strict=True):
        assert same(one, other)
    assert same(on_npu[1], on_npu[2]) and torch.equal(on_npu[0][1], on_npu[0][2])
    # Weights leave and come back as each of two ranks is built and in three iterations, each time in pinned buffers
    # made anew, by streams of their own.
    weights = len(Stage(one_rank(ENGINES)).engines.trainers["actor"].shards())
    assert told.count("pinned buffer") == 5 * weights
    assert told.count("wait_stream") == told.count("stream") == 2 * 5
    assert {"record", "wait_event", "synchronize", "synchronize event", "set_device"} <= {*told}


def test_a_ranks_life_by_an_npus_kernels_is_that_by_torchs_own(alone, tmp_path, npu):
    with npu.standing():
        npu.set_device(0)
        (drawn, *ended) = lived(tmp_path / "npu")
    (known, *others) = lived(tmp_path / "host")
    assert all(map(torch.equal, drawn, known))
    for found, own in zip(ended, others, strict=True):
        for some, alike in zip(found, own, strict=True):
            torch.testing.assert_close(some, alike, rtol=0, atol=3e-4)
    fused = {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention"}
    assert {*npu.operators.calls} == fused  # those of a model without experts, on one rank


def test_a_thread_that_asks_before_it_has_a_device_is_refused(npu):
    with npu.standing(), pytest.raises(AssertionError, match="Stream before set_device"):
        devices.Lane(devices.TorchDevice(DEVICE_KINDS[HOST.name]))
