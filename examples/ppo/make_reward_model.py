"""Create the examples' reward model: it scores a right sum above a wrong one.

It is written to reward_model/ next to this file. It begins as ../arithmetic/model with a head of one number next to its
logits, and learns preference pairs of train.jsonl with the loss of Bradley and Terry, -log sigmoid(chosen - rejected)
(arXiv:2009.01325, eq. 1). The chosen response is the right answer; the rejected one is a wrong sample of the start
model, or the right answer with a digit changed, dropped or added, or without its end.

Three additional terms make so small a model learn in minutes: the same loss on the scores of every token from the first
one in which the two differ, the log-likelihood of the chosen response (arXiv:2406.10216), and a small one that keeps
the scores of a pair around zero. Training stops at the first check at which at least TARGET of the pairs of test.jsonl
are in order: a reward model that is good and not perfect, like real ones. Then its scores are divided by their standard
deviation over these pairs, so that rewards are of the order of 1.

Guarantees:

- one thread and one seed: the same machine with the same library versions gives the same weights (others may differ in
  rounding, hence in the number of steps)
- the accuracy on held-out pairs, whose rejected responses are all samples of the start model, is within ACCEPT, or
  nothing is written
- a response's score is that of its last token, the end token included
- the tokenizer is the policy's

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
    """Return SAMPLES responses to each row's prompt, as token ids.

    The end token is included where one was drawn.
    """
    batch = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    out = policy.generate(
        **{key: batch[key] for key in ("input_ids", "attention_mask")},
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=SAMPLES,
    )
    drawn = [
        [token for token in response if token != tokenizer.pad_token_id]
        for response in out[:, batch["input_ids"].shape[1] :].tolist()
    ]
    return [drawn[i : i + SAMPLES] for i in range(0, len(drawn), SAMPLES)]


def spoil(right, draw, digits):
    """Return the right response with one error."""
    *body, end = right
    position = draw.randrange(len(body))
    how = draw.randrange(4)
    if how == 0:
        body[position] = draw.choice([digit for digit in digits if digit != body[position]])
    elif how == 1:
        body.insert(position, draw.choice(digits))
    elif how == 2:
        del body[position]
    return [*body, end] if how < 3 else body + [draw.choice(digits) for _ in range(NEW_TOKENS - len(body))]


def pairs(policy, tokenizer, rows, draw=None):
    """Return (prompt, chosen, rejected) in token ids.

    Rejected are all wrong samples of the policy; with `draw` as many spoilt answers in addition.
    """
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    found_pairs = []
    for row, drawn in zip(rows, samples(policy, tokenizer, rows), strict=True):
        prompt = tokenizer.encode(row["prompt"])
        right = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        for response in drawn:
            if response != right:
                found_pairs.append((prompt, right, response))
            if draw is not None:
                found_pairs.append((prompt, right, spoil(right, draw, digits)))
    return found_pairs


def pad(sequences):
    width = max(map(len, sequences))
    return torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])


def scores(model, head, batch):
    """Return the score of each token, the hidden states, and the sequences' ends.

    Chosen sequences come first, then rejected ones.
    """
    sequences = [prompt + chosen for prompt, chosen, _ in batch] + [prompt + rejected for prompt, _, rejected in batch]
    # Positions after a sequence's end do not affect those before it.
    hidden = model(input_ids=pad(sequences)).last_hidden_state
    return head(hidden)[..., 0], hidden, torch.tensor([len(sequence) - 1 for sequence in sequences])


def pair_scores(model, head, batch):
    """Return the scores of the chosen and of the rejected responses."""
    token_scores, _, ends = scores(model, head, batch)
    return token_scores[torch.arange(len(ends)), ends].split(len(batch))


def objective(policy, head, batch):
    token_scores, hidden, ends = scores(policy.model, head, batch)
    count = len(batch)
    chosen, rejected = token_scores[torch.arange(2 * count), ends].split(count)
    differ = torch.zeros(count, token_scores.shape[1], dtype=torch.bool)
    written = torch.full((count, token_scores.shape[1]), -100)
    for i, (prompt, right, wrong) in enumerate(batch):
        both = min(len(right), len(wrong))
        first = next((index for index in range(both) if right[index] != wrong[index]), both)
        differ[i, len(prompt) + first : len(prompt) + both] = True
        written[i, len(prompt) : len(prompt) + len(right)] = torch.tensor(right)
    preference = (
        F.softplus(rejected - chosen).mean() + F.softplus(token_scores[count:] - token_scores[:count])[differ].mean()
    )
    language = F.cross_entropy(
        policy.lm_head(hidden[:count, :-1]).flatten(0, 1), written[:, 1:].flatten(), ignore_index=-100
    )
    return preference + language + CENTRE * (chosen + rejected).square().mean()


def train(policy, head, train_pairs, held_out):
    optimizer = torch.optim.AdamW(
        [*policy.parameters(), *head.parameters()], lr=LR, betas=(0.9, 0.95), weight_decay=0.01
    )
    order = []
    start = time.time()
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(train_pairs)).tolist()
        batch = [train_pairs[i] for i in order[:BATCH]]
        order = order[BATCH:]
        loss = objective(policy, head, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            with torch.no_grad():
                chosen, rejected = pair_scores(policy.model, head, held_out)
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
    train_pairs = pairs(policy, tokenizer, read("train.jsonl"), random.Random(SEED))
    held_out = pairs(policy, tokenizer, read("test.jsonl"))
    model = Qwen2ForSequenceClassification(Qwen2Config.from_pretrained(ARITHMETIC / "model", num_labels=1))
    model.model = policy.model
    torch.nn.init.zeros_(model.score.weight)
    print(
        (
            f"{len(train_pairs):,} pairs, {len(held_out):,} held out; "
            f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
        ),
        flush=True,
    )
    reached = train(policy, model.score, train_pairs, held_out)
    if not ACCEPT[0] <= reached <= ACCEPT[1]:
        sys.exit(
            f"accuracy on held-out pairs {reached:.3f} is outside {ACCEPT}: nothing was written; choose another SEED"
        )
    with torch.no_grad():
        model.score.weight /= torch.cat(pair_scores(model.model, model.score, held_out)).std()
        chosen, rejected = pair_scores(model.model, model.score, held_out)
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
