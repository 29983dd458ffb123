"""Write train.jsonl (4,000 pairs) and test.jsonl (300 pairs) beside this file: right sums, and wrong ones that the
start model wrote.

Each row is {"prompt": "37+48=", "chosen": "85", "rejected": "75"}: the right answer, and a response that
../arithmetic/model drew at temperature 1 and that is wrong. Prompts of train.jsonl are of ../arithmetic/train.jsonl,
those of test.jsonl of ../arithmetic/test.jsonl, each at most once, in their order; a prompt whose first TRIES samples
are all right has no pair.

Guarantees: no prompt is in both files; no rejected response is the right one or empty; all end, within the bound of the
example. One thread and one seed, so that the same machine with the same library versions writes the same bytes.

Needs ../arithmetic/model and its data, torch, transformers. Half a minute.
"""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

SEED = 0
PAIRS = {"train": 4000, "test": 300}
TRIES = 2
NEW_TOKENS = 5
BATCH = 1000
HERE = Path(__file__).parent
ARITHMETIC = HERE.parent / "arithmetic"


@torch.no_grad()
def samples(model, tokenizer, rows):
    """For each row TRIES responses as text, None for one that did not end."""
    batch = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    how = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "num_return_sequences": TRIES,
        "max_new_tokens": NEW_TOKENS,
    }
    out = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **how)[
        :, batch["input_ids"].shape[1] :
    ]
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    ended = (out == tokenizer.eos_token_id).any(1).tolist()
    found = [text if end else None for text, end in zip(texts, ended, strict=True)]
    return [found[i : i + TRIES] for i in range(0, len(found), TRIES)]


def pairs(model, tokenizer, rows, count):
    found = []
    for i in range(0, len(rows), BATCH):
        for row, drawn in zip(rows[i : i + BATCH], samples(model, tokenizer, rows[i : i + BATCH]), strict=True):
            wrong = next((text for text in drawn if text and text != row["answer"]), None)
            if wrong is not None:
                found.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong})
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"only {len(found)} pairs, where {count} are wanted: nothing was written; raise TRIES")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC / "model", local_files_only=True)
    model = Qwen2ForCausalLM.from_pretrained(ARITHMETIC / "model").eval()
    made = {}
    for name, count in PAIRS.items():
        rows = [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        made[name] = pairs(model, tokenizer, rows, count)
    for name, some in made.items():
        (HERE / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some), encoding="utf-8", newline="\n"
        )
        print(f"{name}.jsonl: {len(some)} pairs")


if __name__ == "__main__":
    main()
