"""Which tokens of one model another may read, by the tokenizers of their folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from language import TESTS, told

from msrl_graph.model import preset_names, presets

MODEL = TESTS.parent / "examples" / "arithmetic" / "model"
PROGRAM = """\
import grpo
algorithm judged extends grpo {{
  worker reference : policy frozen {{ model = judge }}
}}
cluster one {{ device = "cpu", devices_per_node = 2 }}
deploy judged on one {{
  set prompt_len = 16
  set response_len = 32
  model policy = "{policy}"
  model judge  = "{judge}"
  data source  = "train.jsonl" {{ prompt = "problem" }}
}}
"""


def renumbered(content: dict[str, Any]) -> None:
    first, second = list(content["model"]["vocab"])[-2:]
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def larger(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<think>"})


def listed(content: dict[str, Any]) -> None:
    """As a Unigram model writes its vocabulary."""
    content["model"]["vocab"] = [
        [text, 0.0] for text, _ in sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    ]


@pytest.mark.parametrize(
    ("change", "policy", "judge"),
    [
        (lambda content: None, True, True),
        (renumbered, False, False),
        # Whoever knows more tokens may read those of who knows fewer.
        (larger, True, False),
        (listed, True, True),
        (lambda content: content.clear(), True, True),  # nobody can say what a number stands for
    ],
    ids=["same", "renumbered", "larger", "listed", "unreadable"],
)
def test_the_reader_has_the_writers_tokens(
    change: Callable[[dict[str, Any]], None], policy: bool, judge: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_bytes((TESTS / "corpus" / "train.jsonl").read_bytes())
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        shutil.copy(MODEL / "config.json", tmp_path / name)
    content = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "ours" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    change(content)
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    for writer, reader, fine in (("./ours", "./theirs", policy), ("./theirs", "./ours", judge)):
        codes = [d.code for d in told(PROGRAM.format(policy=writer, judge=reader), tmp_path)]
        assert codes == ([] if fine else ["other-tokenizer"])


def test_a_preset_and_a_folder_are_not_compared() -> None:
    found = told(PROGRAM.format(policy="tiny", judge="../../examples/arithmetic/model"), TESTS / "corpus")
    assert found == []


def test_every_preset_has_a_tokenizer() -> None:
    assert [name for name in presets.PRESETS if preset_names.find_tokenizer_name(name) is None] == ["tiny"]


BETWEEN = """\
import grpo
algorithm cross {{
  columns {{ prompt : text  answer : text  ids : i32[<= 64]  said : text  score : f32 {columns} }}
  worker actor   : policy
  worker teacher : {kind} {{ model = teacher }}
  worker host    : function
  source(8) -> prompt, answer
{nodes}
}}
cluster pod {{ device = "h200", nodes = 1, devices_per_node = 8 }}
deploy cross on pod {{
  model policy  = "qwen2.5-7b"
  model teacher = "llama3-8b"
  data source   = "train.jsonl" {{ prompt = "problem" }}
}}
"""
WAYS = {
    "trained on what the teacher generates": (
        "policy frozen",
        "",
        """
  node teacher.generate(prompt) -> ids
  node host.said(ids) -> said { call = text() }
  node actor.update(prompt, said) { loss = sft(), optimizer = adamw(lr = 1e-5) }
  source -> teacher.generate -> host.said -> actor.update
  source -> actor.update
""",
    ),
    "judged by what the teacher generates": (
        "policy frozen",
        "verdict : i32[<= 8]  opinion : text",
        """
  node actor.generate(prompt) -> ids
  node host.said(ids) -> said { call = text() }
  node teacher.generate(said) -> verdict
  node host.opinion(verdict) -> opinion { call = text() }
  node host.reward(opinion, answer) -> score { call = exact_match(response = opinion) }
  node actor.update(prompt, ids, score) { loss = clip(0.2, advantage = score), optimizer = adamw(lr = 1e-6) }
  source -> actor.generate -> host.said -> teacher.generate -> host.opinion -> host.reward -> actor.update
  actor.generate -> actor.update
  source -> host.reward, actor.update
  actor.update => actor.generate
""",
    ),
    "scored as a row": (
        "reward_model frozen",
        "",
        """
  node actor.generate(prompt) -> ids
  node host.said(ids) -> said { call = text() }
  node teacher.infer(prompt, said) -> score
  node actor.update(prompt, ids, score) { loss = clip(0.2, advantage = score), optimizer = adamw(lr = 1e-6) }
  source -> actor.generate -> host.said -> teacher.infer -> actor.update
  actor.generate -> actor.update
  source -> teacher.infer, actor.update
  actor.update => actor.generate
""",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_with_different_tokenizers_work_together_by_text(way: str) -> None:
    kind, columns, nodes = WAYS[way]
    found = told(BETWEEN.format(kind=kind, columns=columns, nodes=nodes), TESTS / "corpus")
    assert [d.message for d in found if d.severity == "error"] == []
