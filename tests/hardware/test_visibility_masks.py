"""Masks: which devices a process sees, what hides some without a word, and which of them Ray has given it."""

import os
import subprocess
import sys

import pytest

from msrl_graph.hardware import visibility_masks
from msrl_graph.hardware.device_kinds import ASCEND, CUDA


@pytest.mark.parametrize(
    ("kind", "mask", "seen"),
    [
        (ASCEND, None, "0 1 2 3 4 5 6 7"),
        (ASCEND, "4,5,6,7", "4 5 6 7"),
        (ASCEND, "", ""),
        (ASCEND, "4,9,5", "4"),
        (ASCEND, "5,4", "5"),
        (ASCEND, "3,3", "3"),
        (ASCEND, "0, 3", "0"),
        (CUDA, " 0, 3 ", "0 3"),
        (CUDA, "5,4", "5 4"),
        (CUDA, "4,9,5", "4"),
        (CUDA, "-1", ""),
        (CUDA, "3,3,4", ""),
        (CUDA, "GPU-8932f937,GPU-17aa2b03", "GPU-8932f937 GPU-17aa2b03"),
    ],
)
def test_what_a_process_sees_of_eight_devices(kind, mask, seen):
    assert " ".join(visibility_masks.visible_ids(kind, mask, 8)) == seen


@pytest.mark.parametrize(
    ("kind", "mask", "told"),
    [
        (ASCEND, None, ""),
        (ASCEND, "0,1,4", ""),
        (CUDA, "4,1", ""),
        (ASCEND, "", "ASCEND_RT_VISIBLE_DEVICES is empty: no device is visible"),
        (ASCEND, "4,5,9", "ASCEND_RT_VISIBLE_DEVICES=4,5,9: there is no 9, only 0 to 7; 2 of 3 ids are read"),
        (CUDA, "x", "CUDA_VISIBLE_DEVICES=x: `x` is not a number; none of its ids is read"),
        (
            ASCEND,
            "1,0",
            "ASCEND_RT_VISIBLE_DEVICES=1,0: 0 comes after 1, but ids must rise; 1 of 2 ids are read",
        ),
        (CUDA, "1,2,1", "CUDA_VISIBLE_DEVICES=1,2,1: 1 is listed twice; none of its ids is read"),
    ],
)
def test_what_a_mask_hides_is_told(kind, mask, told):
    assert visibility_masks.describe_problem(kind, mask, 8) == told


@pytest.mark.parametrize(
    ("given", "mask", "index"),
    [(["5"], "5", 0), (["5"], "4,5,6,7", 1), (["5"], None, 5), ([], "4,5", 0), (["GPU-b"], "GPU-a,GPU-b", 1)],
)
def test_the_device_that_ray_gives_has_torchs_number(given, mask, index):
    assert visibility_masks.torch_index(given, mask) == index


def test_a_device_that_the_mask_does_not_list_is_told():
    with pytest.raises(ValueError, match="Ray gave this process the device 3, but its mask lists 4,5"):
        visibility_masks.torch_index(["3"], "4,5")


ASKING = """
import os, ray, sys
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from msrl_graph.hardware import visibility_masks
from msrl_graph.hardware.device_kinds import ASCEND, CUDA
from msrl_graph.runtime.process import host_facts

has = ASCEND.ray(2) | CUDA.ray(2)
has.pop("num_cpus")
ray.init(address="local", include_dashboard=False, logging_level="error", _temp_dir=sys.argv[1], **has)

@ray.remote
class Rank:
    def told(self, kind):
        asked = dict(packages={}, others={}, files=[], devices="", address="", interface="", variables=[kind.visible])
        mask, begun = os.environ[kind.visible], host_facts.look(asked)["variables"]
        given = ray.get_runtime_context().get_accelerator_ids()[kind.resource]
        return f"{kind.name} {given[0]} of {mask} is {visibility_masks.torch_index(given, mask)}, {begun[kind.visible]}"

ranks = []
for kind in (ASCEND, CUDA):
    group = placement_group([{kind.resource: 2}])
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    ranks += [(Rank.options(scheduling_strategy=placed, **kind.ray()).remote(), kind) for _ in range(2)]
print(*sorted(ray.get([rank.told.remote(kind) for rank, kind in ranks])), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["its own", "all"])
def test_real_ray_gives_each_rank_a_device_of_a_subset(tmp_path_factory, shown):
    """Ray gives numbers of the host, whether it shows a process its own device alone or is kept from that."""
    mask = "5,6"
    around = os.environ | {"RAY_DEDUP_LOGS": "0"}
    for kind in (ASCEND, CUDA):
        around[kind.visible] = mask
        if shown == "all":
            around[f"RAY_EXPERIMENTAL_NOSET_{kind.visible}"] = "1"
    command = [sys.executable, "-c", ASKING, str(tmp_path_factory.mktemp("r"))]
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=120)
    told = [line for line in done.stdout.splitlines() if " of " in line and " is " in line]
    alone = [f"{n} of {n} is 0, {mask}" for n in mask.split(",")]
    among = [f"{n} of {mask} is {i}, {mask}" for i, n in enumerate(mask.split(","))]
    assert told == [f"{k.name} {n}" for k in (ASCEND, CUDA) for n in (alone if shown == "its own" else among)], done
