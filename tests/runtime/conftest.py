"""Agents that several rooms of the runtime run."""

import chat
import pytest
from agent_plays import AGENT, NODE
from templates import PLAIN

from msrl_graph.runtime.agents.agent_runner import Agents


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
