"""Terms of a loss are per row, or of the whole mini-batch: what does not keep to it is found before a run."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from tiny import PAIRS, ROLLOUT, SCORES, planned, scoring

from msrl_graph import algorithms
from msrl_graph.runtime.rank import loss, loss_split_check

# A term of the package -> the program, its update, and what it is called with there.
CALLS = {
    "bradley_terry": (SCORES, "judge.update", "bradley_terry(0.5)"),
    "cispo": (ROLLOUT, "actor.update", "cispo(low = 0.3)"),
    "clip": (ROLLOUT, "actor.update", "clip(0.2, dual = 3.0)"),
    "clip_cov": (ROLLOUT, "actor.update", "clip_cov(share = 0.01, least = 0)"),
    "distil": (ROLLOUT, "actor.update", "distil(reverse)"),
    "dpo": (PAIRS, "actor.update", "dpo(form = ipo)"),
    "entropy": (ROLLOUT, "actor.update", "entropy()"),
    "kl": (ROLLOUT, "actor.update", "kl()"),
    "kl_cov": (ROLLOUT, "actor.update", "kl_cov(0.01)"),
    "sft": (ROLLOUT, "actor.update", "sft()"),
    "masked": (ROLLOUT, "actor.update", "masked(gen_logp = ref_logp, ratio = sequence)"),
    "truncated": (ROLLOUT, "actor.update", "truncated(gen_logp = ref_logp)"),
    "trusted": (ROLLOUT, "actor.update", "trusted(gen_logp = ref_logp)"),
    "value_clip": (ROLLOUT, "critic.update", "value_clip()"),
}
LOSS = "clip(0.2, ratio = sequence) + 0.1 * kl() - 0.01 * entropy() + 0.1 * distil(reverse)"


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return str(scoring(tmp_path_factory.mktemp("judge") / "model"))


def update(term, judge):
    """A graph, and an update in it with this term as its loss."""
    text, name, call = CALLS[term]
    graph = planned(text, judge=judge).graph
    if name != "actor.update":
        return graph, graph.node(name)
    graph = planned(
        text, ("loss = dpo(0.1)" if text == PAIRS else LOSS, f"loss = {call}" if text == PAIRS else call), judge=judge
    ).graph
    return graph, graph.node(name)


def test_every_term_of_the_package_is_looked_at():
    assert {*CALLS} == {name for kind, name in algorithms.library() if kind == "loss"}


@pytest.mark.parametrize("term", CALLS)
@given(seed=st.integers(0, 2**32))
@examples(5)
def test_a_term_is_per_row_or_says_that_it_is_not(judge, term, seed):
    graph, node = update(term, judge)
    if not loss.needs_mini_batch(node):
        assert loss_split_check.is_per_row(graph, node, seed)


def own(tmp_path, judge, source, parameters="logp, old_logp, advantage", rest="", beside=""):
    """What is found of a term with this body; `beside`: what the loss adds it to."""
    path = tmp_path / "mine.py"
    body = (
        source
        if "def " in source
        else f"def term({parameters}){rest}:\n    import torch\n    r = (logp - old_logp).exp()\n    {source}\n"
    )
    path.write_text(body)
    return loss_split_check.check_terms(planned(ROLLOUT, (LOSS, f'{beside}"{path}:term"'), judge=judge))


@pytest.mark.parametrize(
    "body",
    [
        "return -r * (advantage - advantage.mean())",
        "return -r * advantage / (advantage.std() + 1e-6)",
        "return -r * advantage / len(logp)",
        "return torch.where(advantage >= advantage.quantile(0.999), logp, -r * advantage)",
        (
            "k = int(0.0002 * len(logp)); return -r * advantage * torch.ones_like(logp).index_fill(0, "
            "advantage.topk(k).indices, 0)"
        ),
        "return -r * advantage * (torch.rand(len(logp)) < 0.5)",
        "return -r * advantage.roll(1)",
        "return -r.detach() * advantage + logp.mean() - logp.mean().detach()",  # the same numbers, other slopes
        "return -r * advantage * advantage.cumsum(0)",
    ],
)
def test_a_statistic_of_what_is_beside_a_row_is_found(tmp_path, judge, body):
    (found,) = own(tmp_path, judge, body)
    assert (found.code, found.severity) == ("bad-scope", "error")
    assert found.message.startswith("`term` changes a row's loss when other rows are computed with it")


def test_what_remembers_is_found(tmp_path, judge):
    (found,) = own(tmp_path, judge, "calls = []\ndef term(logp):\n    calls.append(1)\n    return -logp / len(calls)\n")
    assert found.severity == "error"


@pytest.mark.parametrize("term", ["kl_cov", "clip_cov"])
def test_the_package_s_statistics_are_found_without_their_mark(tmp_path, judge, term):
    source = inspect.getsource(inspect.getmodule(algorithms.load("loss", term))).replace('(scope="mini_batch")', "")
    source = source.replace("from .registry", "from msrl_graph.algorithms.registry").replace(
        "rng: np.random.Generator,", ""
    )
    source = source.replace("rng.", "np.random.default_rng(0).").replace(
        "import torch\n", "import numpy as np; import torch\n"
    )
    (found,) = own(tmp_path, judge, source.replace(f"def {term}(", "def term("))
    assert found.severity == "error"


@pytest.mark.parametrize(
    ("body", "parameters", "rest"),
    [
        ("return -r * advantage", "logp, old_logp, advantage", ""),
        # A statistic of the row alone.
        (
            "return torch.cat([x - x.mean() for x in (-r * advantage).split(lengths.tolist())])",
            "logp, old_logp, advantage, lengths",
            "",
        ),
        (
            "return torch.stack([x.sum() for x in (-r).split(lengths.tolist())])",
            "logp, old_logp, lengths",
            ' -> "Rows"',
        ),
        ("return -r * advantage.clamp(max=0).sqrt()", "logp, old_logp, advantage", ""),  # nan everywhere but at 0
    ],
)
def test_what_looks_at_each_row_alone_is_not(tmp_path, judge, body, parameters, rest):
    assert own(tmp_path, judge, body, parameters, rest) == []


def test_what_cannot_be_run_is_told(tmp_path, judge):
    (found,) = own(tmp_path, judge, "raise ValueError('no')")
    assert (found.severity, found.message) == ("warning", "`term` could not be tried on made-up rows: ValueError: no")


def test_what_is_no_number_a_token_is_an_error_at_the_term(tmp_path, judge):
    (found,) = own(tmp_path, judge, "return -(r * advantage).mean()")
    assert (found.code, found.severity) == ("bad-value", "error")
    assert found.message.startswith("on made-up rows `term` returned a tensor of shape (); expected shape (")
    assert found.span.line > 0 and "`reduce`" in found.help and "`-> Rows`" in found.help


def test_one_number_a_row_is_told_and_its_help_is_true(tmp_path, judge):
    found = []
    for rest in ("", ' -> "Rows"'):
        (folder := tmp_path / str(len(rest))).mkdir()  # a file is read once
        body = "return torch.stack([x.sum() for x in (-r).split(lengths.tolist())])"
        found.append([d.severity for d in own(folder, judge, body, "logp, old_logp, lengths", rest)])
    assert found == [["error"], []]


def test_a_mark_makes_it_one_of_the_whole(tmp_path, judge):
    source = "from msrl_graph.algorithms.registry import loss_term\n\n\n@loss_term(scope='mini_batch')\n"
    assert own(tmp_path, judge, source + "def term(logp):\n    return -logp / logp.std()\n") == []


def test_made_up_rows_have_their_columns_shapes(judge):
    graph, node = update("distil", judge)
    seen, made = loss_split_check._made_up(graph, node, np.random.default_rng(0), (4, 3), False)
    tokens = int(seen.lengths["response"].sum())
    assert seen.columns["top_logp"].values.shape == made["given"]["response"].values.shape == (tokens, 3)
    assert made["logp"]["response"].values.shape == (tokens,)


@pytest.mark.parametrize(
    ("body", "flat"),
    [("return advantage", True), ("return -(logp.detach() * advantage)", True), ("return -logp * advantage", False)],
)
def test_a_loss_without_a_gradient_is_found_before_the_run(tmp_path, judge, body, flat):
    source = f"def term(logp, advantage):\n    {body}\n"
    found = own(tmp_path, judge, source)
    assert [d.message for d in found] == flat * [
        "the loss of `actor.update` has no gradient: nothing in it depends on the weights"
    ]
    assert all(d.severity == "error" and d.span.line > 0 for d in found)


def test_a_term_without_a_gradient_may_be_added_to_one_that_has(tmp_path, judge):
    source = "def term(advantage):\n    return advantage\n"
    assert own(tmp_path, judge, source, beside="clip(0.2) + ") == []
