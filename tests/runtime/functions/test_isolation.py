"""What a user's code is given belongs to that call alone: what it changes reaches no other row, function or iteration,
so that results do not depend on where rows are computed."""

import json

import numpy as np
import pytest
from function_calls import results
from stage import PROMPTS, one_rank, share
from weighers import weigher

from msrl_graph.runtime.data.columns import ColumnData, ragged, texts
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.functions.environments import EnvironmentClass
from msrl_graph.runtime.process.task import Task

GROUP = 2
TASKS = [{"steps": 0, "seen": [], "goal": {"at": [i, 2]}} for i in range(4)]
OURS = """
import json

class Game:
    def reset(self, answer, prompt):
        self.task, self.prompt = answer, prompt
        prompt[0] += 100
        return self.told()

    def told(self):
        self.task["steps"] += 1
        self.task["seen"].append(len(self.task["seen"]))
        self.task["goal"]["at"].reverse()
        self.prompt[-1] += 1
        return json.dumps([self.task, str(self.prompt)])

    def step(self, text):
        return self.told(), float(self.task["steps"]), self.task["steps"] == 3
"""
GYM = (
    OURS.replace("reset(self, answer, prompt)", "reset(self, *, seed=None, options=None)")
    .replace("= answer, prompt", "= options['answer'], [*options['prompt']]")
    .replace("prompt[0] += 100", "options['more'] = 1")
    .replace("return self.told()", "return self.told(), {}", 1)
    .replace("self.prompt[-1] += 1", "self.prompt[-1] += '1'")
    .replace('self.task["steps"] == 3', 'self.task["steps"] == 3, False, {}')
)


def planned(path, on_failure):
    (path.parent / "own.py").write_text("def own(response): ...")
    return one_rank(
        ("answer    : text", "answer    : json"),
        ("response  : i32[<= 5]", "response  : i32[<= 24]\n mask : bool[response]"),
        ("  evaluate held_out { every = 40, report = reward", "  # evaluate { report = reward"),
        (
            "node actor.generate(prompt) -> response {",
            "node actor.generate(prompt, answer) -> response, mask, reward {"
            f'environment = "{path}:Game", on_failure = {on_failure},',
        ),
        ("  node host.reward(response, answer) -> reward { call = exact_match() }\n", ""),
        ("host.reward\n  host.reward ->", "host.advantage\n  actor.generate ->"),
        ("host.advantage(response, reward)", "host.advantage(response)"),
        ("call = group_norm(), per = prompt", f'call = "{path.parent}/own.py:own"'),
        ("node actor.update(prompt, response,", "node actor.update(prompt, response, mask,"),
    )


def episodes(plan, prompts):
    """What is said in two turns of all responses to some prompts, and their rewards."""
    environment = EnvironmentClass(plan.graph.node("actor.generate"), plan)
    environment.start()
    columns = {
        "prompt": ragged([PROMPTS[i] for i in prompts], np.int32),
        "answer": texts([json.dumps(TASKS[i]) for i in prompts]),
    }
    units = np.array(prompts)
    batch = Batch(share(units, len(units), len(units), {}), units, columns)
    rows = (units[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    played = environment.begin(batch, rows, Task("train", 3, 4))
    going = np.arange(len(rows))
    said = [played.reset(), *(played.step(going, ["x"] * len(rows), turn) for turn in (1, 2))]
    stay = played.end({"response": np.full(len(rows), 8)})
    assert stay.all() and [over for _, over in said[-1]] == [True] * len(rows)
    rewards = played.columns()["reward"].values
    return {int(row): ([turn[i][0] for turn in said], rewards[i]) for i, row in enumerate(rows)}


@pytest.mark.parametrize("source", [OURS, GYM], ids=["ours", "gymnasium"])
def test_an_episode_is_the_same_wherever_it_runs(source, tmp_path):
    path = tmp_path / "game.py"
    path.write_text(source)
    found = {}
    for on_failure in ("stop", "drop_row", "drop_group"):
        plan = planned(path, on_failure)
        found[on_failure, "dp = 1"] = episodes(plan, [0, 1, 2, 3])
        found[on_failure, "dp = 2"] = episodes(plan, [0, 2]) | episodes(plan, [1, 3])
    first = found["stop", "dp = 1"]
    expected = [
        {"steps": n, "seen": list(range(n)), "goal": {"at": [3, 2] if n % 2 == 0 else [2, 3]}} for n in (1, 2, 3)
    ]
    for row in (6, 7):  # the responses to the last prompt
        told = [json.loads(text) for text in first[row][0]]
        assert [task for task, _ in told] == expected and first[row][1] == (5.0 if source is GYM else 3.0)
    for where, episodes_there in found.items():
        assert episodes_there == first, where


@pytest.mark.parametrize("writable", [True, False], ids=["fetched", "mapped"])
@pytest.mark.parametrize("per", ["row", "prompt", "batch"])
def test_what_a_function_changes_is_its_own(per, writable, tmp_path):
    """It may, also where rows are mapped from memory that nobody may write to, and no later function sees it."""
    body = {
        "row": "def f(response, score):\n    response[:1] = 7\n    return float(score)\n",
        "prompt": "def f(response, score):\n    response[0][:1] = 7\n    score += 1\n    return score - 1\n",
        "batch": "def f(response, score):\n    response[0][:1] = 7\n    score += 1\n    return score - 1\n",
    }[per]
    ids = np.array([97, 98, 99, 100, 101, 102], np.int32)
    scores = np.array([1, 2, 3, 4], np.float32)
    ids.setflags(write=writable)
    scores.setflags(write=writable)
    columns = {"response": ColumnData(ids, np.array([0, 2, 3, 3, 6])), "score": ColumnData(scores)}
    made = results(tmp_path, body, ("reward",), per, given=columns)
    assert made.columns["reward"].column.values.tolist() == [1, 2, 3, 4]
    assert ids.tolist() == [97, 98, 99, 100, 101, 102] and scores.tolist() == [1, 2, 3, 4]


def test_what_weights_change_is_forgotten_by_the_next_iteration(tmp_path):
    source = """
def hard(difficulty, prompt, answer, success):
    assert answer.pop() == "10" and success[0] == 0.5
    difficulty += 1
    prompt[0][0] += 1
    success[0] = 9
    return difficulty * prompt[0][0]
"""
    state = "state success : f32 per prompt = 0.5"
    drawn = weigher(tmp_path, '"mine.py:hard"', source, state)
    tables = {"success": np.array([0.5, 1, 0])}
    tables["success"].setflags(write=False)
    first, second = (drawn(tables, Task("train", number, 2)).tolist() for number in (0, 1))
    assert first == second
