"""Rows that were trained on: what a file of them holds, and that a run takes them in place of generated ones."""

import json
import shutil
from pathlib import Path

import generations
import numpy as np
import pyarrow as pa
import pytest
from light_engines import sampling
from place import SMALL, TRAINED, metrics, ran, rows_of
from pyarrow import compute, parquet
from stage import EXAMPLE, PROMPTS, Stage, one_rank
from tokenizers import Tokenizer

from msrl_graph import compile, noise
from msrl_graph.cli import run_main
from msrl_graph.runtime.data import row_files as rows
from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, ragged, texts
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.driver.run_folder import MADE
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report, RunError
from msrl_graph.runtime.rank.partial_rollout import PartialRollout
from msrl_graph.runtime.rank.rollout import Rollout

TOKENIZER = Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))
RESPONSES = [np.arange(3, 3 + n) for n in (1, 4, 2, 5, 1, 1, 3, 2)]


TEXT = ("prompt    : i32[<= 6]", "prompt    : text")


def written(folder, iteration=0, responses=RESPONSES, changes=()):
    """A file of four prompts with two responses each."""
    plan = one_rank(*changes)
    logp = ragged([np.full(len(r), -len(r) / 8) for r in responses], np.float32)
    prompts = np.arange(4)
    all_rows = np.arange(8)
    columns = {
        "prompt": texts([TOKENIZER.decode(p.tolist()) for p in PROMPTS])
        if TEXT in changes
        else ragged(PROMPTS, np.int32),
        "answer": texts(["21", "ä", "", "1"]),
        "response": ragged(responses, np.int32),
        "reward": ColumnData(np.arange(8, dtype=np.float32) / 2),
        "response.logp": logp,
    }
    if any(c.name == "response_logp" for c in plan.graph.columns):
        columns["response_logp"] = ragged([np.full(len(r), -9.0) for r in responses], np.float32)
    numbered = {name: ColumnRows(prompts if len(column) == 4 else all_rows, column) for name, column in columns.items()}
    rows.write(folder, plan, numbered, Task("train", iteration, 4))
    return at(folder, plan, iteration)


def at(folder, plan, iteration, column="response"):
    """The file of the rows that a column stands for."""
    return next(t for t in rows.tables(plan.graph) if t.column == column).file(folder, iteration)


def replayed(folder, numbers, prompts=None, iteration=0, changes=()):
    plan = one_rank(*changes)
    node = plan.graph.node("actor.generate")
    prompts = [PROMPTS[n // 2] for n in numbers[::2]] if prompts is None else prompts
    return rows.Recording(plan, folder).responses(
        node, ("response", "response.logp"), iteration, prompts, np.array(numbers), 2
    )


def test_a_file_holds_every_column_by_response(tmp_path):
    path = written(tmp_path)
    assert [p.name for p in path.parent.iterdir()] == ["000000.parquet"]
    table = parquet.read_table(path).to_pydict()
    own = [
        "row",
        "prompt_row",
        "prompt",
        "answer",
        "response",
        "reward",
        "response_logp",
        "prompt_text",
        "response_text",
    ]
    assert list(table) == own
    assert table["row"] == list(range(8)) and table["prompt_row"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table["prompt"][4:6] == [PROMPTS[2].tolist()] * 2 and table["answer"] == [
        "21",
        "21",
        "ä",
        "ä",
        "",
        "",
        "1",
        "1",
    ]
    assert table["response"] == [r.tolist() for r in RESPONSES] and table["reward"][3] == 1.5
    assert table["response_logp"][1] == [-0.5] * 4
    assert table["response_text"] == [TOKENIZER.decode(r.tolist(), skip_special_tokens=False) for r in RESPONSES]
    assert table["prompt_text"][2] == TOKENIZER.decode(PROMPTS[1].tolist(), skip_special_tokens=False)


def test_log_probabilities_that_an_infer_wrote_stand_beside_those_that_were_drawn(tmp_path):
    """Though the column has the name that those of the generator have else; they are what is taken again."""
    loss = (
        ("ref_logp, advantage) {", "response_logp, advantage) {"),
        ("kl(low_var)", "kl(low_var, ref_logp = response_logp)"),
    )
    changes = ("ref_logp  :", "response_logp :"), ("-> ref_logp", "-> response_logp"), *loss
    rows.check(one_rank(*changes), True, "", 0)
    table = parquet.read_table(written(tmp_path, changes=changes)).to_pydict()
    assert table["response_logp"][1] == [-9.0] * 4 and table["response_logp_drawn"][1] == [-0.5] * 4
    assert replayed(tmp_path, [0, 1], changes=changes)[1][1].tolist() == [-0.5] * 4


def test_an_iteration_of_which_no_prompt_was_left(tmp_path):
    plan = one_rank()
    rows.write(tmp_path, plan, {"prompt": ColumnRows(np.arange(4), ragged(PROMPTS, np.int32))}, Task("train", 0, 4))
    table = parquet.read_table(at(tmp_path, plan, 0))
    assert table.num_rows == 0 and {"row", "prompt_row", "prompt", "prompt_text"} == {*table.column_names}


def test_a_prompt_of_text_is_compared_by_its_tokens(tmp_path):
    written(tmp_path, changes=[TEXT])
    tokens, _ = replayed(tmp_path, [6, 7, 2, 3], changes=[TEXT])
    assert [t.tolist() for t in tokens] == [RESPONSES[r].tolist() for r in (6, 7, 2, 3)]
    with pytest.raises(RunError, match="is a response to another prompt"):
        replayed(tmp_path, [2, 3], [PROMPTS[0]], changes=[TEXT])


@pytest.fixture
def three(tmp_path):
    """The plan of a program of three generations."""
    for item in ("train.jsonl", "model"):
        (tmp_path / item).symlink_to(EXAMPLE / item)
    return compile(generations.program(tmp_path))


def test_of_several_generations_each_has_a_table_and_each_value_its_row(tmp_path, three):
    columns = generations.columns()
    levels = ("prompt", "problem", "solution", "attempt")
    rows.write(tmp_path, three, columns, Task("train", 0, 4))
    files = {str(p.relative_to(tmp_path / "rows")) for p in (tmp_path / "rows").rglob("*") if p.is_file()}
    assert files == {f"{level}/000000.parquet" for level in levels}
    tables = {level: rows_of(tmp_path, 0, level).to_pylist() for level in levels}
    assert {level: [r["row"] for r in table] for level, table in tables.items()} == {
        "prompt": [0, 1, 2, 3],
        "problem": [0, 1, 2, 3, 4, 5, 6, 7],
        "solution": [12, 13, 14, 15, 20, 21, 22, 23, 32 + 13, 32 + 21, 64 + 21],
        "attempt": [3, 5],
    }
    values = {
        name: dict(zip(piece.rows.tolist(), map(piece.column.__getitem__, range(len(piece.rows))), strict=True))
        for name, piece in columns.items()
    }
    own = {
        "prompt": ("prompt", "answer"),
        "problem": ("problem", "problem.logp", "baseline", "host.posed.times"),
        "solution": ("solution", "solution.logp", "right"),
        "attempt": ("attempt", "attempt.logp", "plain"),
    }
    for level, table in tables.items():
        above = [x for x in levels[:2] if x != level and level != "prompt"]
        ids = {"row", *(f"{x}_row" for x in above), *(["origin_row"] if level == "solution" else [])}
        named = {name.replace(".", "_") for x in (level, *above) for name in own[x]}
        texts = {f"{x}_text" for x in (level, *above)}
        assert {*table[0]} == ids | named | texts | (
            {"old_logp", "advantage", "host_twice_times"} if level == "solution" else set()
        )
        for row in table:
            number = row.get("origin_row", row["row"])
            assert number == row["row"] % 32
            problem = number // 4 if level == "solution" else number
            assert row.get("problem_row", problem) == problem
            assert level == "prompt" or row.get("prompt_row", problem // 2) == problem // 2
            at = {level: number, "problem": problem, "prompt": number if level == "prompt" else problem // 2}
            wanted = {name: values[name].get(at[x]) for x in (level, *above) for name in own[x]}
            if level == "solution":  # what comes after a `select` is of the repeat, its verdict of the row
                wanted |= {name: values[name].get(row["row"]) for name in ("old_logp", "advantage", "host.twice.times")}
            for name, value in wanted.items():
                if name == "answer":
                    value = bytes(value).decode()
                assert row[name.replace(".", "_")] == (value.tolist() if hasattr(value, "tolist") else value), (
                    level,
                    name,
                    row["row"],
                )
    assert [r["advantage"] is None for r in tables["solution"]] == [
        n not in columns["advantage"].rows for n in (r["row"] for r in tables["solution"])
    ]


def test_rows_of_an_evaluation_are_apart_and_each_goes_on_once(tmp_path, three):
    """Of the generations that it runs, though a `select` of the training would repeat some of the rows."""
    numbers = {"prompt": np.arange(4), "problem": np.arange(8), "solution": np.arange(32)}
    draw = np.random.default_rng(0)
    pieces = {
        name: ColumnRows(held, ragged([draw.integers(3, 13, 4) for _ in held], np.int32))
        for name, held in numbers.items()
    }
    right = draw.normal(size=32).astype(np.float32)
    pieces["right"] = ColumnRows(numbers["solution"], ColumnData(right))
    pieces["old_logp"] = ColumnRows(numbers["solution"], ragged([np.full(4, n) for n in range(32)], np.float32))
    rows.write(tmp_path, three, pieces, Task("held_out", 40, 4))
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.parquet")}
    assert found == {f"evaluation_rows/held_out/{level}/000040.parquet" for level in ("prompt", "problem", "solution")}
    table = parquet.read_table(tmp_path / "evaluation_rows" / "held_out" / "solution" / "000040.parquet").to_pydict()
    assert table["row"] == table["origin_row"] == list(range(32))
    assert table["problem_row"] == [n // 4 for n in range(32)]
    assert table["right"] == right.tolist()
    assert table["old_logp"] == [[n] * 4 for n in range(32)]  # written after the `select`


@pytest.mark.usefixtures("alone")
def test_every_generation_is_taken_from_its_own_table(tmp_path, three):
    columns = generations.columns()
    rows.write(tmp_path, three, columns, Task("train", 3, 4))
    stage = Stage(three)
    stage.generation.replay(str(tmp_path))

    def taken(name, problems):
        given = {
            "prompt": columns["prompt"].column.take(problems // 2),
            "problem": columns["problem"].column.take(problems),
        }
        return stage.act(name, given, problems)

    for name, made, problems in (
        ("solve", "solution", np.array([5])),
        ("try_once", "attempt", np.array([3, 5])),
        ("solve", "solution", np.array([3])),
    ):
        found = taken(name, problems)
        numbers = columns[made].rows
        for column in (made, f"{made}.logp"):
            of = np.flatnonzero(np.isin(numbers // (4 if made == "solution" else 1), problems))
            assert [found[column][i].tolist() for i in range(len(of))] == [
                columns[column].column[i].tolist() for i in of
            ]
    with pytest.raises(
        RunError, match=r"rows/attempt/000003.parquet has no row 4, which `try_once` \(line 20 of p.rlg\)"
    ):
        taken("try_once", np.array([4]))
    with pytest.raises(RunError, match=r"row 12 of .*rows/solution/000003.parquet is a response to another prompt"):
        stage.act(
            "solve",
            {
                "prompt": columns["prompt"].column.take(np.array([0])),
                "problem": columns["problem"].column.take(np.array([3])),
            },
            np.array([3]),
        )


def test_a_recording_that_lacks_one_generation_is_told_before_anything_starts(tmp_path, three, monkeypatch, capsys):
    rows.write(tmp_path / "there", three, generations.columns(), Task("train", 0, 4))
    at(tmp_path / "there", three, 0, "attempt").unlink()
    monkeypatch.chdir(tmp_path)
    assert run_main(["p.rlg", "--iterations", "1", "--replay", "there", "--dry-run"]) == 1
    told = "the recording in there has no iteration 0: there is no file there/rows/attempt/000000.parquet"
    assert f"error[missing-file]: {told}" in capsys.readouterr().err


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
    with pytest.raises(
        RunError,
        match=r"000000.parquet has no row 8, which `actor.generate` \(line 23 of grpo.rlg\) is to take from it",
    ):
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


PARTIAL = ("temperature = 1.0", "temperature = 1.0, partial = 0.5")


def rolled(folder, takes, groups=2):
    """What each group of a partial rollout takes of a recorded iteration, and goes on with."""
    plan = one_rank(PARTIAL)
    node = plan.graph.node("actor.generate")
    task = Task("train", 0, 4, position=8)
    said = sampling(samples=2, max_tokens=5)
    found = []
    for mine in np.array_split(np.arange(4), groups):
        context = [PROMPTS[i] for i in mine]
        stream = noise.RandomStream(0, "token", node.name, "train")
        prompts = Rollout(node, task, Batch(None, mine, {}), Report(""), context, said, stream)
        rollout = PartialRollout(prompts, takes, 0, lambda of: of)
        taken = rollout.replay(rows.Recording(plan, folder), node, ("response", "response.logp"))
        tokens = {row: [g.tokens.tolist() for g in rollout.responses[row]] for row in taken}
        found.append((tokens, [(c.position, c.cuts, len(c.responses)) for c in rollout.cut_prompts(taken)]))
    return found


def test_of_a_recorded_partial_rollout_what_it_took_is_taken(tmp_path):
    """Whichever group has it; a row without a response is not in the recording."""
    path = written(tmp_path, changes=[PARTIAL])
    table = parquet.read_table(path)
    there = pa.array([r // 2 != 1 for r in range(8)])
    for name in ("response", "response_logp"):
        column = compute.if_else(there, table[name], pa.scalar(None, table[name].type))
        table = table.set_column(table.schema.get_field_index(name), name, column)
    parquet.write_table(table, path)
    whole = {p: [RESPONSES[2 * p + i].tolist() for i in (0, 1)] for p in (0, 2, 3)}
    assert rolled(tmp_path, 3) == [({0: whole[0]}, [(9, 1, 2)]), ({p: whole[p] for p in (2, 3)}, [])]
    assert rolled(tmp_path, 3, groups=1) == [(whole, [(9, 1, 2)])]
    with pytest.raises(
        RunError, match=r"iteration 0 of .* has responses to 3 prompts, but .* takes 2: replay a recording"
    ):
        rolled(tmp_path, 2)
    with pytest.raises(RunError, match=r"000000.parquet has no row 2, which"):  # nor an empty response
        replayed(tmp_path, [0, 1, 2, 3])


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
    assert (
        "error[bad-value]: `prompt_text` is the name of a column that every recording has" in err
        and "--> p.rlg:9:" in err
    ), err


@pytest.mark.slow
def test_rows_of_evaluations_are_recorded_as_their_means_say(reference):
    """Of each evaluation all rows of its data, in the data's order, with what the program computes of them."""
    source = [json.loads(line) for line in (EXAMPLE / "test.jsonl").read_text().splitlines()]
    lines = [x for x in metrics(reference) if "evaluation" in x]
    folder = reference / "evaluation_rows" / "held_out"
    assert [p.name for p in sorted(folder.iterdir())] == [f"{x['after_iterations']:06d}.parquet" for x in lines]
    for line in lines:
        table = parquet.read_table(folder / f"{line['after_iterations']:06d}.parquet").to_pydict()
        assert table["prompt_text"] == [row["prompt"] for row in source for _ in range(2)]
        assert table["answer"] == [row["answer"] for row in source for _ in range(2)]
        pairs = zip(table["response_text"], table["answer"], strict=True)
        right = [float(response.removesuffix("<eos>") == answer) for response, answer in pairs]
        assert table["reward"] == right and np.mean(right) == pytest.approx(line["reward"])
        assert "advantage" not in table  # no node that computes it runs


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_recorded_and_replayed_elsewhere(place, reference):
    lines = [x for x in metrics(reference) if "iteration" in x]
    assert sorted(p.name for p in (reference / "rows").iterdir()) == [
        "000000.parquet",
        "000001.parquet",
        "000002.parquet",
    ]
    source = {
        json.loads(x)["prompt"]: json.loads(x)["answer"] for x in (EXAMPLE / "train.jsonl").read_text().splitlines()
    }
    for line in lines:
        table = rows_of(reference, line["iteration"]).to_pydict()
        assert table["row"] == list(range(32)) and set(table) >= {"old_logp", "ref_logp", "advantage", "response_logp"}
        assert sum(map(len, table["response"])) == line["response_tokens"]
        assert np.mean(table["reward"]) == pytest.approx(line["reward"])
        for prompt, answer, response, reward in zip(
            *(table[c] for c in ("prompt_text", "answer", "response_text", "reward")), strict=True
        ):
            assert source[prompt] == answer and reward == float(response.removesuffix("<eos>") == answer)
        drift = [
            abs(a - b)
            for c, d in zip(table["old_logp"], table["response_logp"], strict=True)
            for a, b in zip(c, d, strict=True)
        ]
        assert np.mean(drift) == pytest.approx(line["logp_drift"], rel=1e-3)
    # On two pools, in two parts, recorded again.
    pools = (
        "layout actor.update   { dp = 2, zero = 3 }",
        "apart actor.generate, actor.update",
    )
    small = ("layout actor.generate { tp = 2 }", "engine actor.update = fsdp { micro_batch = 5 }")
    place.write(pools, small, *TRAINED, ("seed = 0", "seed = 0, save = 2"))
    for arguments in (["--iterations", "2", "--out", "two"], ["--iterations", "3", "--resume", "two"]):
        code, _, err = place.run("p.rlg", *SMALL, *arguments, "--record", "--replay", str(reference))
        assert code == 0, err
    second = place.folder / "two"
    for a, b in zip(lines, [x for x in metrics(second) if "iteration" in x], strict=True):
        for key in ("reward", "loss", "grad_norm", "response_tokens", "loss/kl", "rows"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
        one, two = (rows_of(folder, a["iteration"]) for folder in (reference, second))
        assert one.schema == two.schema
        for name in ("row", "prompt", "response", "response_logp", "reward", "response_text"):
            assert one[name].equals(two[name]), name
    # Another run's: the first row that answers another prompt ends it.
    code, _, err = place.run(
        "p.rlg", *SMALL, "--iterations", "1", "--seed", "1", "--out", "other", "--replay", str(reference)
    )
    assert (
        code == 3
        and "rows/000000.parquet is a response to another prompt than this run's" in err
        and "Traceback" not in err
    ), err
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_three_generations_is_recorded_and_replayed_elsewhere(place):
    generations.program(place.folder)
    ran(place, "--out", "one", "--record")
    generations.program(
        place.folder, 2, "layout actor.update { dp = 2, zero = 3 }\n  layout propose, solve, try_once { tp = 2 }"
    )
    shutil.copytree(place.folder / "one", place.folder / "two")
    (place.folder / "two" / "rows" / "solution" / "000009.parquet").write_text("old")
    ran(place, "--out", "two", "--overwrite", "--record", "--replay", "one")
    assert {p.name for p in (place.folder / "two" / "rows" / "solution").iterdir()} == {
        "000000.parquet",
        "000001.parquet",
    }
    assert {p.name for p in (place.folder / "two").iterdir()} <= {*MADE} and len(metrics(place.folder / "two")) == 2
    for iteration, line in enumerate(metrics(place.folder / "one")):
        for level, head in (("problem", ""), ("solution", "solve/"), ("attempt", "try_once/")):
            one, two = (rows_of(place.folder / run, iteration, level) for run in ("one", "two"))
            assert one.schema == two.schema and one.num_rows
            for column in (c for c in one.column_names if c != "old_logp"):
                assert one[column].equals(two[column]), (level, column)
            drawn = [r[level] for r in one.to_pylist() if r["row"] == r.get("origin_row", r["row"])]
            assert sum(map(len, drawn)) == line[f"{head}response_tokens"]
        solutions = rows_of(place.folder / "one", iteration, "solution").to_pylist()
        trained = [r for r in solutions if r["old_logp"] is not None]
        assert len(trained) == line["rows"] == sum(r["host_twice_times"] or 0 for r in solutions) > 0
        for r in solutions:
            assert r["right"] == generations.right(r["solution_text"].removesuffix("<eos>"), r["answer"])
            assert r["advantage"] in (None, [r["right"] - r["baseline"]] * len(r["solution"]))
            assert r["old_logp"] is None or np.allclose(r["old_logp"], r["solution_logp"], atol=1e-4)
