"""Masks: which devices a process sees, what hides some without a word, and which of them Ray has given it."""

import os
import subprocess
import sys

import pytest

from msrl_graph.hardware import masks
from msrl_graph.hardware.device_kinds import ASCEND, CUDA


@pytest.mark.parametrize(
    ("kind", "mask", "seen"),
    [
        (ASCEND, None, "0 1 2 3 4 5 6 7"),
        (ASCEND, "4,5,6,7", "4 5 6 7"),
        (ASCEND, " 0, 3 ", "0 3"),
        (ASCEND, "", ""),
        (ASCEND, "4,9,5", "4 5"),
        (ASCEND, "5,4", ""),
        (ASCEND, "3,3", "3"),
        (CUDA, "5,4", "5 4"),
        (CUDA, "4,9,5", "4"),
        (CUDA, "-1", ""),
        (CUDA, "3,3,4", "3"),
        (CUDA, "GPU-8932f937,GPU-17aa2b03", "GPU-8932f937 GPU-17aa2b03"),
    ],
)
def test_what_a_process_sees_of_eight_devices(kind, mask, seen):
    assert " ".join(masks.seen(kind, mask, 8)) == seen


@pytest.mark.parametrize(
    ("kind", "mask", "told"),
    [
        (ASCEND, None, ""),
        (ASCEND, "0,1,4", ""),
        (CUDA, "4,1", ""),
        (
            ASCEND,
            "4,5,9,12",
            "ASCEND_RT_VISIBLE_DEVICES is '4,5,9,12', and of its numbers 9, 12 are left out: "
            "the host has 8, which begin with 0",
        ),
        (
            CUDA,
            "4,9,5",
            "CUDA_VISIBLE_DEVICES is '4,9,5', and of its numbers 9 and what comes after it are left out: "
            "the host has 8, which begin with 0",
        ),
        (ASCEND, "1,0", "ASCEND_RT_VISIBLE_DEVICES is '1,0', whose numbers do not rise: none of them is seen"),
        (ASCEND, "1,2,1", "ASCEND_RT_VISIBLE_DEVICES is '1,2,1', which has 1 more than once"),
    ],
)
def test_what_a_mask_hides_is_told(kind, mask, told):
    assert masks.wrong(kind, mask, 8) == told


@pytest.mark.parametrize(
    ("given", "mask", "index"),
    [(["5"], "5", 0), (["5"], "4,5,6,7", 1), (["5"], None, 5), ([], "4,5", 0), (["GPU-b"], "GPU-a,GPU-b", 1)],
)
def test_the_device_that_ray_gives_has_torchs_number(given, mask, index):
    assert masks.index(given, mask) == index


def test_a_device_that_the_mask_does_not_list_is_told():
    with pytest.raises(ValueError, match="Ray gave this process the device 3, and its mask lists 4,5"):
        masks.index(["3"], "4,5")


ASKING = """
import os, ray, sys
ray.init(address="local", resources={"NPU": 4}, include_dashboard=False, logging_level="error", _temp_dir=sys.argv[1])

@ray.remote(resources={"NPU": 1}, num_cpus=0)
class Rank:
    def told(self):
        from msrl_graph.hardware import masks
        from msrl_graph.hardware.device_kinds import ASCEND
        from msrl_graph.runtime.process import facts
        asked = dict(packages={}, files=[], devices="", address="", interface="", variables=[ASCEND.visible])
        mask, begun = os.environ[ASCEND.visible], facts.look(asked)["variables"]
        given = ray.get_runtime_context().get_accelerator_ids()[ASCEND.resource]
        return f"{given[0]} of {mask} is {masks.index(given, mask)}, {begun[ASCEND.visible]}"

ranks = [Rank.remote() for _ in range(4)]
print(*sorted(ray.get([r.told.remote() for r in ranks])), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["its own", "all"])
def test_real_ray_gives_each_rank_a_device_of_a_subset(tmp_path_factory, shown):
    """Ray gives numbers of the host, whether it shows a process its own device alone or is kept from that."""
    mask = "4,5,6,7"
    around = os.environ | {ASCEND.visible: mask, "RAY_DEDUP_LOGS": "0"}
    if shown == "all":
        around[f"RAY_EXPERIMENTAL_NOSET_{ASCEND.visible}"] = "1"
    command = [sys.executable, "-c", ASKING, str(tmp_path_factory.mktemp("r"))]
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=120)
    told = [line for line in done.stdout.splitlines() if " of " in line and " is " in line]
    own = [f"{n} of {n} is 0, {mask}" for n in mask.split(",")]
    assert told == (own if shown == "its own" else [f"{n} of {mask} is {i}, {mask}" for i, n in enumerate("4567")])
