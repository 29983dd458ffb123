"""The backend of a device that is not its host's cores, through a rank's life, on a recorded torch.npu.

Never run on an NPU: the order of calls is held here, their names and arguments in test_contracts.py.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from recorded_npu import Npu
from stage import Stage, one_rank, same

from msrl_graph.backends import devices
from msrl_graph.hardware.device_kinds import ASCEND, DEVICE_KINDS, HOST
from msrl_graph.runtime.weights import checkpoint

ENGINES = (
    "  run {",
    "  engine actor.generate = hf\n  engine actor.update = fsdp\n  engine reference.infer = fsdp\n  run {",
)
EDGE = ("actor.update", "actor.generate")


class Standing(Npu):
    @contextmanager
    def standing(self):
        """Within, a host's cores stand for an NPU: they have its facts, and their own name for torch."""
        kind = replace(ASCEND, name=HOST.name, torch=HOST.torch, collectives=HOST.collectives, settings=HOST.settings)
        alike = torch.empty_like

        def unpinned(tensor, pin_memory=False, **named):
            self.told.append("pinned buffer") if pin_memory else None
            return alike(tensor, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(DEVICE_KINDS, HOST.name, kind)
            patch.setattr(devices.Device, "_module", self)
            patch.setattr(devices.Device, "place", torch.device(HOST.torch))
            patch.setattr(torch, "empty_like", unpinned)
            yield


@pytest.fixture
def npu():
    return Standing()


def lived(folder):
    """A rank's life: an iteration, a checkpoint, another iteration; and a rank that goes on from the checkpoint. What
    both have drawn, and end with."""
    stage, drawn = started(), []
    drawn.append(iterated(stage))
    files, steps, failed = stage.checkpoint(str(partial := checkpoint.begin(folder, 1)), {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 1, 0, dict(steps), {}, tuple(files))
    path = checkpoint.commit(partial, manifest, 1)
    drawn.append(iterated(stage))
    again = started()
    again.resume(str(path), checkpoint.manifest_of(path))
    drawn.append(iterated(again))
    assert not failed
    return drawn, stage.whole(), again.whole()


def started():
    stage = Stage(one_rank(("(lr = 2e-4", "(lr = 1e-2"), ENGINES))
    stage.generator.release()
    return stage


def iterated(stage):
    edge = stage.resharders[EDGE]
    edge.run(stage.generator.allocate)
    stage.generator.filled()
    columns = stage.sampled()
    stage.generator.release()
    edge.swap.start_in()
    edge.swap.wait()
    for node in ("actor.infer", "reference.infer"):
        columns |= stage.act(node, columns)
    stage.act("actor.update", columns)
    return torch.from_numpy(columns["response"].values)


def test_a_ranks_life_is_that_on_a_hosts_cores_and_keeps_the_order_that_a_device_wants(alone, tmp_path, npu):
    with npu.standing():
        npu.set_device(0)
        on_npu = lived(tmp_path / "npu")
    told = [*npu.told]
    on_host = lived(tmp_path / "host")
    assert npu.told == told  # a host's cores are asked nothing of the kind
    assert all(map(torch.equal, on_npu[0], on_host[0]))
    for one, other in zip(on_npu[1:], on_host[1:], strict=True):
        assert same(one, other)
    assert same(on_npu[1], on_npu[2]) and torch.equal(on_npu[0][1], on_npu[0][2])
    # Weights leave and come back as each of two ranks is built and in three iterations, each time in pinned buffers
    # made anew, by streams of their own.
    weights = len(Stage(one_rank(ENGINES)).trainers["actor"].shards())
    assert told.count("pinned buffer") == 5 * weights
    assert told.count("wait_stream") == told.count("stream") == 2 * 5
    assert {"record", "wait_event", "synchronize", "synchronize event", "set_device"} <= {*told}


def test_a_thread_that_asks_before_it_has_a_device_is_refused(npu):
    with npu.standing(), pytest.raises(AssertionError, match="Stream before set_device"):
        devices.Lane(devices.Device(DEVICE_KINDS[HOST.name]))
