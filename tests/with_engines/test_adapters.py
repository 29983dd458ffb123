"""Runs that train an adapter on Megatron, and generate with vLLM or hf.

The adapter alone is sent and saved. A run that is killed and resumed computes what an uninterrupted run computes.
"""

import os
import re
import signal

import numpy as np
import pytest
from place import ONE_RANK, SMALL, metrics, ran
from safetensors.numpy import load_file

from msrl_graph import compile

# What does not depend on the results of a run, and what a resumed run sends again.
TIMES = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")
TIMES = (*TIMES, "reshard_bytes", "changed")
WORKER = "worker actor     : policy"
TARGETS = "[q_proj, up_proj, down_proj]"
ADAPTER = (WORKER, f"{WORKER} {{ adapter = lora(rank = 4, targets = {TARGETS}, dropout = 0.1) }}")
SAVED = ("seed = 0 }", "seed = 0, save = 2 }")


def engines(axis, generator):
    update = f"layout actor.update {{ {axis} = 2 }}\n  engine actor.update = megatron"
    generate = f"layout actor.generate {{ tp = 2 }}\n  engine actor.generate = {generator}"
    return (
        ("layout actor.update   { dp = 2, zero = 3 }", update),
        ("layout actor.generate { tp = 2 }", generate),
    )


def adapter(folder):
    return load_file(folder / "weights" / "actor" / "adapter_model.safetensors")


def computed(folder):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(folder)]


def kill(place, process):
    """Kill all processes of a run."""
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for pid in place.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("axis", "generator"), [("tp", "vllm"), ("pp", "hf")])
def test_a_killed_and_resumed_run_goes_on_as_the_whole_one(axis, generator, place):
    place.write(*engines(axis, generator), ADAPTER, SAVED, evaluated=False)
    ran(place, *SMALL, "--iterations", "8", "--out", "whole")
    plan = compile(place.folder / "p.rlg")
    (edge,) = plan.reshards
    first, *later = [line["reshard_bytes"] for line in metrics(place.folder / "whole") if "iteration" in line]
    assert later == [edge.received_bytes_per_device] * len(later)
    if axis == "pp":  # with tp, each rank has its own part already
        assert 0 < edge.received_bytes_per_device <= 4 * sum(t.elements for t in plan.model("actor.update").trained)
        assert edge.received_bytes_per_device < first
    # The reference computes with the weights of the trained worker, without the adapter.
    assert not any("reference.infer weights" in entry.items for entry in plan.memory)
    process = place.start("p.rlg", *SMALL, "--iterations", "8", "--out", "again")
    place.wait_for_lines("again", 3)
    kill(place, process)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "8", "--resume", "again", "--out", "again")
    assert code == 0 and re.search("resumed after [246] iterations", err), err
    one, other = (computed(place.folder / name) for name in ("whole", "again"))
    assert one == other
    assert max(line["logp_drift"] for line in one if "logp_drift" in line) < 1e-4
    whole = adapter(place.folder / "whole")
    assert len(whole) == 24 and all(value.any() for value in whole.values())
    assert all(np.array_equal(value, whole[name]) for name, value in adapter(place.folder / "again").items())


def test_it_trains_the_same_adapter_as_fsdp_on_one_rank(place):
    place.write(*ONE_RANK, ADAPTER, evaluated=False)
    ran(place, *SMALL, "--iterations", "3", "--out", "fsdp")
    wanted = adapter(place.folder / "fsdp")
    for axis in ("tp", "pp"):
        place.write(*engines(axis, "hf"), ADAPTER, evaluated=False)
        ran(place, *SMALL, "--iterations", "3", "--out", axis)
        found = adapter(place.folder / axis)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert np.abs(value - wanted[name]).max() < 1e-5, (axis, name)
        losses = [[line["loss/kl"] for line in metrics(place.folder / name)] for name in ("fsdp", axis)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-8) and losses[1][-1] > 0
