"""Write train.jsonl (4,000 pairs) and test.jsonl (300 pairs) of sums.

The files are next to this one. Each row is {"prompt": "37+48=", "chosen": "85", "rejected": "75"}: the right answer,
and a wrong response that ../arithmetic/model drew at temperature 1. Prompts of train.jsonl come from
../arithmetic/train.jsonl, those of test.jsonl from ../arithmetic/test.jsonl, each at most once, in their order; a
prompt whose first TRIES samples are all right is skipped.

Guarantees: no prompt is in both files; no rejected response is right or empty; all end within the bound of the example.
One thread and one seed, so the same machine with the same library versions writes the same bytes.

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
    """Return TRIES responses to each row as text, None for one that did not end."""
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
    responses = [text if end else None for text, end in zip(texts, ended, strict=True)]
    return [responses[i : i + TRIES] for i in range(0, len(responses), TRIES)]


def pairs(model, tokenizer, rows, count):
    found_pairs = []
    for i in range(0, len(rows), BATCH):
        for row, drawn in zip(rows[i : i + BATCH], samples(model, tokenizer, rows[i : i + BATCH]), strict=True):
            wrong = next((text for text in drawn if text and text != row["answer"]), None)
            if wrong is not None:
                found_pairs.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong})
        if len(found_pairs) >= count:
            return found_pairs[:count]
    raise SystemExit(f"only {len(found_pairs)} of {count} pairs: nothing was written; raise TRIES")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC / "model", local_files_only=True)
    model = Qwen2ForCausalLM.from_pretrained(ARITHMETIC / "model").eval()
    pairs_by_file = {}
    for name, count in PAIRS.items():
        rows = [json.loads(line) for line in (ARITHMETIC / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        pairs_by_file[name] = pairs(model, tokenizer, rows, count)
    for name, file_pairs in pairs_by_file.items():
        (HERE / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in file_pairs), encoding="utf-8", newline="\n"
        )
        print(f"{name}.jsonl: {len(file_pairs)} pairs")


if __name__ == "__main__":
    main()
