"""The paper's equations against its Table 1 (arXiv:2507.19017), and against what the compiler counts."""

from __future__ import annotations

import math

import page
import pytest
from equations import (
    GIB,
    MIB,
    central_bytes,
    dispatch_seconds,
    redundant_bytes,
    request_bytes,
    throughput,
    warehouse_bytes,
)

from msrl_graph.sharding.layout import Layout, Side, group_by_kind
from msrl_graph.sharding.redistribute import count_left_behind
from msrl_graph.sharding.tensors import Tensor

K = 1024
# G, N, PL, n, SL, M, then TCV, T100 and T1K as the paper prints them, and the unit of the last digit printed.
TABLE = [
    (256, 8, 2 * K, 5, 8 * K, 3, (0.96, 0.01), (9.92, 0.01), (0.97, 0.01)),
    (256, 16, 2 * K, 5, 16 * K, 3, (3.81, 0.01), (39.0, 0.1), (3.81, 0.01)),
    (K, 16, 2 * K, 5, 16 * K, 3, (15.2, 0.1), (156.1, 0.1), (15.2, 0.1)),
    (K, 32, 4 * K, 8, 32 * K, 5, (97.0, 0.1), (993.3, 0.1), (97.0, 0.1)),
    (4 * K, 32, 4 * K, 8, 32 * K, 5, (388.0, 0.1), (3.9e3, 100), (388.0, 0.1)),
    (8 * K, 64, 4 * K, 8, 64 * K, 5, (3.1e3, 100), (31e3, 1e3), (3.1e3, 100)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"G{row[0]}-N{row[1]}")
def test_table_1(row: tuple) -> None:
    g, n_responses, pl, n, sl, m, tcv, t100, t1k = row
    volume = central_bytes(g, n_responses, 4, pl, n, sl, m)
    found = (volume / GIB, dispatch_seconds(volume, 100 * MIB), dispatch_seconds(volume, GIB))
    for value, (printed, unit) in zip(found, (tcv, t100, t1k), strict=True):
        assert abs(value - printed) <= unit * (1 + 1e-9), (value, printed)


def test_a_dock_of_one_warehouse_moves_what_the_buffer_does_and_its_metadata() -> None:
    one = warehouse_bytes(256, 16, 4, 2 * K, 5, 8 * K, 3, 0, 1)
    assert one == central_bytes(256, 16, 4, 2 * K, 5, 8 * K, 3)
    assert warehouse_bytes(256, 16, 4, 2 * K, 5, 8 * K, 3, 5, 16) < one / 15.9


def test_throughput() -> None:
    assert throughput(256, 16, 2 * K, 8 * K, 16, 1000.0) == pytest.approx(4096 * 10240 / 16 / 1000)


def test_equation_1_is_what_the_compiler_counts_on_the_graph() -> None:
    # The graph counts a prompt once, the equation once a response; the update reads 4 items as long as a response and
    # no scalar.
    plan = page.plan(page.start())
    counted = sum(plan.graph.column_bytes[c] for c in plan.graph.node("actor.update").reads)
    assert counted == request_bytes(256, 16, 4, 2048 / 16, 4, 8192, 0)
    assert counted == sum(t.bytes for t in plan.traffic if t.dst == "actor.update")


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (4, 2), (8, 4)])
def test_equation_3_is_what_the_layouts_leave_behind(tp: int, dp: int) -> None:
    # Figure 3's shape: generation with tp 1. Common weights (norms) are generated from where they are.
    tensors = [Tensor("q", (64, 32), 0), Tensor("o", (32, 64), 1), Tensor("norm", (32,), -1)]
    divided = sum(math.prod(t.shape) for t in tensors if t.tp_dim >= 0)
    left = count_left_behind(group_by_kind(tensors), Side(Layout(tp=tp, dp=dp)), Side(Layout(dp=tp * dp)))
    assert left == redundant_bytes(gdp=tp * dp, tw=divided, utp=tp)


def test_equation_3_with_expert_weights() -> None:
    # Figure 3: TP2 EP2 DP2 on 4 devices, then EP4: half of what EP2 holds is not needed, EW / GEP on each device.
    assert redundant_bytes(gdp=4, tw=100, utp=2, ew=80, gep=4) == 4 * (50 + 20)
