"""A program whose policy plays in a shop, from text to trained weights."""

import json
import re
import shutil

import chat
import numpy as np
import pytest
from place import EXAMPLE, ROOT, metrics, rows_of
from templates import QWEN

from msrl_graph.runtime.data.tokens import Tokens

pytestmark = pytest.mark.slow

PROGRAM = """
import "{agent}"
cluster laptop {{ device = "cpu", nodes = 1, devices_per_node = 2 }}
deploy agent on laptop {{
  set prompts = 4
  set group = 4
  set turns = 3
  set prompt_len = 8
  set response_len = 100
  model policy = "./longer"
  data source = "tasks.jsonl"
  data held = "tasks.jsonl"
  layout actor.update {{ dp = 2 }}
  layout actor.generate {{ {layout} }}
  evaluate held {{ report = reward, samples = 1, temperature = 0 }}
  run {{ iterations = 2, seed = 0 }}
}}
"""


def tokens(rows):
    return [np.array(row) for row in rows.column("response").to_pylist()]


@pytest.fixture
def shop(place):
    """A place with six tasks and a model for them."""
    sums = [(a, b) for a in (12, 37, 58) for b in (9, 23)]
    rows = [{"prompt": f"{a}+{b}=", "task": {"thing": str((a + b) % 10)}} for a, b in sums]
    (place.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    longer = shutil.copytree(EXAMPLE / "model", place.folder / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return place


def test_a_policy_in_a_shop(shop):
    """On two ranks that share their rows, and on two that share the model: the same episodes, and what was said in them
    is masked."""
    found = []
    place = shop
    for layout in ("tp = 2", "dp = 2"):
        (place.folder / "p.rlg").write_text(
            PROGRAM.format(agent=ROOT / "tests" / "programs" / "agent.rlg", layout=layout)
        )
        code, _, err = place.run("p.rlg", "--out", layout[:2], "--record")
        assert code == 0, err
        place.assert_clean()
        lines = [x for x in metrics(place.folder / layout[:2]) if "iteration" in x]
        found.append(rows_of(place.folder / layout[:2], 0))
        for line in lines:
            assert 1 <= line["turns"] <= 3 and 0 <= line["reward"] <= 1 and line["updates"] == 1
            assert line["policy_tokens"] + line["environment_tokens"] == line["response_tokens"]
            assert line["logp_drift"] < 1e-4 and "environment" in line["phases"]
    one, other = found
    assert [t.tolist() for t in tokens(one)] == [t.tolist() for t in tokens(other)]
    for ids, mask, logp, reward in zip(
        *(one.column(c).to_pylist() for c in ("response", "mask", "response_logp", "reward")), strict=True
    ):
        assert np.isnan(np.array(logp)).tolist() == [not m for m in mask]
        assert set(np.array(ids)[~np.array(mask)]) == {2}  # the words of the shop are unknown to the model
        assert mask[0] is False and mask[-1] is True
        assert reward in (0.0, 1.0)
    assert set(one.column("reward").to_pylist()) == {0.0, 1.0}


FRAGILE = """
import os
class Shop:
    def reset(self, task):
        self.thing = task["thing"]

    def step(self, text):
        if self.thing == "1":  # that of 12 + 9 and of 58 + 23
            os._exit(5)
        return None, float(len(text) % 2), True
"""


def test_rows_that_fail_leave_a_run_and_its_evaluation_and_are_told(shop):
    (shop.folder / "fragile.py").write_text(FRAGILE)
    text = PROGRAM.format(agent=ROOT / "tests" / "programs" / "agent.rlg", layout="dp = 2")
    change = """
algorithm fragile extends agent {
  node actor.generate(prompt, task) -> response, mask, reward {
    samples = group, environment = "fragile.py:Shop", on_failure = drop_group
  }
}
cluster laptop"""
    text = (
        text.replace("\ncluster laptop", change)
        .replace("deploy agent", "deploy fragile")
        .replace("set turns = 3\n", "")
    )
    (shop.folder / "p.rlg").write_text(text)
    code, out, err = shop.run("p.rlg", "--out", "out", "--record")
    assert code == 0, err
    shop.assert_clean()
    lines = metrics(shop.folder / "out")
    sums = {"12+9=", "58+23="}
    for line in (x for x in lines if "iteration" in x):
        table = rows_of(shop.folder / "out", line["iteration"])
        prompts, rewards = (table.column(name).to_pylist() for name in ("prompt_text", "reward"))
        gone = [prompt in sums for prompt in prompts]
        assert [reward is None for reward in rewards] == gone
        assert table.column("actor_generate_times").to_pylist() == [int(not g) for g in gone]
        assert line.get("failed/exited", 0) == line["failed"] == sum(gone) == 16 - line["rows"]
        assert line["kept/actor.generate"] == 1 - sum(gone) / 16
        assert line["reward"] == np.mean([reward for reward in rewards if reward is not None])
    told = [x for x in lines if "evaluation" in x]
    assert len(told) == 2 and all(x["failed"] == x["failed/exited"] == 2 for x in told)  # of six prompts
    said = out + err
    assert "2 of 6 rows failed in the evaluation of held after 0 iterations (2 exited); its means are those of " in said
    assert "turn 1: it ended its process with status 5" in said


@pytest.mark.long
def test_a_run_of_which_all_rows_fail_ends_with_the_reasons(shop):
    (shop.folder / "fragile.py").write_text(FRAGILE.replace('== "1"', '!= "x"'))
    text = PROGRAM.format(agent=ROOT / "tests" / "programs" / "agent.rlg", layout="dp = 2")
    attributes = 'environment = "shop.py:Shop", turns = turns, timeout = 5 min'
    agent = (ROOT / "tests" / "programs" / "agent.rlg").read_text()
    assert attributes in agent
    agent = agent.replace(attributes, 'environment = "fragile.py:Shop", turns = turns, on_failure = drop_group')
    (shop.folder / "agent.rlg").write_text(agent)
    text = text.replace(str(ROOT / "tests" / "programs" / "agent.rlg"), "agent.rlg")
    (shop.folder / "p.rlg").write_text(text.replace("  evaluate held", "  # evaluate held"))
    code, _, err = shop.run("p.rlg", "--out", "out")
    assert code == 3
    shop.assert_clean()
    assert "16 of 16 rows failed in iteration 0 (16 exited); nothing is left to train on" in err
    assert "turn 1: it ended its process with status 5" in err


JUDGE = """
import os

def judged(response: list[str], answer: list[str]):
    if answer[0] == "21":
        raise ConnectionError("the judge does not answer")
    if answer[0] == "35":
        os._exit(3)
    return [float(len(r) % 2) for r in response]
"""
JUDGED = """
import grpo
algorithm judged extends grpo {
  node host.reward(response, answer) -> reward { call = "judge.py:judged", per = prompt, on_failure = leave }
}
cluster laptop { device = "cpu", nodes = 1, devices_per_node = 1 }
deploy judged on laptop {
  set prompts = 4
  set group = 4
  set prompt_len = 6
  set response_len = 5
  model policy = "./model"
  data source = "sums.jsonl"
  data held = "sums.jsonl"
  evaluate held { report = reward, samples = 2 }
  run { iterations = 1, seed = 0 }
}
"""


@pytest.mark.long
def test_a_reward_that_fails_takes_its_group_along_even_where_it_ends_its_process(place):
    sums = [(12, 9), (12, 23), (37, 9), (58, 23)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (place.folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place.folder / "judge.py").write_text(JUDGE)
    (place.folder / "p.rlg").write_text(JUDGED)
    code, out, err = place.run("p.rlg", "--out", "out")
    assert code == 0, err
    place.assert_clean()
    (line,) = (x for x in metrics(place.folder / "out") if "iteration" in x)
    assert line["rows"] == 8 and line["kept/host.reward"] == 0.5
    assert line["host.reward/failed/raised"] == line["host.reward/failed/exited"] == 4
    said = out + err
    assert "`host.reward` (line 4 of p.rlg): 8 of 16 rows failed in iteration 0 (4 exited, 4 raised); 8 left it" in said
    assert "ProcessDied: it ended its process with status 3" in said
    assert "ConnectionError: the judge does not answer" in said
    told = [x for x in metrics(place.folder / "out") if "evaluation" in x]
    assert all(x["host.reward/failed"] == 4 and x["reward"] is not None for x in told)


CHAT = """
algorithm guesses {{
  param prompts = 4
  param group = 4
  {body}
  worker actor : policy
  worker host : function
  source -> actor.generate -> actor.infer, host.advantage
  actor.infer, host.advantage -> actor.update
  actor.update => actor.generate
}}
cluster laptop {{ device = "cpu", devices_per_node = 1 }}
deploy guesses on laptop {{
  model policy = "{model}"
  data source = "talks.jsonl"
  run {{ iterations = 2, seed = 0, warn_truncated = 0.05 }}
}}
"""


def test_the_environment_of_messages_of_the_docs(place):
    """Its conversations are what the template writes, and what is cut at the bound is told: a response whose last
    answer ends with neither an end token nor a stop string, whatever stands in it before."""
    page = (ROOT / "docs" / "guides" / "environments.md").read_text()
    text = page.partition("## Environments that speak in messages")[2]
    code, program = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "rlg"))
    (place.folder / "guess.py").write_text(code)
    model = chat.model(place.folder / "talks", QWEN)
    bound = 120
    made = program.replace("4096", str(bound)).replace("turns = 4", 'turns = 3, stop = "e"')
    (place.folder / "p.rlg").write_text(CHAT.format(body=made, model=model))
    rows = [
        {"messages": [{"role": "user", "content": f"what is {n}"}], "answer": n}
        for n in ("one", "two", "three", "four")
    ]
    (place.folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, err = place.run("p.rlg", "--out", "out", "--record")
    assert status == 0, err
    place.assert_clean()
    tokens = Tokens(str(model))
    again = "<|start|>user\nThat is not it. Try again.<|stop|>\n<|start|>assistant\n"
    told = 0
    for line in (x for x in metrics(place.folder / "out") if "iteration" in x):
        table = rows_of(place.folder / "out", line["iteration"])
        cut = 0
        for ids, mask in zip(*(table.column(c).to_pylist() for c in ("response", "mask")), strict=True):
            asked = np.flatnonzero(~np.array(mask))
            others = tokens.decode([np.array(ids)[asked]], special=True)[0]
            assert others.startswith("<|start|>user\nwhat is ") and mask[-1]
            assert others.partition("assistant\n")[2].replace("<|stop|>", "").replace("\n", "") in (
                again.replace("<|stop|>", "").replace("\n", "") * turns for turns in range(3)
            )
            own = tokens.decode([np.array(ids)[asked[-1] + 1 :]], special=True)[0]
            cut += len(ids) == bound and ids[-1] not in tokens.ends and "e" not in own
        assert line["response_truncated"] == cut / 16
        assert line["logp_drift"] < 1e-4 and 1 <= line["turns"] <= 3
        warning = f"{cut / 16:.0%} of the responses were cut at their bound"
        told += cut / 16 > 0.05 and warning in out + err
    assert told, "no case"
