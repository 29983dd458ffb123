"""Agents as they run, without a rank: what is handed out when, and where the endpoint listens."""

import asyncio

import chat
import numpy as np
import pytest
from templates import PLAIN

from msrl_graph.runtime.agents import agent_runner
from msrl_graph.runtime.agents.agent_runner import Agents, address
from msrl_graph.runtime.agents.rank_protocol import AgentsFinished, BatchStart, SampleReplies, SampleReply
from msrl_graph.runtime.data.columns import texts
from msrl_graph.runtime.dock.messages import Batch

AGENT = """
import asyncio
import time
from urllib.request import Request, urlopen

def ask(base_url, api_key, prompt):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urlopen(Request(f"{base_url}/completions", f'{{"model": "policy", "prompt": "{prompt}"}}'.encode(), head)).close()


def solve(question, base_url, api_key):
    time.sleep(0.1 * len(question))
    ask(base_url, api_key, "one")
    ask(base_url, api_key, "two")


async def waits(question, base_url, api_key):
    await asyncio.to_thread(solve, question, base_url, api_key)
"""
NODE = """node actor.generate(out_question) -> out_response {{ agent = "{path}:{name}" }}
          node host.question(question) -> out_question {{ call = "{path}:ask2" }}
          source -> host.question -> actor.generate"""


@pytest.fixture
def made(tmp_path):
    chat.model(tmp_path / "model", PLAIN)
    (tmp_path / "talks.py").write_text(AGENT + "\n\ndef ask2(question):\n    return question\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "one"}\n')
    columns = {"question": "text", "out_question": "text", "out_response": "i32[<= 40]"}

    def agents(name):
        nodes = NODE.format(path=tmp_path / "talks.py", name=name)
        plan = chat.plan(tmp_path, tmp_path / "rows.jsonl", columns, nodes)
        return Agents(plan, plan.graph.node("actor.generate"))

    return agents


def batch(questions):
    rows = np.arange(len(questions))
    columns = {"out_question": texts(questions)}
    contexts = [np.zeros(0, np.int32)] * len(questions)
    return BatchStart("train", 3, Batch(None, rows, columns), rows, contexts, 40)


async def played(agents, questions):
    """The places of each batch that was handed out, and what comes of it all; each draw is one token."""
    await agents.begin(batch(questions))
    found = await agents.next(SampleReplies())
    batches = []
    while not isinstance(found, AgentsFinished):
        batches.append([w.place for w in found])
        drawn = [SampleReply(w.number, np.array([7], np.int32), np.zeros(1, np.float32)) for w in found]
        found = await agents.next(SampleReplies(drawn))
    await agents.endpoint.stop()
    return batches, found


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
    assert address("lo") == "127.0.0.1"
    assert address("10.1.2.3") == "10.1.2.3"
