"""Create the example's start model, a Qwen2 of 0.9 million parameters.

It is written to model/ next to this file. It half knows addition: it is trained from scratch on the worked examples of
train.jsonl ("37+48=85<eos>", loss on the response only). Training stops at the first check at which at least TARGET of
test.jsonl is right with greedy decoding. So reinforcement learning has room to improve it, and finds both right and
wrong answers in most groups of samples.

Guarantees:

- one thread and one seed: the same machine with the same library versions gives the same weights (others may differ in
  rounding, hence in the number of steps)
- the greedy accuracy is within ACCEPT, or nothing is written
- the tokenizer has one id per character, adds no special tokens, and has one entry for each of the model's ids

Run make_data.py first. Needs torch, transformers, tokenizers, safetensors.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 0
# Wider initialization and a higher rate than usual. 0.02 and 5e-4 reach the same accuracy, but then the policy gradient
# has a norm of about 10 instead of 1, and GRPO with a learning rate of 3e-4 destroyed the model.
INIT = 0.1
TARGET = 0.42
ACCEPT = (0.30, 0.55)
LR = 5e-3
BATCH = 256
CHECK_EVERY = 10  # steps
MAX_STEPS = 1000
NEW_TOKENS = 5
VOCAB = ["<pad>", "<eos>", "<unk>", *"0123456789+-="]  # 16 entries; the example has no use for "-"
HERE = Path(__file__).parent


def make_tokenizer():
    """Create a byte-pair encoding without merges: one id per character.

    For a Qwen2 model, transformers' AutoTokenizer builds a Qwen2Tokenizer from the vocabulary and the merges in the
    file, whatever class the file names. It agrees with tokenizer.json on all text of characters in VOCAB. It drops any
    other character, for which tokenizer.json gives <unk>.
    """
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


def make_config(tokenizer):
    return Qwen2Config(
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
        initializer_range=INIT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def read(name):
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def worked_examples(tokenizer, rows):
    """Return ids and labels, padded on the right.

    Labels are -100 on the prompt and on the padding.
    """
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    responses = [[*tokenizer.encode(row["answer"]), tokenizer.eos_token_id] for row in rows]
    width = max(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=False))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=False)):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    return ids, labels


@torch.no_grad()
def accuracy(model, tokenizer, rows, sample=False):
    """Return the share of rows whose decoded response is exactly the answer."""
    batch = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    out = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=NEW_TOKENS, **how
    )
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=False)) / len(rows)


def train(model, tokenizer, train_rows, test_rows):
    ids, labels = worked_examples(tokenizer, train_rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    order = []
    start = time.time()
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        if len(order) < BATCH:
            order = torch.randperm(len(ids)).tolist()
        rows = order[:BATCH]
        order = order[BATCH:]
        logits = model(input_ids=ids[rows]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[rows][:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            reached = accuracy(model, tokenizer, test_rows)
            spent = time.time() - start
            print(f"step {step}  loss {loss.item():.3f}  held out, greedy {reached:.3f}  {spent:.0f} s", flush=True)
            if reached >= TARGET:
                break
    return reached


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(make_config(tokenizer))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    test_rows = read("test.jsonl")
    reached = train(model, tokenizer, read("train.jsonl"), test_rows)
    if not ACCEPT[0] <= reached <= ACCEPT[1]:
        sys.exit(f"greedy accuracy {reached:.3f} is outside {ACCEPT}: nothing was written; choose another SEED")
    sampled = [accuracy(model, tokenizer, test_rows, sample=True) for _ in range(8)]
    print(f"held out: greedy {reached:.3f}, sampled at temperature 1 {sum(sampled) / len(sampled):.3f}")
    out = HERE / "model"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    make_tokenizer().save_pretrained(out)  # a fresh one: the used one would save its padding as a setting


if __name__ == "__main__":
    main()
