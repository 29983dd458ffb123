"""Terms of a loss in a file beside the program: what they are computed from, and what is told where they give what is
no loss."""

import inspect
import math
import re

import pytest
import torch
from stage import Stage, limit_micro_batch, one_rank, same
from tiny import PAIRS, built
from training_math import net, norm, token_logps

from msrl_graph import Fault, algorithms
from msrl_graph.runtime.process.task_report import RunError

pytestmark = pytest.mark.usefixtures("alone")
LOSS = "clip(0.2) + kl_coef * kl(low_var)"
CISPO = """
def cispo(logp, old_logp, advantage, *, high=0.28):
    weight = (logp - old_logp).exp().clamp(max=1 + high).detach()
    return -weight * advantage * logp, {"weight": weight, "most": float(weight.max())}
"""


def updated(path, source, call, reads="ref_logp, "):
    """A rank after an update with a term of a file."""
    path.write_text(source)
    stage = Stage(one_rank((LOSS, f'"{path}:{call}'), ("ref_logp, advantage", f"{reads}advantage")))
    columns = stage.sampled()
    columns |= stage.act("actor.infer", columns)
    columns |= stage.act("reference.infer", columns)
    stage.act("actor.update", columns)
    return stage


def test_a_copy_of_a_term_of_the_package_does_the_same(tmp_path):
    source = inspect.getsource(algorithms.load("loss", "kl")).replace("Tokens", "object")
    source = source.replace("@loss_term", "from typing import Literal\n")
    mine = updated(tmp_path / "mine.py", source, 'kl"(form = mse) * 0.1 + clip(0.2)')
    theirs = Stage(one_rank((LOSS, "kl(mse) * 0.1 + clip(0.2)")))
    columns = theirs.sampled()
    columns |= theirs.act("actor.infer", columns)
    columns |= theirs.act("reference.infer", columns)
    theirs.act("actor.update", columns)
    assert same(mine.whole(), theirs.whole())
    assert mine.told.sums["loss/kl"] == theirs.told.sums["loss/kl"]


SIMPO = """
def simpo(chosen: "LogProbs", rejected: "LogProbs", chosen_lengths, rejected_lengths, *, beta=2.0) -> "Rows":
    import torch

    def mean(logps, lengths):
        return torch.stack([row.mean() for row in logps.split(lengths.tolist())])

    return -torch.nn.functional.logsigmoid(beta * (mean(chosen, chosen_lengths) - mean(rejected, rejected_lengths)))
"""


def test_a_term_of_rows_has_the_log_probabilities_of_pairs(tmp_path):
    (tmp_path / "mine.py").write_text(SIMPO)
    call = f'"{tmp_path / "mine.py"}:simpo"(beta = 0.5)'
    stage, columns = built(PAIRS, ("dpo(0.1)", call))
    model = net(stage, "actor")
    expected = []
    for i in range(8):
        scored = [token_logps(model, columns, i, c) for c in ("chosen", "rejected")]
        better, worse = (float(whole.gather(1, tokens).detach().mean()) for whole, tokens in scored)
        expected.append(math.log1p(math.exp(-0.5 * (better - worse))))
    stage.act("actor.update", columns)
    assert stage.told.sums["loss/simpo"] == (pytest.approx(sum(expected), rel=1e-4), 8)


SPREAD = """
from msrl_graph import loss_term


@loss_term(scope="mini_batch")
def spread(logp, old_logp, advantage):
    return -(logp - old_logp).exp() * advantage / logp.std() + (logp - logp.mean()).square()
"""


@pytest.mark.parametrize("micro", [0, 3])
def test_a_term_of_the_whole_mini_batch_is_its_formula_of_all_tokens(tmp_path, micro):
    (tmp_path / "mine.py").write_text(SPREAD)
    stage = Stage(one_rank((LOSS, f'"{tmp_path / "mine.py"}:spread"'), ("ref_logp, advantage", "advantage")))
    columns = stage.sampled()
    columns |= stage.act("actor.infer", columns)
    model = net(stage, "actor")
    scored = [token_logps(model, columns, i, "response") for i in range(8)]
    logp = torch.cat([whole.gather(1, tokens).flatten() for whole, tokens in scored])
    old, advantage = (torch.from_numpy(columns[c].values.copy()) for c in ("old_logp", "advantage"))
    # Gradients go through the statistics too.
    loss = (-(logp - old).exp() * advantage / logp.std() + (logp - logp.mean()).square()).mean()
    loss.backward()
    limit_micro_batch(stage.plan, "actor.update", micro)
    stage.act("actor.update", columns)
    assert stage.told.sums["loss"][0] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert stage.told.sums["grad_norm"][0] == pytest.approx(norm(model), rel=1e-4)


def test_a_term_tells_figures_under_its_name(tmp_path):
    sums = updated(tmp_path / "mine.py", CISPO, 'cispo"(high = 0.1)', "").told.sums
    total, tokens = sums["cispo/weight"]
    assert total == pytest.approx(tokens, rel=1e-3)  # of the weights that drew the tokens
    assert sums["cispo/most"] == (pytest.approx(1, rel=1e-3), 1)
    assert sums["loss/cispo"][1] == tokens


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "return -logp.mean()",
            "`f` returned a tensor of shape (); expected shape (N,), one number per token",
        ),
        ("return 1.0", "`f` returned float 1.0; expected shape (N,), one number per token"),
        (
            "return advantage.nothing",
            (
                "(line 29 of grpo.rlg) failed on iteration 3: AttributeError: 'Tensor' object has no attribute "
                "'nothing', at FILE:2"
            ),
        ),
        (
            "return -logp.detach()",
            "the loss of `actor.update` (line 28 of grpo.rlg) has no gradient: nothing in it depends on the weights",
        ),
    ],
)
def test_what_is_no_loss_is_told(tmp_path, body, told):
    path = tmp_path / "mine.py"
    with pytest.raises(RunError) as error:
        updated(path, f"def f(logp, advantage):\n    {body}\n", 'f"()', "")
    assert told.replace("FILE", str(path)) in re.sub(r"\(\d+,\)", "(N,)", str(error.value))


def test_a_term_is_held_against_its_signature(tmp_path):
    (tmp_path / "mine.py").write_text(CISPO)
    with pytest.raises(Fault) as fault:
        one_rank((LOSS, f'"{tmp_path / "mine.py"}:cispo"'), ("old_logp, ref_logp, advantage", "advantage"))
    assert [d.message for d in fault.value.diagnostics] == [
        "`cispo` needs `old_logp`, which `actor.update` does not read"
    ]


def test_a_parameter_that_is_nearly_a_column_has_a_help(tmp_path):
    """The help, applied, is accepted."""
    (tmp_path / "mine.py").write_text(CISPO.replace("old_logp", "old_logps"))
    with pytest.raises(Fault) as fault:
        one_rank((LOSS, f'"{tmp_path / "mine.py"}:cispo"'))
    (told,) = (d for d in fault.value.diagnostics if d.code == "term-column")
    assert told.help.startswith("did you mean `old_logp`? ")
    (tmp_path / "fixed.py").write_text(CISPO)
    one_rank((LOSS, f'"{tmp_path / "fixed.py"}:cispo"'))


SLOPED = """
from msrl_graph import loss_term


@loss_term(scope="mini_batch")
def sloped(logp, old_logp, advantage, rounding):
    difference = logp - old_logp
    return -difference.exp() * advantage + difference.abs().where(difference.abs() > rounding, 0 * difference)
"""


@pytest.mark.parametrize("term", ["kl_cov(share = 0.9)", "FILE:sloped", "clip(0.2) + kl(abs, ref_logp = old_logp)"])
def test_a_kink_where_log_probabilities_are_equal_has_no_slope_of_rounding(tmp_path, term):
    """In the first step of an iteration every ratio is 1, but for rounding, which differs with the micro-batch: the
    gradient is that of -A r, whatever the micro-batch, and all of it."""
    (tmp_path / "mine.py").write_text(SLOPED)
    term = f'"{tmp_path / "mine.py"}:sloped"' if term.startswith("FILE") else term
    stage = Stage(one_rank((LOSS, term), ("ref_logp, advantage", "advantage")))
    columns = stage.sampled()
    columns |= stage.act("actor.infer", columns)
    model = net(stage, "actor")
    scored = [token_logps(model, columns, i, "response") for i in range(8)]
    logp = torch.cat([whole.gather(1, tokens).flatten() for whole, tokens in scored])
    assert 0 < (logp.detach() - torch.from_numpy(columns["old_logp"].values)).abs().max() < 1e-4
    (-(logp - logp.detach()).exp() * torch.from_numpy(columns["advantage"].values)).mean().backward()
    named = dict(model.named_parameters())
    exact = torch.cat([named[t.name].grad.flatten().float() for t in stage.plan.model("actor.update").weights])
    trainer = stage.engines.trainers["actor"]
    found = []
    trainer.step = lambda *_: found.append(gradient(trainer)) or 1.0  # looks at the gradient, and takes no step
    for micro in (0, 1, 2, 5):
        limit_micro_batch(stage.plan, "actor.update", micro)
        stage.act("actor.update", columns)
        stage.training.stepped = False
    for one in found:
        assert torch.nn.functional.cosine_similarity(one, exact, dim=0) > 0.99999
        largest = float(exact.abs().max())
        assert (one - exact).abs().max() < 1e-5 * largest, (one - exact).abs().max() / largest


def gradient(trainer):
    """What a rank has of the gradient so far, which is released as by a step."""
    parts = [p.grad for p in trainer._parameters]
    found = torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten().clone() for g in parts])
    for p in trainer._parameters:
        p.grad = None
    return found
