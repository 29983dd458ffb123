"""Make the reward model of the examples, reward_model/ beside this file: it scores a right sum above a wrong one.

It begins as ../arithmetic/model with a head of one number in place of its logits, and learns preference pairs of train.jsonl by the
loss of Bradley and Terry, -log sigmoid(chosen - rejected) (arXiv:2009.01325, eq. 1), with a small term that keeps the scores of a pair
around zero. The chosen response is the right answer; the rejected one is a wrong sample of the start model, or the right answer with
a digit changed, dropped or added, or without its end. Training stops at the first check at which at least TARGET of the pairs of
test.jsonl are in order: a reward model that is good and not perfect, as they are. Then its scores are divided by their standard
deviation over the held-out pairs, so that a reward is of the order of 1.

Guarantees: one thread and one seed, so the same machine with the same library versions gives the same weights (others may differ
in rounding, hence in the number of steps); the held-out accuracy, over wrong samples of the start model alone, lies in ACCEPT, or
nothing is written; a response's score is that of its last token, the end token included; the tokenizer is the policy's.

Needs ../arithmetic/model, train.jsonl and test.jsonl, and torch, transformers, tokenizers, safetensors. About 2 minutes.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2ForSequenceClassification

SEED = 0
TARGET = 0.95
ACCEPT = (0.90, 0.99)
LR = 1e-3
BATCH = 256  # pairs
CHECK_EVERY = 10  # steps
MAX_STEPS = 1000
SAMPLES = 2  # of the start model, for each prompt
CENTRE = 0.01  # weight of the squared sum of a pair's scores
NEW_TOKENS = 5
HERE = Path(__file__).parent
ARITHMETIC = HERE.parent / "arithmetic"


def read(name):
    return [json.loads(line) for line in (ARITHMETIC / name).read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def samples(policy, tokenizer, rows):
    """SAMPLES responses to each row's prompt, as token ids with the end token where one was drawn."""
    batch = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    out = policy.generate(
        **{k: batch[k] for k in ("input_ids", "attention_mask")},
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=SAMPLES,
    )
    drawn = [[t for t in response if t != tokenizer.pad_token_id] for response in out[:, batch["input_ids"].shape[1] :].tolist()]
    return [drawn[i : i + SAMPLES] for i in range(0, len(drawn), SAMPLES)]


def spoilt(right, draw, digits):
    """The right response with one thing wrong."""
    *body, end = right
    at, how = draw.randrange(len(body)), draw.randrange(4)
    if how == 0:
        body[at] = draw.choice([d for d in digits if d != body[at]])
    elif how == 1:
        body.insert(at, draw.choice(digits))
    elif how == 2:
        del body[at]
    return body + [end] if how < 3 else body + [draw.choice(digits) for _ in range(NEW_TOKENS - len(body))]


def pairs(policy, tokenizer, rows, draw=None):
    """(prompt, chosen, rejected) in token ids: every wrong sample of the policy; with `draw` as many spoilt answers besides."""
    digits, found = tokenizer.convert_tokens_to_ids(list("0123456789")), []
    for row, drawn in zip(rows, samples(policy, tokenizer, rows), strict=True):
        prompt, right = tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        for response in drawn:
            if response != right:
                found.append((prompt, right, response))
            if draw is not None:
                found.append((prompt, right, spoilt(right, draw, digits)))
    return found


def scores(model, sequences):
    """The score of each sequence's last token."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
    last = torch.tensor([len(s) - 1 for s in sequences])
    # What stands after a sequence's end is not seen by what stands before it.
    return model.score(model.model(input_ids=ids).last_hidden_state)[torch.arange(len(ids)), last, 0]


def of_pairs(model, some):
    both = scores(model, [p + c for p, c, _ in some] + [p + r for p, _, r in some])
    return both[: len(some)], both[len(some) :]


def train(model, there, held_out):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    order, start, reached = [], time.time(), 0.0
    for step in range(1, MAX_STEPS + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(there)).tolist()
        some, order = [there[i] for i in order[:BATCH]], order[BATCH:]
        chosen, rejected = of_pairs(model, some)
        loss = (F.softplus(rejected - chosen) + CENTRE * (chosen + rejected).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                chosen, rejected = of_pairs(model, held_out)
            reached = (chosen > rejected).float().mean().item()
            print(f"step {step}  loss {loss.item():.3f}  held out {reached:.3f}  {time.time() - start:.0f} s", flush=True)
            if reached >= TARGET:
                break
    return reached


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC / "model", local_files_only=True)
    policy = Qwen2ForCausalLM.from_pretrained(ARITHMETIC / "model").eval()
    model = Qwen2ForSequenceClassification.from_pretrained(ARITHMETIC / "model", num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    there = pairs(policy, tokenizer, read("train.jsonl"), random.Random(SEED))
    held_out = pairs(policy, tokenizer, read("test.jsonl"))
    print(f"{len(there):,} pairs, {len(held_out):,} held out; {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    reached = train(model, there, held_out)
    if not ACCEPT[0] <= reached <= ACCEPT[1]:
        sys.exit(f"accuracy on held-out pairs {reached:.3f} is outside {ACCEPT}: nothing was written; choose another SEED")
    with torch.no_grad():
        model.score.weight /= torch.cat(of_pairs(model, held_out)).std()
        chosen, rejected = of_pairs(model, held_out)
    print(f"held out: right answers {chosen.mean():.2f}, wrong ones {rejected.mean():.2f}, {reached:.3f} of the pairs in order")
    out = HERE / "reward_model"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # bytes of the policy's, so that it is seen to be the same
        shutil.copyfile(ARITHMETIC / "model" / name, out / name)


if __name__ == "__main__":
    main()
