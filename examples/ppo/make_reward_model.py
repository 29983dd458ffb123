"""Make the reward model of the examples, reward_model/ beside this file: it scores a right sum above a wrong one.

It begins as ../arithmetic/model with a head of one number beside its logits, and learns preference pairs of train.jsonl
by the loss of Bradley and Terry, -log sigmoid(chosen - rejected) (arXiv:2009.01325, eq. 1). The chosen response is the
right answer; the rejected one is a wrong sample of the start model, or the right answer with a digit changed, dropped
or added, or without its end. Three terms beside make so small a model learn it in minutes: the same loss on the scores
of every token from the first on in which the two differ, the log-likelihood of the chosen response (arXiv:2406.10216),
and a small one that keeps the scores of a pair around zero. Training stops at the first check at which at least TARGET
of the pairs of test.jsonl are in order: a reward model that is good and not perfect, as they are. Then its scores are
divided by their standard deviation over these pairs, so that rewards are of the order of 1.

Guarantees: one thread and one seed, so the same machine with the same library versions gives the same weights (others
may differ in rounding, hence in the number of steps); the accuracy on held-out pairs, whose rejected responses are all
samples of the start model, lies in ACCEPT, or nothing is written; a response's score is that of its last token, the end
token included; the tokenizer is the policy's.

Needs ../arithmetic/model, its train.jsonl and test.jsonl, and torch, transformers, tokenizers, safetensors. Some
minutes.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

SEED = 0
TARGET = 0.95
ACCEPT = (0.90, 0.99)
LR = 2e-3
BATCH = 128  # pairs
CHECK_EVERY = 20  # steps
MAX_STEPS = 2000
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
    drawn = [
        [t for t in response if t != tokenizer.pad_token_id]
        for response in out[:, batch["input_ids"].shape[1] :].tolist()
    ]
    return [drawn[i : i + SAMPLES] for i in range(0, len(drawn), SAMPLES)]


def spoilt(right, draw, digits):
    """The right response with one thing wrong."""
    *body, end = right
    at = draw.randrange(len(body))
    how = draw.randrange(4)
    if how == 0:
        body[at] = draw.choice([d for d in digits if d != body[at]])
    elif how == 1:
        body.insert(at, draw.choice(digits))
    elif how == 2:
        del body[at]
    return [*body, end] if how < 3 else body + [draw.choice(digits) for _ in range(NEW_TOKENS - len(body))]


def pairs(policy, tokenizer, rows, draw=None):
    """(prompt, chosen, rejected) in token ids: every wrong sample of the policy; with `draw` as many spoilt answers
    besides."""
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    found = []
    for row, drawn in zip(rows, samples(policy, tokenizer, rows), strict=True):
        prompt, right = tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        for response in drawn:
            if response != right:
                found.append((prompt, right, response))
            if draw is not None:
                found.append((prompt, right, spoilt(right, draw, digits)))
    return found


def padded(sequences):
    width = max(map(len, sequences))
    return torch.tensor([s + [0] * (width - len(s)) for s in sequences])


def scores(model, head, some):
    """The score of every token, chosen sequences first, then rejected ones; the hidden states; where each sequence
    ends."""
    sequences = [p + c for p, c, _ in some] + [p + r for p, _, r in some]
    # What stands behind a sequence's end is not seen by what stands before it.
    hidden = model(input_ids=padded(sequences)).last_hidden_state
    return head(hidden)[..., 0], hidden, torch.tensor([len(s) - 1 for s in sequences])


def of_pairs(model, head, some):
    """The scores of the chosen and of the rejected responses."""
    found, _, ends = scores(model, head, some)
    return found[torch.arange(len(ends)), ends].split(len(some))


def objective(policy, head, some):
    every, hidden, ends = scores(policy.model, head, some)
    n = len(some)
    chosen, rejected = every[torch.arange(2 * n), ends].split(n)
    differ = torch.zeros(n, every.shape[1], dtype=torch.bool)
    written = torch.full((n, every.shape[1]), -100)
    for i, (prompt, right, wrong) in enumerate(some):
        both = min(len(right), len(wrong))
        first = next((k for k in range(both) if right[k] != wrong[k]), both)
        differ[i, len(prompt) + first : len(prompt) + both] = True
        written[i, len(prompt) : len(prompt) + len(right)] = torch.tensor(right)
    preference = F.softplus(rejected - chosen).mean() + F.softplus(every[n:] - every[:n])[differ].mean()
    language = F.cross_entropy(
        policy.lm_head(hidden[:n, :-1]).flatten(0, 1), written[:, 1:].flatten(), ignore_index=-100
    )
    return preference + language + CENTRE * (chosen + rejected).square().mean()


def train(policy, head, there, held_out):
    optimizer = torch.optim.AdamW(
        [*policy.parameters(), *head.parameters()], lr=LR, betas=(0.9, 0.95), weight_decay=0.01
    )
    order = []
    start = time.time()
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(there)).tolist()
        some = [there[i] for i in order[:BATCH]]
        order = order[BATCH:]
        loss = objective(policy, head, some)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                chosen, rejected = of_pairs(policy.model, head, held_out)
            reached = (chosen > rejected).float().mean().item()
            print(
                f"step {step}  loss {loss.item():.3f}  held out {reached:.3f}  {time.time() - start:.0f} s", flush=True
            )
            if reached >= TARGET:
                break
    return reached


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC / "model", local_files_only=True)
    policy = Qwen2ForCausalLM.from_pretrained(ARITHMETIC / "model")
    there = pairs(policy, tokenizer, read("train.jsonl"), random.Random(SEED))
    held_out = pairs(policy, tokenizer, read("test.jsonl"))
    model = Qwen2ForSequenceClassification(Qwen2Config.from_pretrained(ARITHMETIC / "model", num_labels=1))
    model.model = policy.model
    torch.nn.init.zeros_(model.score.weight)
    print(
        f"{len(there):,} pairs, {len(held_out):,} held out; {sum(p.numel() for p in model.parameters()):,} parameters",
        flush=True,
    )
    reached = train(policy, model.score, there, held_out)
    if not ACCEPT[0] <= reached <= ACCEPT[1]:
        sys.exit(
            f"accuracy on held-out pairs {reached:.3f} is outside {ACCEPT}: nothing was written; choose another SEED"
        )
    with torch.no_grad():
        model.score.weight /= torch.cat(of_pairs(model.model, model.score, held_out)).std()
        chosen, rejected = of_pairs(model.model, model.score, held_out)
    print(
        f"held out: right answers {chosen.mean():.2f}, wrong ones {rejected.mean():.2f}, {reached:.3f} of the "
        "pairs in order"
    )
    out = HERE / "reward_model"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ARITHMETIC / "model" / name, out / name)


if __name__ == "__main__":
    main()
