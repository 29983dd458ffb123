"""`freeze`: which weights its words name, in every family, and what of a model they change."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import conformance
import pytest
from folders import ROOT

from msrl_graph import ProgramWarning, compile
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import freezing, models

SMALL = ("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v3-671b")


def load(name):
    return models.load(name, Path())


def frozen(model, *words):
    return {tensor.name for tensor in freezing.freeze(model, words).weights if tensor.frozen}


@pytest.mark.parametrize("name", SMALL)
def test_frozen_and_trained_weights_are_all_weights_and_nothing_else_changes(name):
    model = load(name)
    some = freezing.freeze(model, ("embeddings", "norms"))
    assert [replace(tensor, frozen=False) for tensor in some.tensors] == [*model.tensors]
    assert {*some.trained}.isdisjoint(t for t in some.weights if t.frozen)
    assert len(some.trained) + sum(t.frozen for t in some.weights) == len(some.weights)
    assert some.moved == some.trained and some.saved == some.weights and some.buffers == model.buffers
    counted = [
        sum(kind.each * len([*kind.layers]) for kind in kinds) for kinds in (some.trained_kinds, some.frozen_kinds)
    ]
    assert counted == [len(some.trained), len(some.weights) - len(some.trained)]


def test_the_parts_of_a_mixture():
    model = load("deepseek-v3-671b")
    layers = range(61)
    assert frozen(model, "embeddings") == {"model.embed_tokens.weight"}
    assert frozen(model, "head") == {"lm_head.weight"}
    assert frozen(model, "router") == {f"model.layers.{i}.mlp.gate.weight" for i in layers[3:]}
    assert frozen(model, "experts") == {
        f"model.layers.{i}.mlp.experts.*.{name}_proj.weight" for i in layers[3:] for name in ("gate", "up", "down")
    }
    norms = {"input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"}
    assert frozen(model, "norms") == {"model.norm.weight"} | {
        f"model.layers.{i}.{name}.weight" for i in layers for name in norms
    }
    parts = ("embeddings", "attention", "mlp", "norms", "head")
    assert frozen(model, *parts) == {tensor.name for tensor in model.weights}


def test_patterns():
    model = load("qwen2.5-0.5b")
    assert {name.split(".")[2] for name in frozen(model, "model.layers.[0-3].*")} == {"0", "1", "2", "3"}
    assert frozen(model, "*.q_proj.bias") == {f"model.layers.{i}.self_attn.q_proj.bias" for i in range(24)}
    assert freezing.list_unmatched(model, ("head", "norms", "model.layers.99.*")) == ["head", "model.layers.99.*"]


def test_a_head_that_returns_scores_is_a_head():
    assert frozen(load("qwen2.5-0.5b").scoring, "head") == {"score.weight"}


@pytest.mark.parametrize("family", conformance.WRITTEN)
def test_every_weight_of_every_family_is_in_a_part(family, tmp_path):
    model = models.load(conformance.WRITTEN[family](tmp_path), Path("/"), None, NOWHERE)
    words = tuple(word for word in freezing.PARTS if not freezing.list_unmatched(model, [word]))
    assert not freezing.freeze(model, words).trained


@pytest.mark.parametrize(
    ("title", "stated", "digits"),
    [("Training a part of a model", r" \{ freeze = .*? \}", 1), ("Training an adapter", r" \{ adapter = .*? \}", 2)],
)
def test_the_plans_of_the_guide_have_its_figures(title, stated, digits):
    guide = (ROOT / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    section = guide.partition(f"## {title}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"^```rlg\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    with warnings.catch_warnings(action="ignore", category=ProgramWarning):
        plans = [compile("p.rlg", text=text) for text in (re.sub(stated, "", program), program)]
    assert plans[0].to_json() != plans[1].to_json()
    figures = []
    for plan in plans:
        phases = {phase.place: phase.items for phase in plan.memory if phase.phase == "update"}
        (edge,) = plan.reshards
        held = (phases["device"]["actor optimizer"], phases["device"]["gradients"], edge.received_bytes_per_device)
        copies = phases["host"].get("frozen actor.generate weights", 0)
        figures.append([*held, copies, phases["device"].get("reference.infer weights", 0)])
    rows = re.findall(r"^\|[^|]+\| ([\d.]+)(?: GB)? \| ([\d.]+) GB \|$", section, re.MULTILINE)
    planned = [tuple(round(size / 1e9, digits) for size in sizes) for sizes in zip(*figures, strict=True)]
    assert [tuple(map(float, row)) for row in rows] == planned[: len(rows)] and len(rows) >= 4
