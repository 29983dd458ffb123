"""The functions and loss terms of the package against what trl and verl make of the same inputs: relative 1e-9, in
float64.

tests/peers/*.json holds inputs and results; `make peer-values` has the peers make them again. Gradients are compared
besides: they show the factor of each token. A check gives our result in the peer's terms: where the peer's definition
is another, it applies the difference, named in its docstring, and the rest must agree.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from folders import ROOT, TESTS

from msrl_graph import algorithms
from msrl_graph.ir.graph import Expr, Node
from msrl_graph.runtime.rank import loss

PEERS = ("trl", "verl")
NEAR = {"rel": 1e-9, "abs": 1e-12}
CHECKS = {}  # the peer's function -> our names, and the check
FUNCTIONS = {name: algorithms.load(kind, name) for kind, name in algorithms.library()}
# Functions that no peer has: the test that has values by hand.
BY_HAND = {
    **dict.fromkeys(("adamw", "sgd", "muon"), "backends/optimizer/test_steps.py::test_steps_are_those_of_torch[0]"),
    **dict.fromkeys(
        ("constant", "linear", "cosine"), "runtime/rank/test_learning_rate.py::test_schedules_are_those_of_transformers"
    ),
    **dict.fromkeys(
        ("text", "own_text", "add_message"), "scenarios/agents/test_two_tokenizers.py::test_what_goes_to_another_model"
    ),
    "around": "algorithms/test_advantages.py::test_around_by_hand",
    "best_of_n": "algorithms/test_filters.py::test_best_of_n_by_hand",
    "best_random": "algorithms/test_filters.py::test_best_random_is_the_best_and_any_other",
    "best_worst": "algorithms/test_filters.py::test_best_worst_by_hand",
    "bradley_terry": "algorithms/test_losses.py::test_bradley_terry_by_hand",
    "contains": "algorithms/test_rewards.py::test_words_in_common_by_hand",
    "exact_match": "algorithms/test_grpo.py::test_rewards",
    "length_reward": "algorithms/test_rewards.py::test_length_reward_by_hand",
    "matches": "algorithms/test_rewards.py::test_matches_is_of_the_whole_response",
    "math_verify": "algorithms/test_judges.py::test_equal",
    "mixed": "algorithms/test_filters.py::test_mixed_keeps_groups_whose_answers_differ",
    "moving_mean": "algorithms/test_advantages.py::test_moving_mean_by_hand",
    "shuffle": "algorithms/test_grpo.py::test_rewards",
    "tagged": "algorithms/test_rewards.py::test_tags_are_opened_and_closed_once_in_their_order",
    "weighted_sum": "algorithms/test_advantages.py::test_weighted_sum_by_hand",
}


@cache
def told(peer):
    return json.loads((TESTS / "peers" / f"{peer}.json").read_text())


def check(function, *ours):
    def mark(f):
        CHECKS[function] = (ours, f)
        return f

    return mark


def arrays(rows):
    return [np.array(row, np.float64) for row in rows]


def flat(rows):
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def tensors(batch, *names):
    return [flat(batch[name]) for name in names]


def tokens(batch):
    return [np.zeros(n, np.int32) for n in batch["lengths"]]


def differentiable(batch, name):
    return flat(batch[name]).requires_grad_()


def gradient(of, total):
    return torch.autograd.grad(total, of)[0]


def term(name, *given, **options):
    """A term of a loss without the figures that it may tell beside it."""
    return told_by(name, *given, **options)[0]


def told_by(name, *given, **options):
    """A term of a loss, and the figures that it tells beside it."""
    found = FUNCTIONS[name](*given, **options)
    return found if isinstance(found, tuple) else (found, {})


def share(figure):
    """A mean as verl's, over n + 1e-8."""
    return figure.double().sum() / (len(figure) + 1e-8)


def bounded(batch, one, two, low, high):
    """`two`, moved where `one - two` would be out of its bounds."""
    one, two = tensors(batch, one, two)
    difference = one - two
    return torch.where((difference < low) | (difference > high), one - difference.clamp(low, high), two)


def reduced(per_token, lengths, kind, *argument, rows=None, tokens=None, term="sft"):
    """The loss of a mini-batch of `rows` rows and `tokens` tokens, these here in two micro-batches."""
    how = Expr("call", kind, tuple(Expr("number", a) for a in argument))
    node = Node("actor.update", "actor", "update", (), attributes={"loss": Expr("call", term), "reduce": how})
    whole = loss.LossNormalizer(sum(lengths) if tokens is None else tokens, len(lengths) if rows is None else rows)
    half = len(lengths) // 2
    at = sum(lengths[:half])
    parts = ((per_token[:at], lengths[:half]), (per_token[at:], lengths[half:]))
    return sum(loss.reduce(node, part, torch.tensor(n), whole) for part, n in parts)


def by_group(batch, advantage):
    """The advantages of each group, and of groups of one, which must be 0, what `alone` makes of the score."""
    found = []
    for group in dict.fromkeys(batch["groups"]):
        rows = [i for i, g in enumerate(batch["groups"]) if g == group]
        found += advantage([tokens(batch)[i] for i in rows], np.array([batch["score"][i] for i in rows]))
    return found


def alone(batch, ours, scale=1.0):
    """Groups of one, which have advantage 0 here, given the score times `scale`."""
    for i, group in enumerate(batch["groups"]):
        if batch["groups"].count(group) == 1:
            assert (ours[i] == 0).all()
            ours[i] = np.full(len(ours[i]), batch["score"][i] * scale)
    return ours


def whitened_as_verl(ours, raw):
    """verl's masked mean divides by n + 1e-8, in the mean and in the variance, where we divide by n: one linear map of
    all tokens."""
    x = np.concatenate(raw)
    n = len(x)
    mean = x.mean()
    variance = x.var(ddof=1)
    off = mean * 1e-8 / (n + 1e-8)
    theirs = n / (n + 1e-8) * (variance + n / (n - 1) * off**2)
    return [a * math.sqrt((variance + 1e-8) / (theirs + 1e-8)) + off / math.sqrt(theirs + 1e-8) for a in ours]


@check("compute_grpo_outcome_advantage", "group_norm")
def group_norm(batch, std):
    """verl gives a group of one its score, over 1 + 1e-6 with the division by std."""
    ours = by_group(batch, lambda *rows: FUNCTIONS["group_norm"](*rows, std=std))
    return {"advantage": alone(batch, ours, 1 / (1 + 1e-6) if std else 1.0)}


@check("compute_rloo_outcome_advantage", "leave_one_out")
def leave_one_out(batch):
    """verl gives a group of one its score."""
    return {"advantage": alone(batch, by_group(batch, FUNCTIONS["leave_one_out"]))}


@check("compute_opo_outcome_advantage", "optimal_baseline")
def optimal_baseline(batch):
    """verl gives a group of one its score."""
    return {"advantage": alone(batch, by_group(batch, FUNCTIONS["optimal_baseline"]))}


@check("compute_remax_outcome_advantage", "over_baseline")
def over_baseline(batch, kl):
    """The scores in reverse stand for those of the greedy responses."""
    rows = zip(
        tokens(batch),
        batch["score"],
        batch["score"][::-1],
        arrays(batch["old_logp"]),
        arrays(batch["ref_logp"]),
        strict=True,
    )
    return {"advantage": [FUNCTIONS["over_baseline"](*row, kl=kl) for row in rows]}


@check("compute_gae_advantage_return", "gae")
def gae(batch, kl, gamma, lam):
    value, old, ref = (arrays(batch[name]) for name in ("value", "old_logp", "ref_logp"))
    given = (tokens(batch), np.array(batch["score"]), value, old, ref, kl)
    raw, returns = FUNCTIONS["gae"](*given, gamma=gamma, lam=lam, whiten=False)
    ours, same = FUNCTIONS["gae"](*given, gamma=gamma, lam=lam)
    assert all(np.array_equal(a, b) for a, b in zip(returns, same, strict=True))
    return {"advantage": whitened_as_verl(ours, raw), "returns": returns}


@check("compute_reinforce_plus_plus_outcome_advantage", "discounted")
def discounted(batch, kl, gamma):
    """What is whitened are verl's returns: those of `gae` with values of 0 and lam = 1."""
    old, ref, zero = (arrays(batch[name]) for name in ("old_logp", "ref_logp", "old_logp"))
    given = (tokens(batch), np.array(batch["score"]))
    returns = FUNCTIONS["gae"](*given, [z * 0 for z in zero], old, ref, kl, gamma=gamma, lam=1.0)[1]
    ours = FUNCTIONS["discounted"](*given, old, ref, kl=kl, gamma=gamma)
    return {"advantage": whitened_as_verl(ours, returns), "returns": returns}


@check("apply_kl_penalty", "adaptive_kl")
def adaptive_kl(batch, kl_coef, target, horizon):
    """verl's mean over n tokens divides by n + 1e-8, and an empty response counts as one of KL 0 (ours: not at all)."""
    pairs = zip(arrays(batch["old_logp"]), arrays(batch["ref_logp"]), strict=True)
    kl = [(old - ref) * len(old) / (len(old) + 1e-8) if len(old) else np.zeros(1) for old, ref in pairs]
    return {"kl_coef": FUNCTIONS["adaptive_kl"](kl, [k * 0 for k in kl], kl_coef, target=target, horizon=horizon)}


@check("compute_policy_loss_vanilla", "clip")
def clip(batch, name, low, high, dual):
    """verl clamps log-ratios to +-20."""
    logp = differentiable(batch, "logp")
    advantage = flat(batch["advantage"])
    old = bounded(batch, "logp", "old_logp", -20, 20)
    ours, figures = told_by("clip", logp, advantage, old, low=low, high=high, dual=dual)
    inside = (flat(batch["logp"]) - flat(batch["old_logp"])).abs() <= 20
    return {"tokens": ours, "gradient": gradient(logp, ours.sum()) * inside, "clipped": share(figures["clipped"])}


@check("compute_policy_loss_gspo", "clip")
def gspo(batch, name, low, high, dual):
    """verl clamps a sequence's log-ratio to 10 from above."""
    logp = differentiable(batch, "logp")
    advantage = flat(batch["advantage"])
    lengths = torch.tensor(batch["lengths"])
    rows = zip(arrays(batch["logp"]), arrays(batch["old_logp"]), strict=True)
    over = flat([[max(0.0, (new - old).mean() - 10)] * len(new) if len(new) else [] for new, old in rows])
    old = flat(batch["old_logp"]) + over
    ours, figures = told_by("clip", logp, advantage, old, lengths, low=low, high=high, ratio="sequence")
    return {"tokens": ours, "gradient": gradient(logp, ours.sum()) * (over == 0), "clipped": share(figures["clipped"])}


@check("compute_policy_loss_cispo", "cispo")
def cispo(batch, name, low, high, dual):
    """verl clamps log-ratios to +-20."""
    logp = differentiable(batch, "logp")
    advantage = flat(batch["advantage"])
    ours, figures = told_by("cispo", logp, bounded(batch, "logp", "old_logp", -20, 20), advantage, low=low, high=high)
    return {"tokens": ours, "gradient": gradient(logp, ours.sum()), "clipped": share(figures["clipped"])}


@check("compute_policy_loss_kl_cov", "kl_cov")
def kl_cov(batch, share, coef):
    logp = differentiable(batch, "logp")
    ours = term("kl_cov", logp, *tensors(batch, "old_logp", "advantage"), share=share, coef=coef)
    return {"tokens": ours, "gradient": gradient(logp, ours.sum())}


@check("compute_policy_loss_clip_cov", "clip_cov")
def clip_cov(batch, **options):
    """Which of the tokens within the bounds are chosen is chance: here all are."""
    logp = differentiable(batch, "logp")
    ours = term("clip_cov", logp, *tensors(batch, "old_logp", "advantage"), np.random.default_rng(0), **options)
    return {"tokens": ours, "gradient": gradient(logp, ours.sum())}


@check("kl_penalty", "kl")
def kl(batch, form):
    logp = differentiable(batch, "logp")
    ours = term("kl", logp, flat(batch["ref_logp"]), form=form.removesuffix("_kl"))
    return {"tokens": ours, "gradient": gradient(logp, ours.sum())}


@check("compute_value_loss", "value_clip")
def value_clip(batch, range):
    values = differentiable(batch, "values")
    ours, figures = told_by("value_clip", values, *tensors(batch, "value", "returns"), range=range)
    return {"tokens": ours, "gradient": gradient(values, ours.sum()), "clipped": share(figures["clipped"])}


@check("compute_rollout_correction_weights", "truncated")
def truncated(batch, **options):
    """verl clamps log-ratios, and the sums of rows, to +-20."""
    found = term("truncated", *drawn(batch), **options)
    return {"tokens": found.clamp(min=math.exp(-20))}


@check("compute_rollout_correction_weights, within bounds", "masked")
def masked(batch, **options):
    return {"tokens": term("masked", *drawn(batch), **options)}


@check("compute_rollout_rejection_mask", "trusted")
def trusted(batch, **options):
    return {"tokens": term("trusted", *drawn(batch), **options)}


def drawn(batch):
    return *tensors(batch, "old_logp", "gen_logp"), torch.tensor(batch["lengths"])


@check("agg_loss")
def reduce(batch, mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None):
    """verl's mean over a row's n tokens divides by n + 1e-8, it multiplies by the number of ranks, whose gradients it
    then averages, and with no number of rows given it leaves out empty ones (its trainer gives it, and counts them, as
    we do)."""
    lengths = batch["lengths"]
    per_token = flat(batch["advantage"])
    rows = global_batch_size or sum(n > 0 for n in lengths)
    if mode == "token-mean":
        found = reduced(per_token, lengths, "tokens", tokens=batch_num_tokens)
    elif mode == "seq-mean-token-mean":
        found = reduced(per_token * flat([[n / (n + 1e-8)] * n for n in lengths]), lengths, "sequences", rows=rows)
    else:
        found = reduced(per_token, lengths, "constant", loss_scale_factor, rows=rows)
    return {"loss": found * dp_size}


@check("compute_pf_ppo_reweight_data", "resample", "pow")
def resample(batch, weights, k):
    """verl adds 1e-8 to each weight, so that no row has no chance."""
    drawn = Draws()
    FUNCTIONS["resample"](
        np.array(batch["score"]), drawn, weights=FUNCTIONS["pow"](k=k) if weights == "pow" else weights
    )
    score = np.array(batch["score"])
    of_one = {"pow": np.abs(score).max() ** k, "max_min": 1.0, "max_random": 0.4}[
        weights
    ]  # the largest weight, before it is a share
    return {"weights": drawn.chances / drawn.chances.max() * of_one + 1e-8}


class Draws:
    """In place of a generator: keeps the chances that it is asked to draw by."""

    def choice(self, rows, size, p):
        self.chances = p
        return np.arange(size) % rows


@check("DAPORewardManager", "overlong")
def overlong(batch, lengths, max, buffer, factor):
    """Past the longest length verl's goes on to fall (where nothing is that long), and the paper's stops."""
    ours = [FUNCTIONS["overlong"](np.zeros(n), 0.5, max=max, buffer=buffer, factor=factor) - 0.5 for n in lengths]
    return {"added": [a - factor * np.clip(n - max, 0, None) / buffer for a, n in zip(ours, lengths, strict=True)]}


@check("get_soft_overlong_punishment", "overlong")
def overlong_of_trl(batch, lengths, **options):
    return {"added": [FUNCTIONS["overlong"](np.zeros(n), 0.0, **options) for n in lengths]}


@check("squad_metrics.compute_f1", "f1")
def f1(batch):
    return {"f1": [FUNCTIONS["f1"](response, answer) for response, answer in told("verl")["texts"]]}


@check("GRPOTrainer._compute_loss", "clip", "cispo", "kl", "entropy")
def grpo(batch, loss_type, level, low, high, delta, beta, entropy):
    """trl does not clamp the KL estimator, takes one advantage a row for sequences, and bounds CISPO's ratio by `high`
    itself."""
    lengths = batch["lengths"]
    logp, old, ref, advantage, spread = (
        differentiable(batch, "logp"),
        *tensors(batch, "old_logp", "ref_logp", "advantage", "entropy"),
    )
    if level == "sequence":
        advantage = flat([[s] * n for s, n in zip(batch["score"], lengths, strict=True)])
    if loss_type == "cispo":
        ours = term("cispo", logp, old, advantage, high=high - 1)
    else:
        ours = term("clip", logp, advantage, old, torch.tensor(lengths), low=low, high=high, dual=delta, ratio=level)
    d = ref - logp
    clamped = (d.abs() > 20) | (d.exp() - d - 1 > 10)
    ours = (
        ours + beta * torch.where(clamped, d.exp() - d - 1, term("kl", logp, ref)) - entropy * term("entropy", spread)
    )
    how = {
        "bnpo": ("tokens",),
        "dapo": ("tokens",),
        "cispo": ("tokens",),
        "grpo": ("sequences",),
        "dr_grpo": ("constant", 16),
    }[loss_type]
    total = reduced(ours, lengths, *how)
    return {"loss": total, "gradient": gradient(logp, total)}


@check("DPOTrainer._compute_loss", "dpo", "sft")
def dpo(batch, loss_type, beta, smoothing):
    """trl's smoothed loss of a single pair is the one that it calls `aot`. Its margins are times beta, and with IPO too
    of sums."""
    chosen = differentiable(batch, "chosen")
    rejected = differentiable(batch, "rejected")
    lengths = [torch.tensor(batch[f"{side}_lengths"]) for side in ("chosen", "rejected")]
    if loss_type == "sft":
        rows = []
        total = reduced(term("sft", chosen), batch["chosen_lengths"], "tokens")
        told = {}
    else:
        given = (chosen, rejected, *tensors(batch, "ref_chosen", "ref_rejected"), *lengths)
        form = "sigmoid" if loss_type == "aot" else loss_type
        rows, told = told_by("dpo", *given, beta=beta, form=form, smoothing=smoothing)
        total = reduced(rows, [1] * len(rows), "rows", term="dpo")
        if form == "ipo":
            told = told_by("dpo", *given)[1]
        told = {"margins": beta * told["margin"].mean(), "accuracies": float(told["accuracy"].mean())}
    if loss_type == "aot":
        return {"rows": rows}
    slopes = torch.autograd.grad(total, (chosen, rejected), materialize_grads=True)
    return {"rows": rows, "loss": total, "gradient": torch.cat(slopes), **told}


@check("GKDTrainer.generalized_jsd_loss", "distil")
def distil(batch, form):
    policy, teacher = (
        torch.tensor(told("trl")["distributions"][name], dtype=torch.float64) for name in ("policy", "teacher")
    )
    return {"tokens": term("distil", teacher, policy, form=form)}


def numbers(given):
    """All numbers of a result, in order, whatever it is made of."""
    if isinstance(given, torch.Tensor):
        assert given.dtype == torch.float64
        return given.detach().flatten().tolist()
    if isinstance(given, np.ndarray):
        assert given.dtype == np.float64
        return given.tolist()
    return [x for part in given for x in numbers(part)] if isinstance(given, list) else [float(given)]


def cases():
    for peer in PEERS:
        for i, value in enumerate(told(peer)["values"]):
            yield pytest.param(peer, value, id=f"{peer} {value['function']} {value['batch'] or i} {i}")


@pytest.mark.parametrize(("peer", "value"), list(cases()))
def test_agrees_with_peers(peer, value):
    given = told(peer)["pairs" if value["function"].startswith("DPO") else "batches"].get(value["batch"])
    ours = CHECKS[value["function"]][1](given, **value["options"])
    assert ours.keys() == value["gives"].keys()
    for name, expected in value["gives"].items():
        assert numbers(ours[name]) == pytest.approx(numbers(expected), **NEAR), name


def test_nothing_is_left_out():
    compared = {value["function"] for peer in PEERS for value in told(peer)["values"]}
    assert compared == set(CHECKS)
    held = {name for ours, _ in CHECKS.values() for name in ours}
    runs = {
        name
        for kind, name in algorithms.library()
        if kind != "optimizer" or algorithms.optimizer(Expr("call", name)).runs
    }
    assert not held & set(BY_HAND) and held | set(BY_HAND) == runs


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))  # one of a test's functions at a time
def test_values_by_hand_are_compared(turn):
    """A test with values by hand fails if the function returns another value."""
    functions = defaultdict(list)
    for name, test in BY_HAND.items():
        functions[test].append(name)
    assert all(len(names) <= 3 for names in functions.values())
    broken = {test: names[turn] for test, names in functions.items() if len(names) > turn}
    environment = {"PYTHONPATH": str(TESTS / "support"), "BROKEN": " ".join(broken.values())}
    options = ("-q", "-rfE", "--tb=no", "-p", "broken_functions", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in broken)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    kept = [
        f"{name} in {test}"
        for test, name in broken.items()
        if not re.search(rf"(FAILED|ERROR) \S*{re.escape(test)}", done.stdout)
    ]
    assert not kept, f"{kept} passed although the function returned another value\n{done.stdout}{done.stderr}"


def test_both_peers_had_the_same_inputs():
    assert told("trl")["batches"] == told("verl")["batches"]
