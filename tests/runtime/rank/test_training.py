"""Infers and updates of all kinds of workers, against transformers and torch alone, and on real ranks against one."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stage import EXAMPLE, PROMPTS, Stage, limit_micro_batch, one_rank, share
from tiny import PAIRS, ROLLOUT, built, planned, scoring, staged
from torch.nn.functional import logsigmoid
from training_math import TASK, close, net, norm, sequence, token_logps

from msrl_graph import compile
from msrl_graph.checks import weights
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.attributes import UpdateAttributes
from msrl_graph.runtime.data.columns import ColumnData, ragged, texts
from msrl_graph.runtime.data.tokens import Tokens
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import NodeBatch
from msrl_graph.runtime.weights import checkpoint

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return str(scoring(tmp_path_factory.mktemp("judge") / "model"))


@pytest.fixture(scope="module")
def rolled(judge):
    return built(ROLLOUT, judge=judge)


@pytest.fixture(scope="module")
def paired():
    return built(PAIRS)


def values(model, columns, i):
    states = model.model(sequence(columns, i, "prompt", "response")).last_hidden_state[0]
    return model.score(states)[len(columns["prompt"][i]) - 1 : -1, 0]


def test_what_a_policy_infers(rolled):
    stage, columns = rolled
    whole = [token_logps(net(stage, "teacher"), columns, i, "response", 0.8) for i in range(8)]
    assert close(columns["ref_logp"].values, [p.gather(1, t)[:, 0] for p, t in whole])
    assert close(columns["top_logp"].values, [p.topk(3).values for p, _ in whole])
    assert np.array_equal(columns["top_ids"].values, torch.cat([p.topk(3).indices for p, _ in whole]).numpy())
    assert columns["top_ids"].values.dtype == np.int32 and columns["top_ids"].take(np.array([7]))[0].shape == (2, 3)


def test_what_scoring_models_infer(rolled, judge):
    from transformers import AutoModelForSequenceClassification

    stage, columns = rolled
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    expected = [model(sequence(columns, i, "prompt", "response")).logits[0] for i in range(8)]
    assert close(columns["score"].values, expected) and columns["score"].offsets is None
    assert stage.told.sums["score"] == (pytest.approx(float(columns["score"].values.sum())), 8)
    critic = net(stage, "critic", "ForSequenceClassification")
    assert close(columns["value"].values, [values(critic, columns, i) for i in range(8)])


def test_a_prompt_of_text_is_the_tokens_that_it_makes(rolled, judge):
    _, columns = rolled
    words = texts(Tokens(str(EXAMPLE / "model")).decode(columns["prompt"][i] for i in range(8)))
    found = []
    for prompt, changes in ((columns["prompt"], []), (words, [("prompt    : i32[<= 6]", "prompt    : text")])):
        stage = staged(ROLLOUT, *changes, judge=judge)
        made = [
            stage.act(name, columns | {"prompt": prompt})
            for name in ("teacher.infer", "critic.infer", "judge.infer", "actor.update")
        ]
        found.append(
            [
                *(c.values for some in made for c in some.values()),
                *(s.tensor.numpy() for s in stage.engines.trainers["actor"].shards()),
            ]
        )
    assert all(map(np.array_equal, *found)) and len(found[0]) > 5


def test_several_columns_after_one_prompt(paired):
    stage, columns = paired
    model = net(stage, "reference")
    for name in ("chosen", "rejected"):
        whole = [token_logps(model, columns, i, name) for i in range(8)]
        assert close(columns[f"ref_{name}"].values, [p.gather(1, t)[:, 0] for p, t in whole])


TWICE = """
algorithm twice {
  columns {
    prompt   : i32[<= 6]
    response : i32[<= 5]
    revised  : i32[<= 5]
    cold     : f32[response]
    warm     : f32[revised]
  }
  worker actor   : policy
  worker teacher : policy frozen
  source(8) -> prompt
  node actor.generate(prompt) -> response { temperature = 0.5 }
  node revise: actor.generate(prompt, response) -> revised { temperature = 2 }
  node teacher.infer(prompt, response, revised) -> cold, warm
  node actor.update(prompt, revised, warm) { loss = kl(ref_logp = warm), optimizer = adamw(lr = 1e-3) }
  source -> actor.generate -> revise -> teacher.infer -> actor.update
  actor.update => actor.generate, revise
}
"""


@pytest.mark.parametrize("micro", [0, 3])
def test_each_of_several_columns_has_the_temperature_that_it_was_drawn_at(micro):
    stage = staged(TWICE)
    draw = np.random.default_rng(0)
    columns = {"prompt": ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2))}
    for name, sizes in (("response", (3, 5, 1, 4, 2, 5, 3, 2)), ("revised", (1, 2, 5, 4, 4, 3, 1, 1))):
        columns[name] = ragged([draw.integers(3, 13, n) for n in sizes], np.int32)
    limit_micro_batch(stage.plan, "teacher.infer", micro)
    found = stage.act("teacher.infer", columns)
    model = net(stage, "teacher")
    for written, name, temperature in (("cold", "response", 0.5), ("warm", "revised", 2.0)):
        whole = [token_logps(model, columns, i, name, temperature) for i in range(8)]
        assert close(found[written].values, [p.gather(1, t)[:, 0] for p, t in whole]), written


def test_a_critic_that_is_begun_from_a_policy_predicts_nothing(judge):
    stage, columns = built(ROLLOUT, judge=judge)
    next(s.tensor for s in stage.engines.trainers["critic"].shards() if s.name == "score.weight").zero_()
    assert not stage.act("critic.infer", columns)["value"].values.any()


def policy_loss(stage, columns, kept):
    """clip(0.2, ratio = sequence) + 0.1 kl() - 0.01 entropy() + 0.1 distil(reverse) of each token that is kept, row by
    row."""
    model = net(stage, "actor")
    found = []
    for i in range(8):
        where = torch.from_numpy(kept[i])
        whole, tokens = (x[where] for x in token_logps(model, columns, i, "response", 0.8))
        logp = whole.gather(1, tokens)[:, 0]
        old, ref, advantage, top = (
            torch.from_numpy(columns[c][i]).double()[where] for c in ("old_logp", "ref_logp", "advantage", "top_logp")
        )
        # Several advantages a row: each token has the row's ratio, and the gradient of its own (arXiv:2507.18071, eq.
        # 14).
        ratio = (logp - old).mean().detach().exp() * (logp - logp.detach()).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        d = ref - logp
        mine = whole.gather(1, torch.from_numpy(columns["top_ids"][i].astype(np.int64))[where]).log_softmax(-1)
        reverse = (mine.exp() * (mine - top.log_softmax(-1))).sum(-1)
        entropy = -(whole.exp() * whole).sum(-1)
        found.append(surrogate + 0.1 * (d.exp() - d - 1) - 0.01 * entropy + 0.1 * reverse)
    return model, found


def critic_loss(stage, columns, kept):
    model = net(stage, "critic", "ForSequenceClassification")
    found = []
    for i in range(8):
        where = torch.from_numpy(kept[i])
        v = values(model, columns, i)[where]
        old, returns = (torch.from_numpy(columns[c][i]).double()[where] for c in ("value", "returns"))
        bounded = torch.minimum(torch.maximum(v, old - 0.5), old + 0.5)
        found.append(torch.maximum((v - returns) ** 2, (bounded - returns) ** 2) / 2)
    return model, found


def pair_loss(stage, columns, kept):
    model = net(stage, "actor")
    found = []
    for i in range(8):
        sums = []
        for name in ("chosen", "rejected"):
            whole, tokens = token_logps(model, columns, i, name)
            sums.append(whole.gather(1, tokens).sum() - columns[f"ref_{name}"][i].astype(np.float64).sum())
        found.append(-logsigmoid(0.1 * (sums[0] - sums[1]))[None])
    return model, found


def test_raft_pp_is_ppos_ratio_and_clip_of_right_responses():
    """arXiv:2504.11343: the mean over the responses that are kept of the mean over their tokens."""
    program = EXAMPLE.parent / "raft_pp" / "raft_pp.rlg"
    text = program.read_text().replace("mini_batch = 256", "mini_batch = 8")
    stage = Stage(compile(program, text=text, sets={"prompts": "4", "group": "2"}))
    columns = stage.sampled()
    kept = np.array([0, 3, 4])
    columns |= {"reward": ColumnData(np.ones(8, np.float32), None)}
    logp = stage.act("actor.infer", columns)["old_logp"]
    away = np.random.default_rng(0).normal(0, 0.3, len(logp.values))
    columns["old_logp"] = ColumnData((logp.values - away).astype(np.float32), logp.offsets)
    ratios = [np.exp(logp[i].astype(float) - columns["old_logp"][i]) for i in kept]
    assert any((r > 1.2).any() for r in ratios) and any((r < 0.8).any() for r in ratios)
    expected = -np.mean([np.minimum(r, np.clip(r, 0.8, 1.2)).mean() for r in ratios])
    stage.act("actor.update", {name: column.take(kept) for name, column in columns.items()}, rows=kept)
    assert stage.told.sums["loss"][0] == pytest.approx(expected, rel=1e-5)


REDUCED = {
    "tokens": lambda rows: torch.cat(rows).mean(),
    "sequences": lambda rows: torch.stack([r.mean() if len(r) else r.sum() for r in rows]).mean(),
    "constant(3)": lambda rows: torch.stack([r.sum() / 3 for r in rows]).mean(),
    "sequences, masked_rows = skip": lambda rows: torch.stack([r.mean() for r in rows if len(r)]).mean(),
    "constant(3), masked_rows = skip": lambda rows: torch.stack([r.sum() / 3 for r in rows if len(r)]).mean(),
}


@pytest.mark.parametrize("micro", [0, 3])
@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.parametrize(("node", "expected"), [("actor.update", policy_loss), ("critic.update", critic_loss)])
def test_loss_and_gradient_are_those_of_torch(rolled, judge, node, expected, reduce, micro):
    _, columns = rolled
    stage, _ = built(ROLLOUT, ("optimizer = adamw", f"reduce = {reduce}, optimizer = adamw"), judge=judge)
    kept = [columns["mask"][i] for i in range(8)]
    assert any(not mask.any() for mask in kept), "a row without a token in the loss"
    model, rows = expected(stage, columns, kept)
    loss = REDUCED[reduce](rows)
    loss.backward()
    limit_micro_batch(stage.plan, node, micro)
    stage.told = Report("")
    stage.act(node, columns)
    assert stage.told.sums["loss"][0] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    assert stage.told.sums["grad_norm"][0] == pytest.approx(norm(model), rel=1e-5)
    term = "loss/value_clip" if node == "critic.update" else "loss/clip"
    assert stage.told.sums[term][1] == columns["mask"].values.sum() < len(columns["response"].values)


@pytest.mark.parametrize("micro", [0, 3])
def test_pairs_and_their_figures(micro):
    stage, columns = built(PAIRS)
    model, rows = pair_loss(stage, columns, None)
    torch.cat(rows).mean().backward()
    limit_micro_batch(stage.plan, "actor.update", micro)
    stage.act("actor.update", columns)
    told = {name: total / max(weight, 1) for name, (total, weight) in stage.told.sums.items()}
    assert (
        told["loss"]
        == pytest.approx(told["loss/dpo"])
        == pytest.approx(float(torch.cat(rows).detach().mean()), rel=1e-5)
    )
    assert told["grad_norm"] == pytest.approx(norm(model), rel=1e-5)
    z = -10 * torch.log(torch.expm1(torch.cat(rows).detach()))  # from -log sigmoid(z / 10)
    assert told["dpo/margin"] == pytest.approx(float(z.mean()), rel=1e-4) and told["dpo/accuracy"] == float(
        (z > 0).double().mean()
    )


@pytest.mark.parametrize("left", [0, 1])
def test_a_mask_that_leaves_nothing_or_little(rolled, judge, left):
    stage, columns = built(ROLLOUT, judge=judge)
    values = np.zeros(len(columns["mask"].values), bool)
    values[:left] = True
    columns = columns | {"mask": ColumnData(values, columns["mask"].offsets)}
    for name in ("advantage", "old_logp"):  # what is not looked at may be anything
        columns[name] = ColumnData(
            np.where(values, columns[name].values, np.nan).astype(np.float32), columns[name].offsets
        )
    stage.act("actor.update", columns)
    assert stage.told.sums["updates"] == (1, 0) and math.isfinite(stage.told.sums["loss"][0])
    assert (stage.told.sums["grad_norm"][0] == 0) == (left == 0) and stage.told.sums["loss/clip"][1] == left


def test_a_round_without_rows_takes_no_step(paired):
    stage, _ = paired
    none = np.zeros(0, np.int64)
    report = Report("")
    before = [s.tensor.clone() for s in stage.engines.trainers["actor"].shards()]
    stage.training.update(
        NodeBatch(stage.plan.graph.node("actor.update"), TASK, Batch(share(none, 0, 0, {}), none, {}), report)
    )
    assert report.remarks == ["`actor.update` (line 14 of tiny.rlg) has no rows in iteration 3: it takes no step"]
    assert "updates" not in report.sums
    assert all(torch.equal(a, s.tensor) for a, s in zip(before, stage.engines.trainers["actor"].shards(), strict=True))


def test_a_value_that_is_not_finite_is_told_once_and_goes_on(judge):
    stage, columns = built(ROLLOUT, judge=judge)
    stage.context.watch.stops = False
    next(s.tensor for s in stage.engines.trainers["critic"].shards() if s.name == "score.weight")[0, 0] = math.inf
    found = stage.act("critic.infer", columns)["value"]
    assert not np.isfinite(found.values).any() and stage.told.sums["wrong/value"][0] == 8
    columns["value"] = ColumnData(np.full(25, np.nan, np.float32), found.offsets)
    stage.act("critic.update", columns)
    assert stage.told.sums["skipped"][0] == 1 and stage.told.sums["wrong/value"][0] == 8


# Folders of weights.


def test_a_critic_is_saved_as_transformers_has_it(judge, tmp_path):
    """Its folder gives transformers the same scores, and is what a reward model begins from."""
    from transformers import AutoModelForSequenceClassification

    stage, columns = built(ROLLOUT, judge=judge)
    stage.act("critic.update", columns)
    stage.checkpoints.save("critic", str(tmp_path / "critic"))
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert model.num_labels == 1 and not any(told.values())
    scores = [model(sequence(columns, i, "prompt", "response")).logits[0].detach() for i in range(8)]
    again = staged(ROLLOUT, judge=str(tmp_path / "critic"))
    assert close(again.act("judge.infer", columns)["score"].values, scores) and len(np.unique(torch.cat(scores))) > 5
    model = shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    deploy = stage.plan.deploy
    (model / "chat_template.jinja").write_text("{{ messages }}")
    policy = replace(deploy.models["policy"], path=str(model))
    stage.context.plan = replace(stage.plan, deploy=replace(deploy, models={**deploy.models, "policy": policy}))
    stage.checkpoints.save("actor", str(tmp_path / "actor"))
    assert {p.name for p in (tmp_path / "actor").iterdir()} == {p.name for p in model.iterdir()}
    for file in ("config.json", "chat_template.jinja"):
        assert (tmp_path / "actor" / file).read_text() == (model / file).read_text()
    modes = {p.stat().st_mode for folder in ("actor", "critic") for p in (tmp_path / folder).iterdir()}
    assert modes == {(tmp_path / "model" / "chat_template.jinja").stat().st_mode}


def test_a_critic_goes_on_from_a_checkpoint(judge, tmp_path):
    stage, columns = built(ROLLOUT, judge=judge)
    for _ in range(2):
        stage.act("critic.update", columns)
    partial = checkpoint.begin(tmp_path, 2)
    files, steps, failed = stage.checkpoints.write(str(partial), {})
    steps = dict(steps)
    assert (steps, failed) == ({"critic.update": 2}, "")
    path = checkpoint.commit(partial, checkpoint.Manifest(checkpoint.FORMAT, 2, 0, steps, {}, tuple(files)), 2)
    stage.act("critic.update", columns)
    again = staged(ROLLOUT, judge=judge)
    again.checkpoints.resume(str(path), checkpoint.read_manifest(path))
    again.act("critic.update", columns)
    for one, other in zip(
        stage.engines.trainers["critic"].shards(), again.engines.trainers["critic"].shards(), strict=True
    ):
        assert torch.equal(one.tensor, other.tensor), one.name


def rewritten(folder, change):
    """A folder whose tensors were changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


LACKING = {
    "no head": (
        lambda t: t.pop("score.weight"),
        "hold no `score.weight`, which the reward_model `judge` needs",
        "name a folder that AutoModelForSequenceClassification with num_labels = 1 saved",
    ),
    "two labels": (
        lambda t: t.update({"score.weight": torch.zeros(2, 128)}),
        "has the shape [2, 128], but `judge` needs [1, 128]",
        "AutoModelForSequenceClassification with num_labels = 1",
    ),
    "a bias": (
        lambda t: t.update({"score.bias": torch.ones(1)}),
        "`score.bias` in",
        "AutoModelForSequenceClassification",
    ),
    "no bias": (lambda t: t.update({"score.bias": torch.zeros(1)}), "", ""),
    "a policy's head too": (lambda t: t.update({"lm_head.weight": torch.zeros(16, 128)}), "", ""),
    "no layer": (
        lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
        "hold no `model.layers.1.mlp.up_proj.weight`, which the reward_model `judge`",
        "a language model's weights",
    ),
    "other sizes": (
        lambda t: t.update({"model.norm.weight": torch.ones(64)}),
        "`model.norm.weight` in",
        "the folder's config.json belongs to another model",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_a_folder_lacks_is_told_before_anything_is_started(tmp_path, case):
    change, message, help = LACKING[case]
    found = []
    try:
        planned(ROLLOUT, judge=rewritten(scoring(tmp_path / "judge"), change))
    except Fault as fault:
        found = fault.diagnostics
    assert len(found) == bool(message) and all(message in d.message and help in d.help for d in found)


def test_weights_that_cannot_be_read_are_told(tmp_path):
    folder = scoring(tmp_path / "judge", architecture="Qwen2ForTokenClassification")
    plan = planned(ROLLOUT, judge=str(folder))
    assert not weights.check(plan)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    (found,) = weights.check(plan)
    assert "model.safetensors cannot be read" in found.message


# Several updates.

WARM = (
    "node warm: actor.update(prompt, response) { loss = sft(), optimizer = adamw(lr = 2e-3, betas = [0.5, "
    "0.9], warmup = 4) }"
)
SECOND = (
    ("  source(4)", f"  {WARM}\n  source(4)"),
    ("-> critic.update, actor.update\n", "-> critic.update, actor.update\n  actor.generate -> warm\n"),
)
STEPS = (
    ("actor.update", {"lr": 1e-3, "betas": (0.9, 0.999)}),
    ("warm", {"lr": 5e-4, "betas": (0.5, 0.9)}),
    ("warm", {"lr": 1e-3, "betas": (0.5, 0.9)}),
    ("actor.update", {"lr": 1e-3, "betas": (0.9, 0.999)}),  # what the other stated does not stay
)


def test_two_updates_of_a_worker_share_its_optimizer(judge, tmp_path):
    stage, columns = built(ROLLOUT, *SECOND, judge=judge)
    reference = torch.optim.AdamW([s.tensor.clone() for s in stage.engines.trainers["actor"].shards()])
    for node, options in STEPS:
        apply = stage.engines.trainers["actor"]._optimizer._apply
        seen = []
        stage.engines.trainers["actor"]._optimizer._apply = lambda gradients, *rest, apply=apply, seen=seen: (
            seen.append([g.clone() * rest[0] for g in gradients]),
            apply(gradients, *rest),
        )
        stage.act(node, columns)
        stage.engines.trainers["actor"]._optimizer._apply = apply
        reference.param_groups[0].update(options)
        for parameter, gradient in zip(reference.param_groups[0]["params"], seen[0], strict=True):
            parameter.grad = gradient
        reference.step()
    assert stage.engines.steps == {"actor.update": 2, "warm": 2}
    for mine, theirs in zip(stage.engines.trainers["actor"].shards(), reference.param_groups[0]["params"], strict=True):
        assert torch.allclose(mine.tensor, theirs, atol=1e-6), mine.name
    assert stage.told.sums["updates"] == (4, 0) and stage.told.sums["warm/updates"] == (2, 0)
    assert stage.told.sums["loss"][0] == pytest.approx(
        stage.told.sums["warm/loss"][0] + stage.told.sums["actor.update/loss"][0]
    )
    partial = checkpoint.begin(tmp_path, 1)
    files, steps, _ = stage.checkpoints.write(str(partial), {})
    path = checkpoint.commit(partial, checkpoint.Manifest(checkpoint.FORMAT, 1, 0, steps, {}, tuple(files)), 2)
    again = staged(ROLLOUT, *SECOND, judge=judge)
    again.checkpoints.resume(str(path), checkpoint.read_manifest(path))
    for one in (stage, again):
        one.act("warm", columns)
    for one, other in zip(
        stage.engines.trainers["actor"].shards(), again.engines.trainers["actor"].shards(), strict=True
    ):
        assert torch.equal(one.tensor, other.tensor), one.name


def test_when_an_update_is_due(judge):
    stated = ("optimizer = adamw(lr = 1e-3)\n", "optimizer = adamw(lr = 1e-3)\n    after = 2\n    every = 3\n")
    late, always = (
        UpdateAttributes.of(planned(ROLLOUT, *changes, judge=judge).graph.node("actor.update"))
        for changes in ([stated], [])
    )
    assert [i for i in range(12) if late.due(i)] == [2, 5, 8, 11] and all(always.due(i) for i in range(12))


# The example's answers are two digits and the end token: of these draws one goes on.
@pytest.mark.parametrize(("most", "cut"), [(2, 8), (3, 1)])
def test_what_is_told_of_responses_and_steps(most, cut):
    stage = Stage(
        one_rank(
            (
                "adamw(lr = 2e-4, betas = [0.9, 0.99], weight_decay = 0, warmup = 20)",
                "adamw(lr = linear(4e-4, steps = 5))",
            ),
            (
                "{ samples = group, temperature = 1.0 }",
                f"{{ samples = group, temperature = 1.0, max_tokens = {most} }}",
            ),
        )
    )
    columns = stage.sampled()
    responses = [columns["response"][i] for i in range(8)]
    assert stage.told.sums["response_truncated"] == (cut, 8) and {*map(len, responses)} == {most}
    logp = stage.act("actor.infer", columns)["old_logp"]
    stage.act("actor.update", columns | {"old_logp": logp, "ref_logp": logp})
    stage.act("actor.update", columns | {"old_logp": logp, "ref_logp": logp})
    total, count = stage.told.sums["entropy"]
    assert count == 2 * sum(map(len, responses)) and 0 < total / count < np.log(16)
    assert stage.told.sums["lr"] == (pytest.approx(4e-4 + 3e-4), 2)


@pytest.mark.parametrize(("of", "per"), [("", "batch"), (" per prompt", "prompt")])
def test_a_state_is_a_factor_of_a_term(of, per):
    """`beta` as an update reads it: one number of each row."""
    stage = Stage(
        one_rank(
            ("  worker actor     : policy\n", f"  state beta : f32{of} = 0.5\n  worker actor     : policy\n"),
            ("ref_logp, advantage) {", "ref_logp, advantage, beta) {"),
            ("clip(0.2) + kl_coef * kl(low_var)", "clip(0.2) + 2 * beta * kl(k1)"),
            ("  param kl_coef = 0.001\n", ""),
            (
                "{ call = group_norm(), per = prompt }",
                "{ call = group_norm(), per = prompt }\n"
                f"  node host.next(reward, beta) -> beta {{ call = moving_mean(0.9), per = {per} }}",
            ),
            ("  host.reward -> host.advantage", "  host.reward -> host.advantage, host.next"),
        )
    )
    columns = stage.sampled()
    old = stage.act("actor.infer", columns)["old_logp"]
    ref = ColumnData(old.values - 0.25, old.offsets)
    stage.act(
        "actor.update", columns | {"old_logp": old, "ref_logp": ref, "beta": ColumnData(np.full(8, 0.75, np.float32))}
    )
    loss, clip, kl = (stage.told.sums[name] for name in ("loss", "loss/clip", "loss/kl"))
    assert kl[0] / kl[1] == pytest.approx(0.25, abs=1e-5)
    assert loss[0] == pytest.approx(clip[0] / clip[1] + 2 * 0.75 * 0.25, abs=1e-5)
    # A rank that has no rows of a mini-batch has no states of them either.
    none = np.zeros(0, np.int64)
    report = Report("")
    batch = Batch(
        share(none, 8, 8, {"response": 20}), none, {} if of else {"beta": ColumnData(np.zeros(0, np.float32))}
    )
    stage.training.update(NodeBatch(stage.plan.graph.node("actor.update"), TASK, batch, report))
    assert report.sums["updates"] == (1, 0) and report.sums["grad_norm"] == (0, 1)
