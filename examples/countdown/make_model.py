"""Create the example's start model, a Qwen2 of 0.15 million parameters.

It is written to model/ next to this file. It counts down, and sometimes loses count.

It is trained from scratch on countdowns with newly drawn letters each time, loss on the response only. Training stops
at the first check at which its sampled responses to test.jsonl earn TARGET; if they never do, nothing is written.

Guarantees: one thread and one seed, so the same machine with the same library versions gives the same weights. Run
make_data.py first. Needs torch, transformers, tokenizers, safetensors.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from countdown import counted
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 0
TARGET = 0.55
ACCEPT = (0.5, 0.75)
LR = 4e-3
BATCH = 32
CHECK_EVERY = 10
MAX_STEPS = 600
LONGEST = 304  # tokens of a response
HERE = Path(__file__).parent
PAD = 0
END = 1
VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789abcdef>", *"wxyz"]


def make_tokenizer():
    """Create a byte-pair encoding without merges: one id per character."""
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, model_max_length=512, **special
    )


def make_config():
    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        initializer_range=0.1,  # as for ../arithmetic: a narrower start has a gradient ten times as large
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def read(name):
    return [json.loads(line)["prompt"] for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def answer(prompt, chance):
    return "".join(f"{number:02x}{chance.choice('wxyz')}" for number in range(int(prompt[:2], 16) - 1, -1, -1))


@torch.no_grad()
def mean_reward(model, tokenizer, prompts):
    """Return the mean reward of a sampled response to each prompt."""
    batch = tokenizer(prompts, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=LONGEST, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(counted, prompts, texts)) / len(prompts)


def loss_of(model, tokenizer, prompts, chance):
    """Return the loss of the responses alone."""
    pairs = [(tokenizer.encode(prompt), [*tokenizer.encode(answer(prompt, chance)), END]) for prompt in prompts]
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.long)
    labels = torch.full((len(pairs), width), -100)
    for i, (prompt, response) in enumerate(pairs):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    tokenizer = make_tokenizer()
    model = Qwen2ForCausalLM(make_config())
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    prompts = read("train.jsonl")
    test = read("test.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        loss = loss_of(model, tokenizer, chance.choices(prompts, k=BATCH), chance)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            reached = mean_reward(model, tokenizer, test)
            print(f"step {step}  loss {loss.item():.3f}  held out, sampled {reached:.3f}", flush=True)
            if reached >= TARGET:
                break
    if not ACCEPT[0] <= reached <= ACCEPT[1]:
        sys.exit(f"the reward {reached:.3f} is outside {ACCEPT}: nothing was written; choose another SEED")
    out = HERE / "model"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    make_tokenizer().save_pretrained(out)  # a fresh one: the used one would save its padding


if __name__ == "__main__":
    main()
