"""A reward model's numbers are of the text that ends with each token, so that the last one is the score of the row; and
pairs train that score."""

import re

import msgspec
import numpy as np
import pytest
import torch
from stage import PROMPTS, limit_micro_batch, share
from tiny import SCORES, pairs, planned, scoring, staged
from torch.nn.functional import logsigmoid
from training_math import TASK, close, net, norm, sequence

from msrl_graph.analysis.sequences import sequences
from msrl_graph.backends import ENGINES, prefix_tree
from msrl_graph.backends.memory.sizes import Sizes
from msrl_graph.cost import holdings
from msrl_graph.ir.plan import from_json
from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process.task_report import Report, RunError
from msrl_graph.runtime.rank.context import NodeBatch
from msrl_graph.runtime.rank.micro_batches import pack

pytestmark = pytest.mark.usefixtures("alone")
TOKENS = """
algorithm tokens {
  columns {
    prompt   : i32[<= 6]
    response : i32[<= 5]
    answer   : text
    each     : f32[response]
    score    : f32
    returns  : f32
  }
  worker judge : reward_model
  worker host  : function
  source(8) -> prompt, response, answer
  node tokens: judge.infer(prompt, response) -> each
  node row: judge.infer(prompt, response) -> score
  node host.returns(response, answer) -> returns { call = exact_match() }
  node judge.update(prompt, response, each, returns) {
    loss = value_clip(100, value = each), optimizer = adamw(lr = 1e-3)
  }
  source -> tokens, row, host.returns -> judge.update
}
"""
SIZES = (3, 5, 1, 4, 2, 5, 3, 2)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return str(scoring(tmp_path_factory.mktemp("judge") / "model"))


def rows():
    draw = np.random.default_rng(0)
    response = ragged([draw.integers(3, 13, n) for n in SIZES], np.int32)
    return {"prompt": ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2)), "response": response}


def token_scores(model, columns, i, *names):
    """The score of each beginning of a row's text that ends with a token of its last column."""
    states = model.model(sequence(columns, i, *names)).last_hidden_state[0]
    return model.score(states)[-len(columns[names[-1]][i]) :, 0]


@pytest.mark.parametrize("micro", [0, 1, 3])
def test_the_last_number_of_a_reward_model_is_the_score_of_the_row(judge, micro):
    stage = staged(TOKENS, judge=judge)
    columns = rows()
    for name in ("tokens", "row"):
        limit_micro_batch(stage.plan, name, micro)
    columns |= stage.act("tokens", columns) | stage.act("row", columns)
    last = [columns["each"][i][-1] for i in range(8)]
    assert np.allclose(last, columns["score"].values, rtol=1e-6, atol=1e-5)
    model = net(stage, "judge", "ForSequenceClassification")
    assert close(columns["each"].values, [token_scores(model, columns, i, "prompt", "response") for i in range(8)])


def test_an_update_of_token_scores_trains_the_score_of_the_row():
    stage, columns = staged(TOKENS), rows()  # its head begins at zero
    columns |= stage.act("tokens", columns)
    target = np.where(np.arange(8) % 2, -0.5, 0.5).astype(np.float32)
    columns["returns"] = ColumnData(target)
    first = np.abs(stage.act("row", columns)["score"].values - target).max()
    for _ in range(80):
        stage.act("judge.update", columns)
    assert np.abs(stage.act("row", columns)["score"].values - target).max() < 0.02 < first


def test_which_columns_are_scored_is_said_by_the_term(tmp_path, judge):
    """By its parameters or by the columns that a call binds to them, of the package or of a file; a plan keeps it."""
    (tmp_path / "mine.py").write_text('def mine(rejected: "Scores", chosen) -> "Rows":\n    return rejected\n')
    renamed = [("chosen       :", "better       :"), (", chosen", ", better")]
    cases = [
        ([], ("chosen", "rejected")),
        ([*renamed, ("bradley_terry()", "bradley_terry(chosen = better)")], ("better", "rejected")),
        ([("bradley_terry()", "0.5 * bradley_terry() + bradley_terry(1)")], ("chosen", "rejected")),
        ([("bradley_terry()", f'"{tmp_path / "mine.py"}:mine"')], ("rejected",)),
    ]
    for changes, scored in cases:
        plan = planned(SCORES, *changes, judge=judge)
        for graph in (plan.graph, from_json(msgspec.json.encode(plan)).graph):
            node = graph.node("judge.update")
            assert node.scores == sequences(graph, node).scored == scored
            assert sequences(graph, node).context == tuple(c for c in node.reads if c not in scored)


def test_memory_counts_each_token_that_is_fed(judge):
    """The last of a row, too: rows at their bounds, pairs with a prompt of their own."""
    work = holdings.work(staged(SCORES, judge=judge).plan, ENGINES, "judge.update")
    prompts, chosen, rejected = (
        ragged([*np.arange(8 * n).reshape(8, n) + 100 * i], np.int32) for i, n in enumerate((6, 5, 5))
    )
    fed = prefix_tree.build_tree(pack([prompts], [chosen, rejected], np.arange(8), after=True)).ids
    assert (work.rows, work.fed) == (16, 11) and len(fed) == Sizes(work).tokens == 8 * 6 + 16 * 5


def paired(stage):
    """Eight pairs, and the scores of both by torch alone."""
    columns = pairs(stage)
    model = net(stage, "judge", "ForSequenceClassification")
    found = [
        torch.stack([token_scores(model, columns, i, "prompt", name)[-1] for i in range(8)])
        for name in ("chosen", "rejected")
    ]
    return columns, model, *found


@pytest.mark.parametrize("micro", [0, 3])
@pytest.mark.parametrize("margin", [0, 0.7])
def test_pairs_train_a_reward_model_as_torch_does(judge, margin, micro):
    stage = staged(SCORES, ("bradley_terry()", f"bradley_terry({margin})"), judge=judge)
    columns, model, chosen, rejected = paired(stage)
    loss = -logsigmoid(chosen - rejected - margin).mean()
    loss.backward()
    limit_micro_batch(stage.plan, "judge.update", micro)
    stage.act("judge.update", columns)
    told = {name: total / max(weight, 1) for name, (total, weight) in stage.told.sums.items()}
    assert told["loss"] == pytest.approx(told["loss/bradley_terry"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert told["grad_norm"] == pytest.approx(norm(model), rel=1e-4)
    assert told["bradley_terry/margin"] == pytest.approx(float((chosen - rejected).mean().detach()), rel=1e-4, abs=1e-5)
    assert told["bradley_terry/accuracy"] == float((chosen > rejected).double().mean())


WHOLE = """
from msrl_graph import loss_term


@loss_term(scope="mini_batch")
def spread(chosen: "Scores", rejected: "Scores") -> "Rows":
    difference = chosen - rejected
    return -difference / (1 + difference.var())
"""


@pytest.mark.parametrize("micro", [0, 3])
def test_a_term_of_a_file_gets_scores_of_the_whole_mini_batch(tmp_path, judge, micro):
    (tmp_path / "mine.py").write_text(WHOLE)
    stage = staged(SCORES, ("bradley_terry()", f'"{tmp_path / "mine.py"}:spread"'), judge=judge)
    columns, model, chosen, rejected = paired(stage)
    difference = chosen - rejected
    loss = (-difference / (1 + difference.var())).mean()
    loss.backward()
    limit_micro_batch(stage.plan, "judge.update", micro)
    stage.act("judge.update", columns)
    assert stage.told.sums["loss"][0] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert stage.told.sums["grad_norm"][0] == pytest.approx(norm(model), rel=1e-4)


def test_texts_need_nothing_before_them_to_be_scored(judge):
    stage = staged(SCORES, ("judge.update(prompt, ", "judge.update("), judge=judge)
    columns = pairs(stage)
    model = net(stage, "judge", "ForSequenceClassification")
    chosen, rejected = (
        torch.stack([token_scores(model, columns, i, name)[-1] for i in range(8)]) for name in ("chosen", "rejected")
    )
    stage.act("judge.update", columns)
    expected = -logsigmoid(chosen - rejected).mean()
    assert stage.told.sums["loss"][0] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_an_empty_response_has_no_score_and_its_row_is_reported(judge, on_nan):
    stage = staged(SCORES, judge=judge, more=f"run {{ on_nan = {on_nan} }}")
    columns = pairs(stage)
    columns["rejected"] = ragged([columns["rejected"][i][: 0 if i == 5 else 9] for i in range(8)], np.int32)
    before = [s.tensor.clone() for s in stage.engines.trainers["judge"].shards()]
    told = "`judge.update` (line 10 of tiny.rlg) on row 5 of iteration 3: `rejected` holds no token, so it has no score"
    if on_nan == "stop":
        with pytest.raises(RunError, match=re.escape(told)):
            stage.act("judge.update", columns)
        return
    stage.act("judge.update", columns)
    assert stage.told.sums["skipped"] == stage.told.sums["wrong/empty"] == (1, 0) and told in stage.told.remarks
    assert all(torch.equal(a, s.tensor) for a, s in zip(before, stage.engines.trainers["judge"].shards(), strict=True))


def test_a_round_without_pairs_takes_no_step(judge):
    stage = staged(SCORES, judge=judge)
    none = np.zeros(0, np.int64)
    report = Report("")
    stage.training.update(
        NodeBatch(stage.plan.graph.node("judge.update"), TASK, Batch(share(none, 0, 0, {}), none, {}), report)
    )
    assert "updates" not in report.sums
