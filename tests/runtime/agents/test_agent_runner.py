"""Agents as they run, without a rank: what is handed out when, and where the endpoint listens."""

import asyncio

import pytest
from agent_plays import played

from msrl_graph.runtime.agents import agent_runner
from msrl_graph.runtime.agents.agent_runner import interface_address


@pytest.mark.parametrize("name", ["solve", "waits"])
def test_requests_are_drawn_as_soon_as_all_wait_and_in_time_where_some_do_not(made, monkeypatch, name):
    monkeypatch.setattr(agent_runner, "QUIET", 60.0)
    batches, over = asyncio.run(played(made(name), ["", "", "."]))
    assert [sorted(b) for b in batches] == [[0, 1, 2]] * 2
    assert over.answers == 6 and not over.failed
    monkeypatch.setattr(agent_runner, "QUIET", 0.0)
    batches, _ = asyncio.run(played(made(name), ["", "." * 20]))
    assert next(b for b in batches if b) == [0] and sum(map(len, batches)) == 4


def test_a_rank_hears_when_nobody_asks_and_no_request_is_lost_by_it(made, monkeypatch):
    monkeypatch.setattr(agent_runner, "HEARTBEAT", 0.01)
    monkeypatch.setattr(agent_runner, "QUIET", 0.3)
    batches, over = asyncio.run(played(made("solve"), ["", "....."]))
    assert [] in batches
    assert sum(map(len, batches)) == over.answers == 4


def test_an_endpoint_listens_where_the_run_says():
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("10.1.2.3") == "10.1.2.3"
