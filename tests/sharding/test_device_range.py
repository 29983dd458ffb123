"""Stretches of devices: ranks and devices count each other, and what meets is what has a device in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.sharding.device_range import format_device_range, iterate_runs, ranges_overlap
from msrl_graph.sharding.layout import Layout, Side

Case = tuple[int, int, int]


@st.composite
def stretches(draw: st.DrawFn, per_host: int) -> Case:
    """First device, devices, and those of each host."""
    each = draw(st.integers(0, per_host - 1))
    if not each:
        return draw(st.integers(0, 20)), draw(st.integers(1, 20)), 0
    first = draw(st.integers(0, 3)) * per_host + draw(st.integers(0, per_host - each))
    return first, each * draw(st.integers(2, 4)), each


def devices(case: Case, per_host: int) -> list[int]:
    return [d for begin, end in iterate_runs(*case, per_host) for d in range(begin, end)]


@given(st.data(), st.integers(2, 6))
def test_ranks_count_through_the_devices(data: st.DataObject, per_host: int) -> None:
    first, number, each = case = data.draw(stretches(per_host))
    side = Side(Layout(dp=number), first=first, each=each)
    own = devices(case, per_host)
    assert [side.device(r, per_host) for r in range(number)] == own == sorted(own)
    assert {d: r for d in range(60) if 0 <= (r := side.rank(d, per_host)) < number} == {d: r for r, d in enumerate(own)}
    hosts = [d // per_host for d in own]
    if each:
        assert {hosts.count(h) for h in hosts} == {each == side.on_host(number, per_host) and each}


@given(st.data(), st.integers(2, 6))
def test_what_meets_has_a_device_in_common(data: st.DataObject, per_host: int) -> None:
    one = data.draw(stretches(per_host))
    other = data.draw(stretches(per_host))
    assert (
        ranges_overlap(one, other, per_host)
        == bool({*devices(one, per_host)} & {*devices(other, per_host)})
        == ranges_overlap(other, one, per_host)
    )


def test_in_words() -> None:
    assert format_device_range(3, 1) == "device 3"
    assert format_device_range(8, 8) == "devices 8..15"
    assert format_device_range(12, 8, 4, 8) == "devices 4..7 of nodes 1..2"
    assert format_device_range(0, 2, 1, 8) == "device 0 of nodes 0..1"
