"""Programs beyond one policy, from text to trained weights: pairs from data alone, for a policy and for a reward
model, and a critic with a teacher and a reward model."""

import json

import pytest
import torch
from place import metrics, ran, rows_of
from tiny import ROLLOUT, scoring

pytestmark = pytest.mark.slow

# Of an algorithm, its worker and the kind of it, and a rate.
PAIRS = """
import {algorithm}
algorithm pairs extends {algorithm} {{
  node {worker}.update {{ epochs = 4, optimizer = adamw(lr = {rate}) }}
}}
cluster laptop {{ device = "cpu", nodes = 1, devices_per_node = 2 }}
deploy pairs on laptop {{
  set pairs = 16
  set prompt_len = 6
  set response_len = 5
  model {kind} = "./model"
  data source = "pairs.jsonl"
  layout {worker}.update {{ dp = 2, zero = 3 }}
  run {{ iterations = 2, seed = 0 }}
}}
"""
CRITIC = """
cluster laptop { device = "cpu", nodes = 1, devices_per_node = 2 }
deploy tiny on laptop {
  model policy = "./model"
  model value = "./model"
  model reward_model = "./judge"
  data source = "train.jsonl" { prompt = "prompt" }
  layout critic.update { dp = 2, zero = 3 }
  layout actor.update { dp = 2 }
  layout actor.generate { tp = 2 }
  run { iterations = ITERATIONS, seed = 0, save = 1 }
}
"""


def write_pairs(place):
    """16 pairs, in a file."""
    sums = [(a, b) for a in (12, 37, 58, 81) for b in (9, 23, 46, 70)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 10)} for a, b in sums]
    (place.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_pairs_from_data_alone(place):
    """The same 16 pairs twice, four steps each: a policy that is its reference comes to prefer what was chosen."""
    rows = write_pairs(place)
    (place.folder / "p.rlg").write_text(PAIRS.format(algorithm="dpo", worker="actor", kind="policy", rate="1e-4"))
    ran(place, "--out", "one", "--record")
    first, last = metrics(place.folder / "one")
    assert first["updates"] == last["updates"] == 4 and first["rows"] == 64
    assert first["loss"] == pytest.approx(first["loss/dpo"]) and last["loss"] < first["loss"] < 0.6932
    assert last["dpo/accuracy"] == 1 and last["dpo/margin"] > first["dpo/margin"] > 0
    # The digits of both sums, each with its end token, and the prompts, once.
    assert first["response_tokens"] == sum(len(r["chosen"]) + len(r["rejected"]) + 2 for r in rows)
    assert first["prompt_tokens"] == sum(len(r["prompt"]) for r in rows)
    assert {p.name for p in (place.folder / "one" / "weights").iterdir()} == {"actor"}
    table = rows_of(place.folder / "one", 1)
    assert sorted(table["chosen_text"].to_pylist()) == sorted(r["chosen"] + "<eos>" for r in rows)
    assert [len(x) for x in table["ref_rejected"].to_pylist()] == [len(x) for x in table["rejected"].to_pylist()]


def test_a_reward_model_from_pairs_alone(place):
    """It begins without a preference; the model that the run leaves orders the pairs when transformers scores them."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    rows = write_pairs(place)
    program = PAIRS.format(algorithm="bradley_terry", worker="reward", kind="reward_model", rate="1e-3")
    (place.folder / "p.rlg").write_text(program)
    ran(place, "--out", "one")
    first, last = metrics(place.folder / "one")
    assert first["updates"] == last["updates"] == 4 and first["rows"] == 64
    assert last["loss/bradley_terry"] < first["loss/bradley_terry"] < 0.6932  # log 2 is that of equal scores
    assert last["bradley_terry/margin"] > first["bradley_terry/margin"] > 0
    assert last["bradley_terry/accuracy"] > first["bradley_terry/accuracy"]
    folder = place.folder / "one" / "weights" / "reward"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)

    @torch.no_grad()
    def score(text):
        return float(model(torch.tensor([tokenizer.encode(text + "<eos>").ids])).logits)

    right = [score(r["prompt"] + r["chosen"]) > score(r["prompt"] + r["rejected"]) for r in rows]
    assert sum(right) >= 16 * last["bradley_terry/accuracy"]


def test_a_critic_and_a_reward_model(place):
    """A critic that is begun from the policy; what it learnt is in the checkpoint that the second run goes on with."""
    scoring(place.folder / "judge")
    text = ROLLOUT.replace("    mask      : bool[response]\n", "").replace("response, mask", "response")
    text = text.replace(
        "value_clip(0.5), optimizer = adamw(lr = 1e-3)", "value_clip(5), optimizer = adamw(lr = 5e-3), epochs = 4"
    )
    text = text.replace("    optimizer = adamw(lr = 1e-3)\n", "    optimizer = adamw(lr = 1e-5)\n    after = 1\n")
    (place.folder / "p.rlg").write_text(text + CRITIC.replace("ITERATIONS", "2"))
    ran(place, "--out", "one")
    (place.folder / "p.rlg").write_text(text + CRITIC.replace("ITERATIONS", "3"))
    ran(place, "--resume", "one", "--record")
    lines = metrics(place.folder / "one")
    assert [line["updates"] for line in lines] == [4, 5, 5] and [line["critic.update/updates"] for line in lines] == [
        4,
        4,
        4,
    ]
    assert (
        "clip/ratio" not in lines[0] and lines[1]["clip/ratio"] == pytest.approx(1, abs=0.01) == lines[2]["clip/ratio"]
    )
    # The critic begins with zeros, far from the scores, and is nearer to them at the end.
    assert abs(lines[2]["value_clip/error"]) < 0.9 * abs(lines[2]["score"])
    assert lines[1]["loss/entropy"] > 0 and lines[1]["loss/distil"] == pytest.approx(0, abs=1e-4)
    assert all(line["logp_drift"] < 1e-4 for line in lines)
    table = rows_of(place.folder / "one", 2)
    assert [[len(k) for k in row] for row in table["top_ids"].to_pylist()] == [
        [3] * len(r) for r in table["response"].to_pylist()
    ]
    config = json.loads((place.folder / "one" / "weights" / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
