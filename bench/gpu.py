"""Seconds and memory on one GPU, predicted and measured, by pair of engines.

The model has the shape of Qwen2.5-0.5B and random weights. An iteration has 256 responses of 512 tokens, each to its
end, in bfloat16. Prints the output of each run and, last, one line of JSON: for each pair the median iteration and its
phases, without the first one, and predicted over measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import smoke
from seconds import EXAMPLE, Round, endless, plan_of, randomize, with_engines

from msrl_graph import run
from msrl_graph.runtime.metrics import predicted

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
SMALL |= {"num_key_value_heads": 1, "vocab_size": 64}


def replacements(device: str, tokens: int) -> tuple[tuple[str, str], ...]:
    """Return the replacements in the example's program."""
    return (
        ("i32[<= 5]", f"i32[<= {tokens}]"),
        ("prompts = 64", "prompts = 32"),
        ("mini_batch = 256", "mini_batch = 128"),
        ('"./model"', '"./model" { dtype = bf16 }'),
        ('device = "cpu"', f'device = "{device}"'),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pairs", nargs="*", default=["megatron vllm", "fsdp vllm", "fsdp hf"], help="pairs of trainer and generator"
    )
    parser.add_argument("--device", default="h100", help="a preset")
    parser.add_argument("--iterations", type=int, default=4)
    few = {"pairs": ["fsdp hf"], "device": "cpu", "iterations": 2, "shape": SMALL, "tokens": 8}
    parser.set_defaults(shape=SHAPE, tokens=512)
    options = smoke.parse(parser, **few)
    changes = replacements(options.device, options.tokens)
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        endless(folder, "endless")
        randomize(folder, "half", options.shape, "endless")
        for pair in options.pairs:
            plan = plan_of(with_engines("half", changes, options.iterations, *pair.split()), folder)
            out = folder / pair
            print(f"{pair}:", flush=True)
            run(plan, out, measure_memory=True)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
            estimate = predicted.estimate(plan, lines)
            assert estimate is not None
            measured = Round(lines, estimate)
            phases = {
                phase: statistics.median(line["phases"].get(phase, 0.0) for line in lines)
                for phase in lines[0]["phases"]
            }
            figures[pair] = {"seconds": measured.seconds, "predicted_over_measured": measured.ratio} | phases
    print(
        json.dumps(
            {
                pair: {key: round(value, 4) for key, value in pair_figures.items()}
                for pair, pair_figures in figures.items()
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
