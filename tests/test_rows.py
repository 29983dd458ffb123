"""Rows that were trained on: what a file of them holds, and that a run takes them in place of generated ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from place import SMALL, TRAINED, metrics
from pyarrow import parquet
from stage import EXAMPLE, PROMPTS, Stage, one_rank
from tokenizers import Tokenizer

from msrl_graph.cli import run_main
from msrl_graph.runtime import rows
from msrl_graph.runtime.columns import Column, ragged, texts
from msrl_graph.runtime.readers import Task
from msrl_graph.runtime.report import RunError

TOKENIZER = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
RESPONSES = [np.arange(3, 3 + n) for n in (1, 4, 2, 5, 1, 1, 3, 2)]


TEXT = ("prompt    : i32[<= 6]", "prompt    : text")


def written(folder, iteration=0, responses=RESPONSES, changes=()):
    """A file of four prompts with two responses each."""
    plan = one_rank(*changes)
    logp = ragged([np.full(len(r), -len(r) / 8) for r in responses], np.float32)
    prompts, all_rows = np.arange(4), np.arange(8)
    columns = {
        "prompt": texts([TOKENIZER.decode(p.tolist()) for p in PROMPTS]) if changes else ragged(PROMPTS, np.int32),
        "answer": texts(["21", "ä", "", "1"]),
        "response": ragged(responses, np.int32),
        "reward": Column(np.arange(8, dtype=np.float32) / 2),
        "response.logp": logp,
    }
    path = rows.file(folder, iteration)
    numbered = {name: (prompts if len(column) == 4 else all_rows, column) for name, column in columns.items()}
    rows.write(path, plan, numbered, Task("train", iteration, 4))
    return path


def replayed(folder, numbers, prompts=None, iteration=0, changes=()):
    plan = one_rank(*changes)
    node = plan.graph.node("actor.generate")
    prompts = [PROMPTS[n // 2] for n in numbers[::2]] if prompts is None else prompts
    return rows.Recording(plan, folder).responses(node, ("response", "response.logp"), iteration, prompts, np.array(numbers), 2)


def test_a_file_holds_every_column_by_response(tmp_path):
    path = written(tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["000000.parquet"]
    table = parquet.read_table(path).to_pydict()
    own = ["row", "prompt_row", "prompt", "answer", "response", "reward", "response_logp", "prompt_text", "response_text"]
    assert list(table) == own
    assert table["row"] == list(range(8)) and table["prompt_row"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table["prompt"][4:6] == [PROMPTS[2].tolist()] * 2 and table["answer"] == ["21", "21", "ä", "ä", "", "", "1", "1"]
    assert table["response"] == [r.tolist() for r in RESPONSES] and table["reward"][3] == 1.5
    assert table["response_logp"][1] == [-0.5] * 4
    assert table["response_text"] == [TOKENIZER.decode(r.tolist(), skip_special_tokens=False) for r in RESPONSES]
    assert table["prompt_text"][2] == TOKENIZER.decode(PROMPTS[1].tolist(), skip_special_tokens=False)


def test_an_iteration_of_which_no_prompt_was_left(tmp_path):
    path = rows.file(tmp_path, 0)
    rows.write(path, one_rank(), {"prompt": (np.arange(4), ragged(PROMPTS, np.int32))}, Task("train", 0, 4))
    table = parquet.read_table(path)
    assert table.num_rows == 0 and {"row", "prompt_row", "prompt", "prompt_text"} == {*table.column_names}


def test_a_prompt_of_text_is_compared_by_its_tokens(tmp_path):
    written(tmp_path, changes=[TEXT])
    tokens, _ = replayed(tmp_path, [6, 7, 2, 3], changes=[TEXT])
    assert [t.tolist() for t in tokens] == [RESPONSES[r].tolist() for r in (6, 7, 2, 3)]
    with pytest.raises(RunError, match="is a response to another prompt"):
        replayed(tmp_path, [2, 3], [PROMPTS[0]], changes=[TEXT])


@pytest.mark.usefixtures("alone")
def test_a_later_generation_is_not_taken_from_a_recording(tmp_path):
    node = "  node judge.generate(prompt, response) -> verdict { samples = 1 }\n  actor.generate -> judge.generate\n"
    changes = [
        ("    reward    : f32\n", "    reward    : f32\n    verdict   : i32[<= 4]\n"),
        ("  worker host ", "  worker judge     : policy frozen\n  worker host "),
        ("  source -> actor.generate\n", f"{node}  source -> actor.generate\n"),
    ]
    stage = Stage(one_rank(*changes))
    written(tmp_path, 3)
    columns = {"prompt": ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2)), "response": ragged(RESPONSES, np.int32)}
    drawn = stage.act("judge.generate", columns)["verdict"].values
    stage.replay(str(tmp_path))
    assert np.array_equal(stage.act("judge.generate", columns)["verdict"].values, drawn)
    replayed = stage.act("actor.generate", {"prompt": ragged(PROMPTS, np.int32)})["response"]
    assert [replayed[i].tolist() for i in range(8)] == [r.tolist() for r in RESPONSES]


def test_responses_come_back_by_number_whatever_the_order_of_the_file(tmp_path):
    path = written(tmp_path)
    table = parquet.read_table(path)
    parquet.write_table(table.take(np.random.default_rng(0).permutation(8)), path, row_group_size=3)
    tokens, logps = replayed(tmp_path, [6, 7, 2, 3])
    assert [t.tolist() for t in tokens] == [RESPONSES[r].tolist() for r in (6, 7, 2, 3)]
    assert [x.tolist() for x in logps] == [[-len(t) / 8] * len(t) for t in tokens]
    assert tokens[0].dtype == np.int32 and logps[0].dtype == np.float32


def test_what_a_recording_does_not_hold(tmp_path):
    path = written(tmp_path)
    with pytest.raises(RunError, match=r"000000.parquet holds no row 8, which `actor.generate` \(line 23 of grpo.rlg\) is to take from it"):
        replayed(tmp_path, [6, 7, 8, 9], [PROMPTS[3], PROMPTS[0]])
    with pytest.raises(RunError, match=r"^row 2 of .*000000.parquet is a response to another prompt than this run's"):
        replayed(tmp_path, [0, 1, 2, 3], [PROMPTS[0], PROMPTS[2]])
    with pytest.raises(RunError, match=r"000001.parquet cannot be read"):
        replayed(tmp_path, [0, 1], iteration=1)
    parquet.write_table(parquet.read_table(path).drop_columns("response"), path)
    with pytest.raises(RunError, match=r"has no column `response`: it is the recording of another program"):
        replayed(tmp_path, [0, 1])
    path.write_text("PAR1, it says")
    with pytest.raises(RunError, match=r"000000.parquet cannot be read"):
        replayed(tmp_path, [0, 1])


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("nowhere", "there is no recording in nowhere: it has no folder `rows`"),
        ("there", "the recording in there has no iteration 1: there is no file there/rows/000001.parquet"),
    ],
)
def test_a_recording_that_is_not_there_is_told_before_anything_starts(tmp_path, monkeypatch, capsys, folder, told):
    (tmp_path / "there").mkdir()
    written(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    assert run_main([str(EXAMPLE / "grpo.rlg"), "--iterations", "2", "--out", "results", "--replay", folder]) == 1
    assert f"error[missing-file]: {told}" in capsys.readouterr().err and not Path("results").exists()


def test_a_column_that_has_the_name_of_one_of_the_recordings(tmp_path, monkeypatch, capsys):
    for item in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / item).symlink_to(EXAMPLE / item)
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLE / "grpo.rlg").read_text().replace("answer", "prompt_text").replace('"prompt_text"', '"answer"')
    Path("p.rlg").write_text(text.replace("exact_match()", "exact_match(answer = prompt_text)"))
    assert run_main(["p.rlg", "--record", "--dry-run"]) == 1
    err = capsys.readouterr().err
    assert "error[bad-value]: `prompt_text` is the name of a column that every recording has" in err and "--> p.rlg:9:" in err, err


@pytest.mark.slow
def test_a_run_is_recorded_and_replayed_elsewhere(place, reference):
    lines = [x for x in metrics(reference) if "iteration" in x]
    assert sorted(p.name for p in (reference / "rows").iterdir()) == ["000000.parquet", "000001.parquet", "000002.parquet"]
    source = {json.loads(x)["prompt"]: json.loads(x)["answer"] for x in (EXAMPLE / "train.jsonl").read_text().splitlines()}
    for line in lines:
        table = parquet.read_table(rows.file(reference, line["iteration"])).to_pydict()
        assert table["row"] == list(range(32)) and set(table) >= {"old_logp", "ref_logp", "advantage", "response_logp"}
        assert sum(map(len, table["response"])) == line["response_tokens"]
        assert np.mean(table["reward"]) == pytest.approx(line["reward"])
        for prompt, answer, response, reward in zip(*(table[c] for c in ("prompt_text", "answer", "response_text", "reward")), strict=True):
            assert source[prompt] == answer and reward == float(response.removesuffix("<eos>") == answer)
        drift = [abs(a - b) for c, d in zip(table["old_logp"], table["response_logp"], strict=True) for a, b in zip(c, d, strict=True)]
        assert np.mean(drift) == pytest.approx(line["logp_drift"], rel=1e-3)
    # On two pools with three warehouses, in two parts, recorded again.
    pools = ("layout actor.update   { dp = 2, zero = 3 }", "apart actor.generate, actor.update\n  dock { replicas = 3 }")
    small = ("layout actor.generate { tp = 2 }", "engine actor.update = fsdp { micro_batch = 5 }")
    place.write(pools, small, *TRAINED, ("seed = 0", "seed = 0, save = 2"))
    for arguments in (["--iterations", "2", "--out", "two"], ["--iterations", "3", "--resume", "two"]):
        code, _, err = place.run("p.rlg", *SMALL, *arguments, "--record", "--replay", str(reference))
        assert code == 0, err
    second = place.folder / "two"
    for a, b in zip(lines, [x for x in metrics(second) if "iteration" in x], strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl", "rows"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
        one, two = (parquet.read_table(rows.file(folder, a["iteration"])) for folder in (reference, second))
        assert one.schema == two.schema
        for name in ("row", "prompt", "response", "response_logp", "reward", "response_text"):
            assert one[name].equals(two[name]), name
    # Another run's: the first row that answers another prompt ends it.
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--seed", "1", "--out", "other", "--replay", str(reference))
    assert code == 3 and "rows/000000.parquet is a response to another prompt than this run's" in err and "Traceback" not in err, err
    place.assert_clean()
