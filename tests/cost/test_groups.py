"""What a plan counts of process groups is what ranks make as they build their engines, and memory has their buffers."""

import pytest
import ranks
from place import EXAMPLE
from torch import distributed as dist

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost import groups
from msrl_graph.hardware.device_kinds import ASCEND
from msrl_graph.ir.plan import from_json

PROGRAM = (EXAMPLE / "grpo.rlg").read_text()
LAYOUTS = "  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n"


def planned(statements, devices):
    text = PROGRAM.replace("devices_per_node = 2", f"devices_per_node = {devices}").replace(LAYOUTS, statements)
    assert statements in text
    return compile(EXAMPLE / "p.rlg", text=text)


def made(rank, _, text, expected):
    """Of several ranks, as the runtime's own engines are built; an axis of all ranks has the group that is there."""
    from msrl_graph.runtime.rank.context import RankContext
    from msrl_graph.runtime.rank.engines import Engines

    plan, known = from_json(text), {*dist.distributed_c10d._world.pg_map}
    context = RankContext(plan, rank)
    Engines(context).build()
    new = [g for g in dist.distributed_c10d._world.pg_map if g not in known and g.size() > 1]
    whole = any(size == dist.get_world_size() for mesh in context.meshes.values() for size in mesh.mesh.shape)
    sends = any(r.mode == "send" for r in plan.reshards)
    assert len(new) + (whole or sends) == expected[plan.pool_of(rank).name], [*map(dist.get_process_group_ranks, new)]


@pytest.mark.parametrize(
    ("statements", "counts"),
    [
        ("  layout actor.update { dp = 4, zero = 3 }\n  layout actor.generate { tp = 2, dp = 2 }\n", (5,)),
        ("  layout actor.update { dp = 2, tp = 2 }\n  layout actor.generate { dp = 4 }\n", (6,)),
        ("  layout actor.update { cp = 2, tp = 2 }\n  layout actor.generate { tp = 2, dp = 2 }\n", (6,)),
        ("  apart actor.generate, actor.update\n  layout actor.update { dp = 2 }\n", (3, 4)),
    ],
)
def test_a_rank_makes_as_many_groups_as_are_counted(statements, counts):
    plan = planned(statements, 4)
    counted = {p.name: groups.count_groups(plan, ENGINES, p.name) for p in plan.pools}
    ranks.run(4, made, plan.to_json(), counted)
    assert tuple(counted.values()) == counts


def test_one_rank_has_none():
    plan = planned("", 1)
    assert groups.count_groups(plan, ENGINES, plan.pools[0].name) == 0


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_on_ascend_each_has_its_buffers_in_every_phase_and_elsewhere_none_is_known():
    program = PROGRAM.replace('device = "cpu"', 'device = "ascend-910b"')
    plan = compile(EXAMPLE / "p.rlg", text=program)
    number = groups.count_groups(plan, ENGINES, "devices")
    assert number == 4  # of vLLM tp, of an optimizer or FSDP dp, of the edge two
    held = {m.items[groups.BUFFERS] for m in plan.memory if m.place == "device"}
    assert held == {number * 2 * 200 * 2**20} == {number * ASCEND.group_bytes}
    (setting,) = (s for s in plan.environment_of(0).settings if s.name == "HCCL_BUFFSIZE")
    assert setting.value == "200"
    for device in ("cpu", "h100"):
        plan = compile(EXAMPLE / "p.rlg", text=PROGRAM.replace('device = "cpu"', f'device = "{device}"'))
        assert not any(groups.BUFFERS in m.items for m in plan.memory)
