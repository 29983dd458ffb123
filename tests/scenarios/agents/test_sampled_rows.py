"""Agents: what is drawn for programs that ask by themselves, on whichever rank and in whichever batch; what the trainer
makes of it; and what goes wrong."""

import json
import time
from pathlib import Path

import chat
import numpy as np
import pytest
import ranks
import torch
from agent_stages import ANSWERS, PROGRAM, QUESTIONS
from folders import ROOT
from stage import Stage
from templates import QWEN

from msrl_graph import compile
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.data.columns import ColumnData, ragged, texts
from msrl_graph.runtime.data.row_files import check
from msrl_graph.runtime.data.tokens import Tokens
from msrl_graph.runtime.process.task_report import ProcessLost, RunError

CALCULATOR = ROOT / "examples" / "calculator"
ASKS = """
import json
import time
from urllib.request import Request, urlopen

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ask(base_url, api_key, path="chat/completions", **body):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    data = json.dumps({"model": "policy", **body}).encode()
    with urlopen(Request(f"{base_url}/{path}", data, head)) as found:
        return json.load(found)["choices"][0]


"""
TALKS = """
def solve(question, answer: str, base_url, api_key, model, rng):
    messages, seen = [{"role": "user", "content": question}], 0
    for turn in range(2 + int(answer) % 2):
        said = ask(base_url, api_key, messages=messages, tools=[TOOL], max_tokens=5)
        messages += [said["message"], {"role": "user", "content": f"more {turn} {int(rng.integers(100))}"}]
        seen += len(said["message"]["content"])
    return float(seen), question
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return chat.model(tmp_path_factory.mktemp("talk") / "model", QWEN, parts=2)


def program(folder, model, body=TALKS, more="", layout="dp = 1", devices=1, changes=()):
    path = folder / "talks.py"
    path.write_text(ASKS + body)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(QUESTIONS, ANSWERS, strict=True))
    )
    text = PROGRAM.format(path=path, model=model, more=more, layout=layout, devices=devices)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return compile(folder / "talk.rlg", text=text)


def drawn(stage, rows=(0, 1, 2, 3)):
    """What the generation writes of some questions."""
    columns = {"question": texts([QUESTIONS[i] for i in rows]), "answer": texts([ANSWERS[i] for i in rows])}
    return stage.act("actor.generate", columns, np.array(rows))


def places(rows):
    return np.array([r * 2 + i for r in sorted(rows) for i in range(2)])


def test_the_trainer_scores_what_the_generator_drew_from_what_it_drew_it(alone, tmp_path, model):
    """A whole conversation is the response, with nothing before it; each token that the policy drew has in the trainer
    the log-probability that it was drawn with."""
    stage = Stage(program(tmp_path, model))
    written = drawn(stage)
    mask = written["mask"].values
    logp = written["response.logp"].values
    assert np.array_equal(np.isnan(logp), ~mask)
    text = Tokens(str(model)).decode([written["response"][0]], special=True)[0]
    assert text.startswith("<|start|>system\nbe kind\n<tools>") and "<|start|>user\nmore 0" in text
    assert [written["said"].text(i) for i in range(8)] == [q for q in QUESTIONS for _ in range(2)]
    infer = stage.act("actor.infer", written)
    assert np.allclose(infer["old_logp"].values[mask], logp[mask], atol=1e-4)
    assert stage.told.sums["logp_drift"][1] == mask.sum()
    ones = ColumnData(np.ones(len(mask), np.float32), written["mask"].offsets)
    before = stage.whole()
    stage.act("actor.update", {**written, **infer, "advantage": ones})
    assert stage.told.sums["updates"] == (1, 0)
    assert not all(map(torch.equal, before[0], stage.whole()[0]))
    sums = stage.told.sums
    assert sums["turns"] == (2 * (3 + 2 + 3 + 2), 8)
    assert sums["policy_tokens"][0] == mask.sum() and sums["environment_tokens"][0] == (~mask).sum()
    assert sums["reward"] == (written["reward"].values.sum(), 8)
    assert {sums[name][0] for name in ("left_out_answers", "left_out_tokens", "strayed")} == {0}


def test_neither_the_batch_nor_its_cut_changes_a_conversation(alone, tmp_path, model):
    plan = program(tmp_path, model)
    whole = drawn(Stage(plan))
    for rows, micro in (((2, 1), 0), ((0, 1, 2, 3), 1)):
        stage = Stage(plan)
        stage.generator.micro_batch = micro
        part = drawn(stage, rows)
        for name in ("response", "mask", "said"):
            assert np.array_equal(part[name].values, whole[name].take(places(rows)).values), name
        assert np.array_equal(part["reward"].values, whole["reward"].values[places(rows)])


def on_ranks(rank, folder, path, model, layout, files):
    stage = Stage(program(Path(files) / str(rank), model, layout=layout, devices=2), rank)
    rows = (0, 1, 2, 3) if "tp" in layout else ((0, 3), (1, 2))[rank]
    first = stage.context.is_group_leader(stage.plan.graph.node("actor.generate"))
    torch.save((rows, drawn(stage, rows), first), Path(files) / f"{layout[:2]}-{rank}")


@pytest.mark.parametrize("layout", ["tp = 2", "dp = 2"])
def test_ranks_write_what_one_does(layout, alone, tmp_path, model):
    for folder in ("whole", "0", "1"):
        (tmp_path / folder).mkdir()
    whole = drawn(Stage(program(tmp_path / "whole", model)))
    ranks.run(2, on_ranks, "", str(model), layout, str(tmp_path))
    for rank in range(2):
        rows, written, first = torch.load(tmp_path / f"{layout[:2]}-{rank}", weights_only=False)
        assert first == (rank == 0 or "dp" in layout)
        assert written.keys() == whole.keys() - (set() if first else {"reward", "said"})
        for name in written.keys() - {"response.logp"}:
            assert np.array_equal(written[name].values, whole[name].take(places(rows)).values), name


@pytest.mark.slow
def test_by_an_agent_the_calculator_draws_what_it_does_by_function(alone):
    """The same tokens, masks and rewards, through an agent framework, two turns with a tool."""
    rows = [json.loads(line) for line in (CALCULATOR / "train.jsonl").read_text().splitlines()[:32]]
    found = {}
    for name in ("calculator", "agent"):
        stage = Stage(compile(CALCULATOR / f"{name}.rlg", sets={"prompts": "32"}))
        prompts = Tokens(stage.plan.model("actor.generate").path).encode([r["prompt"] for r in rows])
        columns = {"prompt": ragged(prompts, np.int32), "answer": texts([r["answer"] for r in rows])}
        found[name] = stage.act("actor.generate", columns), stage.told.sums
    (one, said), (other, told) = found.values()
    for name in ("response", "mask", "reward"):
        assert np.array_equal(one[name].values, other[name].values), name
    assert np.allclose(one["response.logp"].values, other["response.logp"].values, atol=1e-4, equal_nan=True)
    assert all(told[name] == total for name, total in said.items())
    assert told["strayed"] == told["left_out_answers"] == (0, 0)
    assert told["environment_tokens"][0] > 0 and 0 < told["reward"][0] < 256


ALL_AT_ONCE = """
async def solve(question, base_url, api_key, model):
    import asyncio
    asked = dict(messages=[{"role": "user", "content": question}], max_tokens=4)
    one = asyncio.to_thread(ask, base_url, api_key, **asked, temperature=0.1)
    two = asyncio.to_thread(ask, base_url, api_key, path="completions", prompt="one plus", max_tokens=3)
    await asyncio.gather(one, two)
    await asyncio.to_thread(ask, base_url, api_key, **asked)
    return 1.0, ""
"""


def test_what_is_not_trained_on_is_counted_and_told(alone, tmp_path, model):
    stage = Stage(program(tmp_path, model, ALL_AT_ONCE.replace("question,", "question, answer,")))
    written = drawn(stage)
    sums = stage.told.sums
    assert sums["turns"] == (24, 8) and sums["left_out_answers"] == (16, 0)
    assert 16 <= sums["left_out_tokens"][0] <= 7 * 8
    assert written["mask"].values.sum() <= 32
    assert stage.told.remarks == [
        "agents of `actor.generate` set `temperature`, which is ignored: the program says how tokens are drawn"
    ]


SEVERAL = """
def solve(question, answer: str, base_url, api_key, model):
    first = ask(base_url, api_key, messages=[{"role": "user", "content": question}], max_tokens=4)["message"]
    asked = [{"role": "user", "content": question}, first, {"role": "user", "content": "more"}]
    for _ in range(2):  # the same again is a branch
        ask(base_url, api_key, messages=asked, max_tokens=3)
    judge = [{"role": "user", "content": "judge it: " + (first["content"] or "")}]
    for _ in range(int(answer) % 2):
        judge.append(ask(base_url, api_key, messages=judge, max_tokens=5)["message"])
        judge.append({"role": "user", "content": "sure"})
    ask(base_url, api_key, messages=judge, max_tokens=3)
    return 1.0, ""
"""


@pytest.mark.slow
def test_all_conversations_of_a_row_are_trained_on_each_by_itself(alone, tmp_path, model):
    """The trainer finds the log-probability of each token as it was drawn, so that none sees another conversation; an
    answer that two branches have in common counts once; what does not fit is left out, the earliest first."""
    sizes = {}
    for most in (1, 2, 3, 0):  # and then with less room than all take
        bound, most = (300, most) if most else (sizes[3, 300][3] - 1, 3)
        stage = Stage(
            program(tmp_path, model, SEVERAL, f"conversations = {most},", changes=[("<= 300", f"<= {bound}")])
        )
        written = drawn(stage)
        sums = stage.told.sums
        mask = written["mask"].values
        logp = written["response.logp"].values
        assert ("response.begins" in written) == (most > 1)
        assert np.array_equal(np.isnan(logp), ~mask)
        infer = stage.act("actor.infer", written)
        assert np.allclose(infer["old_logp"].values[mask], logp[mask], atol=1e-4)
        assert stage.told.sums["logp_drift"][1] == mask.sum() == sums["policy_tokens"][0]
        before = stage.whole()
        ones = ColumnData(np.ones(len(mask), np.float32), written["mask"].offsets)
        stage.act("actor.update", {**written, **infer, "advantage": ones})
        assert not all(map(torch.equal, before[0], stage.whole()[0]))
        asked = 4 + np.array([int(ANSWERS[i // 2]) % 2 for i in range(8)])
        kept = sums["turns"][0] - sums["left_out_answers"][0]
        assert sums["turns"] == (asked.sum(), 8)
        sizes[most, bound] = sums["conversations"][0], kept, int(mask.sum()), max(written["response"].lengths)
        if most > 1:
            begins = written["response.begins"].values
            assert sums["conversations"][0] == begins.sum() and begins[written["response"].offsets[:-1]].all()
    assert sizes[1, 300][0] == 8 and sizes[2, 300][0] == 16 and sizes[3, 300][0] == 24
    assert sizes[1, 300][1] == (asked - 3).sum() and sizes[2, 300][1] == (asked - 1).sum()
    assert sizes[3, 300][1] == asked.sum()
    assert 8 < sizes[3, bound][0] < 24 and sizes[3, bound][3] <= bound


EVERY = range(8)  # rows, of which any may be told of first


@pytest.mark.parametrize(
    ("body", "rows", "message"),
    [
        ("return 1.0, ''", EVERY, "BadResult: it got no answer from the policy, and a row needs one"),
        (
            "said = ask(base_url, api_key, messages=[{'role': 'user', 'content': question}], max_tokens=2)",
            EVERY,
            "BadResult: it returned None, where a tuple of 2 belongs: reward, said",
        ),
        (
            "ask(base_url, api_key, prompt='one', path='completions', max_tokens=2)\n    return float('nan'), ''",
            EVERY,
            "BadResult: it returned nan for `reward`",
        ),
        (
            "if answer == '181': raise SystemExit('no')\n"
            "    ask(base_url, api_key, prompt='one', path='completions', max_tokens=2)\n    return 1.0, ''",
            (4, 5),
            "RuntimeError: SystemExit('no'), at {path}:18",
        ),
        (
            "if answer == '4': time.sleep(600)\n"
            "    ask(base_url, api_key, prompt='one', path='completions', max_tokens=2)\n    return 1.0, ''",
            (2, 3),
            "TimeoutError: it took longer than its `timeout` of 4 s",
        ),
        ("import os; os._exit(3)", range(8), "ProcessExit: it ends its process with status 3, at {path}:18"),
        ("import os; os.kill(os.getpid(), 9)", (), "the process of its agents ended with signal SIGKILL"),
    ],
)
def test_what_goes_wrong_is_told_with_its_row(body, rows, message, alone, tmp_path, model):
    path = tmp_path / "talks.py"
    text = f"\ndef solve(question, answer: str, base_url, api_key, model):\n    {body}\n"
    stage = Stage(program(tmp_path, model, text, more=f"timeout = {4 if 'sleep' in body else 200} s,"))
    begin = time.monotonic()
    with pytest.raises(RunError) as told:
        drawn(stage)
    said = message.format(path=path)
    heads = [f"row {row} of iteration 3: {said}" for row in rows] or [said]
    assert any(head in str(told.value) for head in heads)
    assert str(told.value).startswith("`actor.generate` (line ")
    assert isinstance(told.value, ProcessLost) == ("SIGKILL" in message)  # by which the run is started anew
    assert time.monotonic() - begin < 200


FAILS = """
def solve(question, answer: str, base_url, api_key, model, iteration):
    said = ask(base_url, api_key, prompt="one", path="completions", max_tokens=2)
    if answer == "4" and said["text"] == said["text"] and not TRIED.setdefault(question, False):
        TRIED[question] = True
        raise ValueError("no more")
    return 1.0, ""


TRIED = {}
"""


@pytest.mark.parametrize(("on_failure", "lost"), [("drop_row", 1), ("drop_group", 2)])
def test_a_row_whose_agent_fails_leaves_alone_or_with_its_group(on_failure, lost, alone, tmp_path, model):
    per = ("call = group_norm(), per = question", 'call = "talks.py:whole"')
    text = FAILS + "\n\ndef whole(response, reward):\n    return response * 0.0\n"
    plan = program(tmp_path, model, text, f"on_failure = {on_failure},", changes=[per])
    stage = Stage(plan)
    written = drawn(stage)
    assert len(written["response"]) == len(written["reward"]) == 8 - lost
    sums = stage.told.sums
    assert sums["failed"][0] == sums["failed/raised"][0] == 1
    assert sums["kept/actor.generate"] == (8 - lost, 8)
    assert sums["turns"][1] == 8 - lost
    words = stage.told.failed["actor.generate"]["raised"]
    assert words.startswith(("row 2: ValueError: no more, at ", "row 3: ValueError: no more, at "))


def test_what_an_agent_asks_must_begin_with_what_the_model_reads(alone, tmp_path):
    text = (CALCULATOR / "agent.rlg").read_text().replace("agent.py:solve", f"{tmp_path}/other.py:solve")
    (tmp_path / "other.py").write_text(
        ASKS + "\ndef solve(prompt: str, answer, base_url, api_key, model):\n"
        "    ask(base_url, api_key, messages=[{'role': 'user', 'content': '1+' + prompt}])\n    return 1.0\n"
    )
    stage = Stage(compile(CALCULATOR / "other.rlg", text=text.replace("5 min", "1 min"), sets={"prompts": "32"}))
    prompts = Tokens(stage.plan.model("actor.generate").path).encode(["37+48+5-"] * 32)
    with pytest.raises(RunError, match=r"its requests begin with '1.37.48.5-', but the row's own prompt is '37.48.5-'"):
        stage.act("actor.generate", {"prompt": ragged(prompts, np.int32), "answer": texts(["90"] * 32)})


def test_conversations_are_not_taken_from_a_recording(tmp_path, model):
    with pytest.raises(Fault, match="does not contain what its agent does"):
        check(program(tmp_path, model), False, str(tmp_path), 0)
