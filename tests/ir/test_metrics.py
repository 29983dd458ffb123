"""The registry of metrics: each name is there once, and some code reports it.

That each key of a line is in it, each run of the tests' scenarios shows (tests/support/place.py).
"""

import ast

import pytest
from folders import ROOT

from msrl_graph import compile
from msrl_graph.ir.iteration_metrics import ITERATION_TABLES
from msrl_graph.ir.metric import PLACEHOLDERS
from msrl_graph.ir.metrics import (
    EVALUATION_METRICS,
    EVALUATION_TABLES,
    ITERATION_METRICS,
    PROMETHEUS,
    RESERVED,
    find_metric,
)

PACKAGE = ROOT / "msrl_graph"
EXAMPLE = ROOT / "examples" / "arithmetic" / "grpo.rlg"
ALL = {metric.name: metric for metric in (*ITERATION_METRICS, *EVALUATION_METRICS)}


@pytest.fixture(scope="module")
def texts():
    """All texts in the code of runs, also the pieces of f-strings."""
    folders = ("runtime", "algorithms")
    trees = [ast.parse(path.read_text()) for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    constants = (item.value for tree in trees for item in ast.walk(tree) if isinstance(item, ast.Constant))
    return "\n".join(text for text in constants if isinstance(text, str))


@pytest.mark.parametrize("metrics", [ITERATION_METRICS, EVALUATION_METRICS, PROMETHEUS])
def test_each_name_is_there_once(metrics):
    names = [metric.name for metric in metrics]
    assert len(names) == len({*names})
    assert sum(map(len, ITERATION_TABLES.values())) == len(ITERATION_METRICS)
    assert sum(map(len, EVALUATION_TABLES.values())) == len(EVALUATION_METRICS)


@pytest.mark.parametrize("name", ALL)
def test_some_code_of_a_run_reports_the_metric(name, texts):
    words = [part for part in ALL[name].parts() if part and part not in PLACEHOLDERS]
    for part in (piece for word in words for piece in word.split("/") if piece):
        assert part in texts, f"nothing in the code of runs reports `{part}`"


def test_every_placeholder_is_used():
    used = {placeholder for metric in ALL.values() for placeholder in metric.placeholders}
    assert used == {*PLACEHOLDERS}


def test_names_without_placeholders_are_reserved():
    assert {"iteration", "seconds", "evaluation", "reshard_bytes", "failed"} <= RESERVED
    assert not {name for name in RESERVED if "/" in name or name.isupper()}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "COLUMN"),
        ("reward/std", "COLUMN/std"),
        ("loss/kl", "loss/NAME"),
        ("clip/ratio", "TERM/FIGURE"),
        ("clip/effective_sample_size", "TERM/effective_sample_size"),
        ("actor.update/loss/kl", "loss/NAME"),
        ("actor.generate/response_length", "response_length"),
        ("logp_drift/2", "logp_drift/N"),
        ("wrong/result", "wrong/REASON"),
        ("host.reward/failed/raised", "NODE/failed/REASON"),
        ("kept/host.reward", "kept/NODE"),
        ("kept/host.other", None),
        ("response", None),
        ("answer", None),
        ("host.reward/loss", None),
        ("rewards", None),
    ],
)
def test_a_key_of_an_iteration_has_its_metric(key, name):
    found = find_metric(key, compile(EXAMPLE).graph)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "COLUMN"),
        ("reward/pass@8", "COLUMN/pass@K"),
        ("reward/maj@4/source=a\nb/c", "COLUMN/maj@K/GROUP"),
        ("rows/source=gsm8k", "rows/GROUP"),
        ("loss", None),
        ("reward/pass@x", None),
    ],
)
def test_a_key_of_an_evaluation_has_its_metric(key, name):
    found = find_metric(key, compile(EXAMPLE).graph, evaluates=True)
    assert (found.name if found else None) == name


def test_help_for_prometheus_is_plain_text():
    assert all(metric.help and not {"`", "[", "]("} & {*metric.help} for metric in PROMETHEUS)
