"""Wrong numbers: each is noticed where it is made, told with node, line and row, and ends the run or leaves out its
step on all ranks."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import engines
import numpy as np
import pytest
import ranks
import torch
from place import ONE_RANK, SMALL, metrics
from rank_models import model
from safetensors.torch import load_file, save_file
from stage import EXAMPLE, Stage, one_rank, same, share

from msrl_graph import compile
from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.runtime.data import numerics
from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.data.dataset_preview import PREVIEW_ROWS
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.dock.readers import ColumnRead, list_node_reads
from msrl_graph.runtime.process.task import Task, WeightFetch
from msrl_graph.runtime.process.task_report import Report, RunError
from msrl_graph.runtime.rank.context import NodeBatch
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout

pytestmark = pytest.mark.usefixtures("alone")
SKIP = ("seed = 0 }", "seed = 0, on_nan = skip }")
NO_INFER = (
    ("  node actor.infer(prompt, response) -> old_logp\n", ""),
    ("    old_logp  : f32[response]\n", ""),
    ("actor.update(prompt, response, old_logp,", "actor.update(prompt, response,"),
    ("actor.generate -> actor.infer, ", "actor.generate -> "),
    ("  actor.infer, reference.infer", "  reference.infer"),
    ("mini_batch = 4", "epochs = 1"),
)
DECLARED = (
    ("    reward    : f32\n", "    drawn : f32[response]\n    reward    : f32\n"),
    ("-> response {", "-> response, drawn {"),
)


# Who compares.


def test_an_infer_of_the_generators_weights_compares_else_the_update():
    plan = one_rank()
    assert numerics.find_comparison(plan) == numerics.Comparison(
        "actor.infer", "response.logp", "response", 1e-3, edge="actor.update => actor.generate"
    )
    reads = {r.node: [c.column for c in r.reads] for r in list_node_reads(plan)}
    assert reads["actor.infer"] == ["prompt", "response", "response.logp"] and reads["reference.infer"] == [
        "prompt",
        "response",
    ]
    assert next(r for r in list_node_reads(plan) if r.node == "actor.infer").reads[-1] == ColumnRead(
        "response.logp", 1, "actor.generate"
    )
    text = (
        (EXAMPLE / "grpo.rlg")
        .read_text()
        .replace("layout actor.update   { dp = 2, zero = 3 }", "apart actor.generate, actor.update")
    )
    apart = compile(EXAMPLE / "grpo.rlg", text=text.replace("  layout actor.generate { tp = 2 }\n", ""))
    assert len(apart.pools) == 2 and numerics.find_comparison(apart) == numerics.find_comparison(plan)
    assert numerics.find_comparison(one_rank(*NO_INFER)).node == "actor.update"
    half = one_rank(("run {", "engine actor.generate = hf { dtype = bf16 }\n  run {"))
    assert numerics.find_comparison(half).tolerance == 0.1


def test_declared_log_probabilities_as_sampled_are_a_column():
    plan = one_rank(*DECLARED, ("old_logp, ref_logp, advantage) {", "old_logp, ref_logp, advantage, drawn) {"))
    assert numerics.find_comparison(plan).column == "drawn"
    assert [r.reads[-1] for r in list_node_reads(plan) if r.node == "actor.infer"] == [
        ColumnRead("drawn", 1, "actor.generate")
    ]
    stage = Stage(plan)
    columns = stage.sampled()
    assert list(columns["drawn"].lengths) == list(columns["response"].lengths)
    off = columns["drawn"].values - infer_alone(stage, columns)
    assert abs(off).max() < 1e-4


def test_log_probabilities_as_sampled_may_stand_for_the_old_ones():
    clip = ("clip(0.2)", "clip(0.2, old_logp = drawn)")
    stage = Stage(
        one_rank(
            *DECLARED,
            *NO_INFER[:2],
            ("actor.update(prompt, response, old_logp,", "actor.update(prompt, response, drawn,"),
            *NO_INFER[3:],
            clip,
        )
    )
    columns = stage.sampled()
    stage.act("actor.update", columns | {"ref_logp": columns["drawn"]})
    assert stage.told.sums["updates"] == (1.0, 0) and stage.told.peaks["logp_drift_max"] < 1e-4
    compared = stage.told.sums["logp_drift"]
    stage.act("actor.update", columns | {"ref_logp": columns["drawn"]})  # by weights that did not draw
    assert stage.told.sums["updates"] == (2.0, 0) and stage.told.sums["logp_drift"] == compared


def infer_alone(stage, columns):
    with torch.no_grad():
        packed = pack([columns["prompt"]], [columns["response"]], np.arange(8))
        return stage.engines.trainers["actor"].score([packed], ForwardRequest())[0].logp.numpy()


# The numbers, one by one.


def test_healthy_numbers_pass_and_drift_is_rounding():
    stage = Stage(one_rank())
    columns = stage.sampled()
    old = stage.act("actor.infer", columns)["old_logp"]
    stage.act("actor.update", columns | {"old_logp": old, "ref_logp": old})
    assert stage.told.sums["skipped"] == (0.0, 0) and stage.told.sums["updates"] == (1.0, 0) and not stage.told.remarks
    total, tokens = stage.told.sums["logp_drift"]
    assert tokens == len(old.values) and total / tokens < 1e-4 and stage.told.peaks["logp_drift_max"] < 1e-4


def corrupt(stage):
    """As a resharding that mixes up a layer's rows would."""
    weight = next(s.tensor for s in stage.generator.allocate() if s.name == "model.layers.1.mlp.down_proj.weight")
    weight.copy_(weight.flip(0))


def test_weights_that_did_not_arrive_whole_are_seen_as_drift():
    stage = Stage(one_rank())
    corrupt(stage)
    with pytest.raises(RunError) as error:
        stage.act("actor.infer", stage.sampled())
    told = str(error.value)
    assert (
        told.startswith("`actor.infer` (line 24 of grpo.rlg) on ") and "where rounding makes at most 0.001" in told
    ), told
    assert (
        " of iteration 3: the log-probabilities of `response` are not those that `actor.generate` (line 23 of "
        "grpo.rlg) drew it"
    ) in told
    assert " with: off by " in told


def test_rows_of_older_weights_are_told_apart_and_may_drift():
    """The policy has changed since: that is no mistake, whatever it comes to."""
    stage = Stage(one_rank())
    corrupt(stage)
    node = stage.plan.graph.node("actor.infer")
    columns = stage.sampled()
    size = len(columns["response"])
    elements = {c: len(columns[c].values) for c in ("prompt", "response", "response.logp")}
    for version in (3, 1):
        task = Task("train", 3, 4, 2, fetches={"actor.update => actor.generate": WeightFetch(version, 5)})
        batch = Batch(share(np.arange(size), size, size, elements), np.arange(size), {c: columns[c] for c in elements})
        if version == 3:
            with pytest.raises(RunError, match=r"where rounding makes at most 0\.001"):
                stage.training.infer(NodeBatch(node, task, batch, Report("rank")))
            continue
        told = Report("rank")
        stage.training.infer(NodeBatch(node, task, batch, told))
        total, tokens = told.sums["logp_drift/2"]
        assert tokens == elements["response"] and total / tokens > 1e-3 and told.peaks["logp_drift_max/2"] > 1e-3
        assert "logp_drift" not in told.sums and not told.remarks


def test_temperatures_below_1_stretch_what_rounding_makes():
    stage = Stage(one_rank(("temperature = 1.0", "temperature = 0.25")))
    columns = stage.sampled()
    columns["response.logp"] = ColumnData(
        columns["response.logp"].values + np.float32(3e-3), columns["response.logp"].offsets
    )
    stage.act("actor.infer", columns)
    assert not stage.told.remarks
    columns["response.logp"] = ColumnData(
        columns["response.logp"].values + np.float32(2e-3), columns["response.logp"].offsets
    )
    with pytest.raises(RunError, match=r"where rounding makes at most 0\.004$"):
        stage.act("actor.infer", columns)


@pytest.mark.parametrize("changes", [(), NO_INFER], ids=["infer", "update"])
def test_under_skip_the_step_with_drift_is_left_out(changes):
    stage = Stage(one_rank(SKIP, *changes))
    columns = stage.sampled()
    fresh = stage.act("actor.infer", columns) if not changes else {}
    stage.act("actor.update", columns | fresh | {"ref_logp": columns["advantage"]})
    before = stage.whole()
    stage.training.stepped = False
    corrupt(stage)
    columns = stage.sampled()
    fresh = stage.act("actor.infer", columns) if not changes else {}
    stage.act("actor.update", columns | fresh | {"ref_logp": columns["advantage"]})
    assert same(before, stage.whole())
    assert stage.told.sums["skipped"] == (1.0, 0) and stage.told.sums["updates"] == (1.0, 0)
    assert stage.told.sums["wrong/drift"][0] >= 1
    lines = [
        f"`{n}` ({stage.plan.graph.node(n).span.place})"
        for n in ("actor.update" if changes else "actor.infer", "actor.update")
    ]
    assert [r.split(" on ")[0] for r in stage.told.remarks] == lines


def test_tokens_outside_the_vocabulary_and_empty_responses():
    columns = ragged([np.array([3, 4]), np.array([16]), np.zeros(0, int), np.array([5, 17, 2])], np.int32)
    logp = ColumnData(np.full(6, -1.0, np.float32), columns.offsets)
    stage = Stage(one_rank())
    node = stage.plan.graph.node("actor.generate")
    rows = np.arange(10, 14)
    what = r"^`actor.generate` \(line 23 of grpo.rlg\) on rows 11, 13 of iteration 0: it drew the token 16, outside"
    with pytest.raises(RunError, match=what):
        stage.context.watch.check_response(node, Task("train", 0, 4, 2), stage.told, rows, columns, logp, 16)
    when = (
        r"^`actor.generate` \(line 23 of grpo.rlg\) on row 12 of the evaluation of held_out after 40 iterations: "
        r"the response is empty$"
    )
    with pytest.raises(RunError, match=when):
        stage.context.watch.check_response(node, Task("held_out", 40, 4, 2), stage.told, rows, columns, logp, 18)
    report = Report("rank")
    logp.values[-1] = logp.values[0] = math.nan
    numerics.NumericsWatch(one_rank(SKIP)).check_response(node, Task("train", 0, 4, 2), report, rows, columns, logp, 16)
    assert {k: v for k, (v, _) in report.sums.items()} == {"wrong/token": 2, "wrong/empty": 1, "wrong/logp": 1}
    assert report.remarks[-1].endswith(
        "on row 10 of iteration 0: it drew a token with the log-probability nan"
    )  # 13 was told already


def test_under_skip_a_row_with_an_unknown_token_is_fed_to_nobody_and_its_step_is_left_out():
    stage = Stage(one_rank(SKIP))
    columns = stage.sampled()
    expected = stage.act("actor.infer", columns)["old_logp"]
    bad = replace(columns["response"], values=columns["response"].values.copy())
    bad.values[0] = 99
    before = stage.whole()
    old = stage.act("actor.infer", columns | {"response": bad})["old_logp"]
    assert np.isnan(old[0]).all() and np.isnan(old.values).sum() == len(old[0])
    assert np.allclose(old.values[len(old[0]) :], expected.values[len(old[0]) :], atol=1e-5)
    stage.act("actor.update", columns | {"response": bad, "old_logp": expected, "ref_logp": expected})
    assert same(before, stage.whole()) and stage.told.sums["skipped"] == (1.0, 0)
    assert stage.told.remarks == [
        "`actor.update` (line 28 of grpo.rlg) on 8 rows (0, 1, 2, 3, 4, ...) of iteration 3: the gradient of "
        "their mini-batch of 8 rows "
        "has the norm nan; the step is skipped"
    ]


def test_of_several_mini_batches_only_the_bad_one_is_left_out():
    """As if the bad one had never been, the schedule of the learning rate included."""
    found = []
    for bad in (False, True):
        stage = Stage(one_rank(SKIP))
        columns = stage.sampled()
        columns |= {c: stage.act("actor.infer", columns)["old_logp"] for c in ("old_logp", "ref_logp")}
        first, second = (
            {c: column.take(rows) for c, column in columns.items()} for rows in (np.arange(4), np.arange(4, 8))
        )
        if bad:
            wrong_one = replace(first["advantage"], values=first["advantage"].values.copy())
            wrong_one.values[2] = math.inf
            before = stage.whole()
            stage.act("actor.update", first | {"advantage": wrong_one})
            assert same(before, stage.whole()) and stage.engines.steps == {}
            assert [r for r in stage.told.remarks if "actor.update" not in r] == []  # its maker told it
        stage.act("actor.update", second)
        assert stage.told.sums["updates"] == (1.0, 0) and stage.told.sums["skipped"] == (float(bad), 0)
        assert math.isfinite(stage.told.sums["loss"][0]) and stage.told.sums["loss"][1] == 1
        found.append(stage.whole())
    assert same(*found)


def test_an_empty_response_contributes_nothing():
    stage = Stage(one_rank(SKIP))
    columns = stage.sampled()
    old = stage.act("actor.infer", columns)["old_logp"]
    columns |= {"old_logp": old, "ref_logp": old}
    rows = [columns[c][i] if i else columns[c][i][:0] for c in ("response",) for i in range(8)]
    columns["response"] = ragged(rows, np.int32)
    for name in ("old_logp", "ref_logp", "advantage"):
        columns[name] = ragged([columns[name][i] if i else columns[name][i][:0] for i in range(8)], np.float32)
    stage.act("actor.update", columns)
    assert stage.told.sums["updates"] == (1.0, 0) and math.isfinite(stage.told.sums["loss"][0])


@pytest.mark.parametrize("changes", [(), (SKIP,)])
def test_what_has_no_beginning_is_fed_to_nobody(changes):
    """As where a function wrote the prompt and found nothing to say."""
    stage = Stage(one_rank(*changes))
    columns = stage.sampled()
    bare = ragged([columns["prompt"][i] if i != 3 else np.zeros(0) for i in range(8)], np.int32)
    what = "the input of its model holds no token, so there is nothing to predict from"
    with pytest.raises(RunError, match=rf"^`actor.infer` \(line 24 of grpo.rlg\) on row 3 of iteration 3: {what}$"):
        stage.act("actor.infer", columns | {"prompt": bare})
    with pytest.raises(RunError, match=rf"^`actor.generate` \(line 23 of grpo.rlg\) on row 3 of iteration 3: {what}$"):
        stage.act("actor.generate", {"prompt": bare})


def test_a_loss_that_is_not_finite_is_told_with_its_row():
    stage = Stage(one_rank())
    columns = stage.sampled()
    old = stage.act("actor.infer", columns)["old_logp"]
    far = replace(old, values=old.values.copy())
    far.values[far.offsets[5]] = -200.0  # finite, but the ratio overflows
    columns["advantage"].values[:] = -1.0
    with pytest.raises(
        RunError, match=r"^`actor.update` \(line 28 of grpo.rlg\) on row 5 of iteration 3: a token's loss is inf$"
    ):
        stage.act("actor.update", columns | {"old_logp": far, "ref_logp": old})


# Ranks agree.


def skip_on_all(rank, folder, cases):
    """One rank finds its part not sound, or its loss is nan: no rank moves, and the next step is as if nothing had
    been."""
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(3, 13, 5) for _ in range(4)], np.int32)
    responses = ragged([draw.integers(3, 13, 3) for _ in range(4)], np.int32)
    for layout in cases:
        found = []
        for attempt in ("plain", "unsound", "nan", "no rows"):
            engine = engines.trainer(model(), layout, rank, engines.mesh(layout), adamw(lr=0.0, weight_decay=0.01))
            group = layout.coordinates(rank).dp
            rows = np.array_split(np.arange(4), layout.dp)[group]

            def step(factor=1.0, sound=True, rows=rows, engine=engine):
                packed = pack([prompts], [responses], rows)
                engines.train(engine, packed, lambda made: made.logp.sum() * factor / 12, ForwardRequest(1.0))
                return engine.step(StepRequest(1e-3, 1.0, sound))

            def whole(engine=engine):
                state = [v.clone() for s in engine._optimizer.parts[0].state.values() for v in s.values()]
                return [s.tensor.clone() for s in engine.shards()], state

            assert math.isfinite(step())
            before = whole()
            mine = rank == 1
            if attempt == "unsound":
                assert math.isnan(step(sound=not mine))
            elif attempt == "nan":
                assert not math.isfinite(step(factor=math.nan if mine or layout.tp > 1 else 1.0))
            elif attempt == "no rows":
                assert math.isnan(step(rows=rows[:0] if mine or layout.tp > 1 else rows, sound=not mine))
            assert same(before, whole()), (layout, attempt)
            assert all(p.grad is None for p in engine._parameters)
            norm = step()
            found.append((norm, whole()))
        for norm, weights in found[1:]:
            assert norm == found[0][0] and same(found[0][1], weights), layout


@pytest.mark.slow
def test_a_step_is_left_out_on_all_ranks_bit_for_bit():
    ranks.run(2, skip_on_all, [Layout(dp=2, zero=z) for z in range(4)] + [Layout(tp=2)])


# Real runs.

NAN = """
def score(response, answer):
    scores = [0.25 * (i % 4) for i in range(len(response))]
    scores[5] = float("nan")
    return scores
"""


def own_model(place):
    """A copy of the model's folder, to be changed."""
    (place.folder / "model").unlink()
    return Path(shutil.copytree(EXAMPLE / "model", place.folder / "model"))


@pytest.mark.slow
@pytest.mark.long
def test_a_run_ends_at_the_first_wrong_number(place):
    (place.folder / "mine.py").write_text(NAN)
    place.write(*ONE_RANK, ("call = exact_match()", 'call = "mine.py:score", per = batch'), evaluated=False)
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "a")
    assert (code, out) == (3, ""), err
    where = "`host.reward` (line 26 of p.rlg) failed on the batch 0, row 5 of iteration 0"
    told = f"error[run-failed]: {where}: BadResult: it returned nan for `reward`"
    first, *rows, log = err.splitlines()
    assert first == told + "; the files of the run so far are in a"
    assert [line.split(":")[0] for line in rows] == [
        "  response",
        "  answer",
    ] and log == "  all of it is in logs/functions-of-host-0.log"
    assert metrics(place.folder / "a") == []
    place.assert_clean()


@pytest.mark.slow
def test_a_run_goes_on_without_the_step_and_says_so(place):
    (place.folder / "mine.py").write_text(NAN)
    changes = [("call = exact_match()", 'call = "mine.py:score", per = batch'), SKIP]
    place.write(*ONE_RANK, *changes, evaluated=False)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "a")
    assert code == 0, err
    for i, line in enumerate(metrics(place.folder / "a")):
        assert line["skipped"] == 1 and line["updates"] == 0 and line["wrong/result"] == 1
        assert (
            "loss" not in line
            and "grad_norm" not in line
            and not [k for k in line if k.startswith("wrong/") and k != "wrong/result"]
        )
        assert line["reward"] == pytest.approx((0.375 * 32 - 0.25) / 31)  # row 5 does not count
        assert (
            err.count(f"`host.reward` (line 26 of p.rlg) on row 5 of iteration {i}: it returned nan for `reward`") == 1
        )
        assert (
            err.count(
                f"of iteration {i}: the gradient of their mini-batch of 32 rows has the norm nan; the step is skipped"
            )
            == 1
        )
    after, before = (
        load_file(f / "model.safetensors") for f in (place.folder / "a" / "weights" / "actor", EXAMPLE / "model")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (place.folder / "a" / "curve.png").exists()
    place.assert_clean()


@pytest.mark.slow
def test_weights_that_hold_a_nan_are_told_by_the_first_state_that_computes_with_them(place):
    path = own_model(place) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = math.inf
    save_file(weights, path, metadata={"format": "pt"})
    place.write(*ONE_RANK)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "a")
    assert code == 3
    told = (
        "error[run-failed]: `actor.generate` (line 23 of p.rlg) on 500 rows (0, 1, 2, 3, 4, ...) of the "
        "evaluation of held_out "
    )
    told += "after 0 iterations: it drew a token with the log-probability nan"
    assert err == told + "; the files of the run so far are in a\n"
    place.assert_clean()


@pytest.mark.slow
def test_a_row_far_down_that_cannot_be_used_is_told_before_training(place):
    path = own_model(place) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 16, "content": "?", "special": True})
    path.write_text(json.dumps(tokenizer))
    rows = ['{"prompt": "1+1=", "answer": "2"}\n'] * PREVIEW_ROWS + ['{"prompt": "1+?=", "answer": "2"}\n']
    (place.folder / "odd.jsonl").write_text("".join(rows))
    text = place.write(*ONE_RANK, ('"train.jsonl"', '"odd.jsonl"'))
    line = text[: text.index("data source")].count("\n") + 1
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "a")
    assert code == 1
    assert f"error[bad-data]: line {PREVIEW_ROWS + 1} of " in err, err
    assert "has the token 16 ('?') in `prompt`, outside the vocabulary of 16" in err, err
    assert f"--> p.rlg:{line}:" in err and not (place.folder / "a").exists()
    place.assert_clean()
