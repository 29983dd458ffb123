"""Create the example's start model, a Qwen2 of 0.1 million parameters.

It is written to model/ next to this file. It can use the calculator, and rarely does.

It is trained from scratch on train.jsonl: one time in four on an episode with the calculator ("12+34=", reply 46,
"46+56=", reply 102, "102<eos>"), else on the answer alone, which so small a model does not learn to find. The loss is
on what the policy writes. Training stops at the first check at which most episodes that begin with the calculator are
right; nothing is written unless the share of right sampled episodes is within ACCEPT. So reinforcement learning finds
right and wrong answers, and what makes the difference.

Guarantees: one thread and one seed, so the same machine with the same library versions gives the same weights. The
tokenizer is that of ../arithmetic. Run make_data.py first. Needs torch, transformers, tokenizers, safetensors.
"""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from calculator import Calculator
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

SEED = 0
WITH_TOOL = 0.25
ACCEPT = (0.1, 0.35)  # of sampled episodes
LR = 3e-3
BATCH = 128
CHECK_EVERY = 100
MAX_STEPS = 3000
COPIES = 0.9  # share of episodes with the calculator that must be right
TURNS = 3
BOUND = 24
HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "arithmetic" / "model"
PAD = 0
END = 1
core = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def config():
    return Qwen2Config(
        vocab_size=core.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def ids(text):
    return core.encode(text, add_special_tokens=False).ids


def episode(row, tool):
    """Return the tokens of a prompt and a response, and which ones the policy writes."""
    parts = [(row["prompt"], False)]
    if tool:
        a, b, c = map(int, row["prompt"][:-1].split("+"))
        parts += [(f"{a}+{b}=", True), (str(a + b), False), (f"{a + b}+{c}=", True), (row["answer"], False)]
    parts += [(row["answer"], True)]
    tokens = [(token, own) for text, own in parts for token in ids(text)]
    return [token for token, _ in tokens] + [END], [own for _, own in tokens] + [True]


def batch(episodes):
    width = max(len(tokens) for tokens, _ in episodes)
    inputs = torch.tensor([tokens + [PAD] * (width - len(tokens)) for tokens, _ in episodes])
    own = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in episodes])
    return inputs, torch.where(own, inputs, -100)


@torch.no_grad()
def play(model, rows, begin=""):
    """Return the share of right sampled episodes.

    With `begin`, an episode begins with the start of the expression.
    """
    right = 0
    states = []
    for row in rows:
        calculator = Calculator()
        calculator.reset(row["answer"])
        first = ids(row["prompt"].split("+")[0] + "+") if begin else []
        states.append({"tool": calculator, "all": ids(row["prompt"]) + first, "turn": first, "turns": 0})
    while states:
        inputs, _ = batch([(row_state["all"], [True] * len(row_state["all"])) for row_state in states])
        last = torch.tensor([len(row_state["all"]) - 1 for row_state in states])
        logits = model(input_ids=inputs).logits[torch.arange(len(states)), last]
        drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
        on = []
        for state, token in zip(states, drawn, strict=True):
            state["all"].append(token)
            state["turn"].append(token)
            text = core.decode(state["turn"])
            if token != END and not text.endswith("=") and len(state["all"]) < 9 + BOUND:
                on.append(state)
                continue
            reply, reward, done = state["tool"].step(text)
            state["turns"] += 1
            right += reward
            if not done and state["turns"] < TURNS and len(state["all"]) + 4 < 9 + BOUND:
                state["all"] += ids(reply)
                state["turn"] = []
                on.append(state)
        states = on
    return right / len(rows)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    train, test = (
        [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    )
    model = Qwen2ForCausalLM(config())
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.time()
    share = 0.0
    for step in range(1, MAX_STEPS + 1):
        inputs, labels = batch([episode(row, draw.random() < WITH_TOOL) for row in draw.sample(train, BATCH)])
        logits = model(input_ids=inputs).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 50)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            share = play(model, test)
            copies = play(model, test, begin="tool")
            spent = time.time() - start
            print(
                f"step {step}  loss {loss.item():.3f}  sampled {share:.3f}, with the tool {copies:.3f}  {spent:.0f} s",
                flush=True,
            )
            if copies >= COPIES:
                break
    if not ACCEPT[0] <= share <= ACCEPT[1]:
        sys.exit(f"sampled episodes are right in {share:.3f}, outside {ACCEPT}: nothing was written")
    out = HERE / "model"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, out)


if __name__ == "__main__":
    main()
