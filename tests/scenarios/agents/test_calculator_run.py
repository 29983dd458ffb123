"""A program whose policy is asked by the openai package in a process of its own (runtime/agents/agent_process.py), from
text to trained weights."""

import json

import chat
import numpy as np
import pytest
from place import metrics, rows_of, weights
from templates import QWEN

pytestmark = pytest.mark.slow

AGENT = """
from openai import OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def solve(question, base_url, api_key, model):
    '''How many letters the policy writes in two turns, and the tokens that it drew.'''
    messages, drawn, letters = [{"role": "user", "content": question}], [], 0
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(2):
            asked = dict(model=model, messages=messages, tools=[TOOL], max_tokens=16)
            choice = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
            drawn += choice.token_ids
            letters += sum(map(str.isalpha, choice.message.content or ""))
            messages += [choice.message, {"role": "tool", "tool_call_id": "123456789", "content": f"turn {turn}"}]
    return float(letters), drawn
"""
PROGRAM = """
algorithm talk {{
  columns {{
    question  : text
    response  : i32[<= 300]
    mask      : bool[response]
    old_logp  : f32[response]
    reward    : f32
    drawn     : json
    advantage : f32[response]
  }}
  worker actor : policy
  worker host  : function
  source(4) -> question
  node actor.generate(question) -> response, mask, reward, drawn {{
    samples = 4, agent = "talks.py:solve", timeout = 3 min
  }}
  node actor.infer(response) -> old_logp
  node host.advantage(response, reward) -> advantage {{ call = group_norm(), per = question }}
  node actor.update(response, mask, old_logp, advantage) {{
    loss = clip(0.2), optimizer = adamw(lr = 1e-3), mini_batch = 16
  }}
  source -> actor.generate -> actor.infer, host.advantage
  actor.infer, host.advantage -> actor.update
  actor.update => actor.generate
}}
cluster laptop {{ device = "cpu", nodes = 1, devices_per_node = 2 }}
deploy talk on laptop {{
  model policy = "./talker"
  data source = "questions.jsonl"
  data held = "questions.jsonl"
  layout actor.update {{ dp = 2 }}
  layout actor.generate {{ {layout} }}
  engine actor.generate = hf
  engine actor.update = fsdp
  evaluate held {{ report = reward, samples = 1, temperature = 0 }}
  run {{ iterations = 2, seed = 0 }}
}}
"""


# That ranks which share the model write what those do which share the rows, tests/scenarios/agents/test_sampled_rows.py
# shows without a run.
@pytest.mark.parametrize("layout", ["dp = 2", pytest.param("tp = 2", marks=pytest.mark.long)])
def test_a_policy_that_is_asked_learns_from_what_it_drew_and_nothing_else(place, layout):
    chat.model(place.folder / "talker", QWEN, parts=2)
    questions = ["one plus two", "two plus two", "one", "what is three"]
    (place.folder / "questions.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (place.folder / "talks.py").write_text(AGENT)
    (place.folder / "p.rlg").write_text(PROGRAM.format(layout=layout))
    code, _, err = place.run("p.rlg", "--out", "out", "--record")
    assert code == 0, err
    place.assert_clean()
    for line in (x for x in metrics(place.folder / "out") if "iteration" in x):
        assert line["turns"] == 2 and line["updates"] == 1 and line["reward"] > 0
        assert line["policy_tokens"] + line["environment_tokens"] == line["response_tokens"]
        assert line["logp_drift"] < 1e-4 and "agent" in line["phases"]
        assert line["left_out_answers"] == line["left_out_tokens"] == line["strayed"] == 0
    assert weights(place.folder / "out")
    rows = rows_of(place.folder / "out", 0)
    for ids, mask, logp, drawn in zip(
        *(rows.column(c).to_pylist() for c in ("response", "mask", "response_logp", "drawn")), strict=True
    ):
        assert np.array(ids)[np.array(mask)].tolist() == (json.loads(drawn) if isinstance(drawn, str) else drawn)
        assert np.isnan(np.array(logp)).tolist() == [not m for m in mask]
        assert mask[0] is False and mask[-1] is True


def test_a_run_trains_on_several_conversations_of_a_row(place):
    """Through docks, ranks and the recording: what the trainer scores in each is what was drawn there."""
    chat.model(place.folder / "talker", QWEN, parts=2)
    (place.folder / "questions.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in "abcd"))
    body = AGENT.replace("    messages, drawn, letters = [", "    drawn, letters = [], 0\n    messages = [", 1)
    body = body.replace("}], [], 0\n", "}]\n").replace(
        "for turn in range(2):\n", "for turn in range(2):\n            messages = messages[:1]\n"
    )
    (place.folder / "talks.py").write_text(body)
    text = (
        PROGRAM.format(layout="dp = 2")
        .replace("samples = 4,", "samples = 4, conversations = 2,")
        .replace("<= 300", "<= 900")
    )
    (place.folder / "p.rlg").write_text(text)
    code, _, err = place.run("p.rlg", "--out", "out", "--record")
    assert code == 0, err
    place.assert_clean()
    for line in (x for x in metrics(place.folder / "out") if "iteration" in x):
        assert line["conversations"] == 32 and line["left_out_answers"] == 0
        assert line["logp_drift"] < 1e-4 and line["updates"] == 1
    rows = rows_of(place.folder / "out", 0)
    for ids, mask, drawn, begins in zip(
        *(rows.column(c).to_pylist() for c in ("response", "mask", "drawn", "response_begins")), strict=True
    ):
        assert np.array(ids)[np.array(mask)].tolist() == (json.loads(drawn) if isinstance(drawn, str) else drawn)
        assert begins[0] and sum(begins) == 2
