"""The reward model of the examples orders what a policy writes, and not all of it, as the script that makes it says."""

import json
import runpy

import torch
from place import EXAMPLE
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

EXAMPLES = EXAMPLE.parent


def test_right_answers_are_scored_above_wrong_ones():
    folder = EXAMPLES / "ppo" / "reward_model"
    told = runpy.run_path(str(EXAMPLES / "ppo" / "make_reward_model.py"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    pairs = [json.loads(line) for line in (EXAMPLES / "dpo" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = {
        json.loads(line)["prompt"] for line in (EXAMPLE / "test.jsonl").read_text(encoding="utf-8").splitlines()
    }
    assert len(pairs) == 300 and {p["prompt"] for p in pairs} <= held_out

    def scores(which):
        rows = [tokenizer.encode(pair["prompt"] + pair[which] + "<eos>").ids for pair in pairs]
        ids = torch.tensor([r + [0] * (11 - len(r)) for r in rows])
        with torch.no_grad():  # which takes the last token that is no padding
            return model(ids).logits[:, 0]

    chosen = scores("chosen")
    rejected = scores("rejected")
    low, high = told["ACCEPT"]
    assert low <= (chosen > rejected).float().mean() <= high
    assert rejected.mean() < -0.3 < 0.3 < chosen.mean() and torch.cat([chosen, rejected]).std() < 2
