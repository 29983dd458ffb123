"""Params of the algorithms of the package: one name for one concept, and each one that is there has its effect."""

from pathlib import Path

import pytest

from msrl_graph import algorithms, check
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.ir.attributes import GenerateAttributes, UpdateAttributes

NAMES = sorted(path.stem for path in Path(algorithms.FOLDER).glob("*.rlg"))
PROBE = 0.015625  # which no algorithm has
WITHOUT_CLIP = {"bradley_terry", "dpo", "kl_cov", "rejection"}
OF_PAIRS = {"bradley_terry", "dpo"}


def graph(name, **sets):
    """The graph of an algorithm of the package; a param that has no effect is told of as a warning."""
    result = translate(read_source(name), sets={key: str(value) for key, value in sets.items()}, until="graph")
    assert not [w for w in result.warnings if w.code == "unused-param"], name
    return result.graph


def numbers(value):
    """All numbers that an expression holds."""
    return [value.value, *(n for part in value.args for n in numbers(part))]


def test_all_are_here():
    assert len(NAMES) >= 19


@pytest.mark.parametrize("name", NAMES)
def test_lr_is_the_rate_of_what_is_trained(name):
    before = graph(name)
    after = graph(name, lr=PROBE)
    kinds = {w.name: w.kind for w in before.workers}
    for node, other in zip(before.verb("update"), after.verb("update"), strict=True):
        was, now = (UpdateAttributes.of(n).rate.value for n in (node, other))
        assert now == (was if kinds[node.worker] == "value" else PROBE) and was != PROBE
        # Nothing else of the update changes.
        rest = {key: numbers(e) for key, e in node.attributes.items() if key != "optimizer"}
        assert rest == {key: numbers(e) for key, e in other.attributes.items() if key != "optimizer"}


@pytest.mark.parametrize("name", [n for n in NAMES if "critic" in {w.name for w in check(n).workers}])
def test_critic_lr_is_the_rate_of_the_critic(name):
    found = {n.worker: UpdateAttributes.of(n).rate.value for n in graph(name, critic_lr=PROBE).verb("update")}
    assert found == {"critic": PROBE, "actor": 1e-6}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("param", ["clip_low", "clip_high"])
def test_the_bounds_of_the_ratio_have_one_name(name, param):
    plain = graph(name)
    there = param in plain.params
    assert there is (name not in WITHOUT_CLIP and (name, param) != ("cispo", "clip_low"))
    if there:
        (actor,) = [n for n in graph(name, **{param: PROBE}).verb("update") if n.worker == "actor"]
        assert PROBE in numbers(UpdateAttributes.of(actor).loss)
    if "clip_low" in plain.params and plain.params["clip_low"] == plain.params["clip_high"]:
        assert graph(name, clip_low=PROBE).params["clip_high"] == PROBE  # a bound of both sides


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OF_PAIRS])
def test_group_is_how_many_responses_a_prompt_has(name):
    samples = [GenerateAttributes.of(n).samples for n in graph(name, group=7).verb("generate")]
    assert 7 in samples and graph(name).params["group"] != 7


@pytest.mark.parametrize("name", NAMES)
def test_the_values_are_what_they_were_before_they_had_names(name):
    rates = {"bradley_terry": 1e-5, "dpo": 5e-7}
    graph_of = graph(name)
    assert graph_of.params["lr"] == rates.get(name, 1e-6)
    clips = {"dapo": (0.2, 0.28), "gspo": (0.0003, 0.0004), "cispo": (None, 4.0)}
    expected = (None, None) if name in WITHOUT_CLIP else clips.get(name, (0.2, 0.2))
    assert (graph_of.params.get("clip_low"), graph_of.params.get("clip_high")) == expected


def test_a_statement_that_takes_the_place_of_a_param_is_told_when_it_is_set(tmp_path):
    text = "import grpo\nalgorithm mine extends grpo { node actor.update { optimizer = adamw(lr = 1e-4) } }\n"
    path = tmp_path / "mine.rlg"
    path.write_text(text)
    (told,) = [
        w for w in translate(read_source(path), sets={"lr": "1e-3"}, until="graph").warnings if w.code == "unused-param"
    ]
    assert "`lr` is set, but nothing in `mine` uses it" in told.message
    assert not translate(read_source(path), until="graph").warnings  # and only then
