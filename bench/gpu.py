"""A model of Qwen2.5-0.5B's shape, weights at random, on one GPU: seconds and memory, predicted against measured, by
each pair of engines.

256 responses of 512 tokens an iteration, each to its end, in bfloat16. Prints what each run says of itself and, last,
one line of JSON: of each pair the medians after the first iteration, and predicted over measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from seconds import EXAMPLE, endless, engines, randomised

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
CHANGES = (
    ("i32[<= 5]", "i32[<= 512]"),
    ("prompts = 64", "prompts = 32"),
    ("mini_batch = 256", "mini_batch = 128"),
    ('"./model"', '"../half" { dtype = bf16 }'),
    ('= "t', '= "../t'),
    ('device = "cpu"', 'device = "DEVICE"'),
    ("  evaluate held_out { every = 40, report = reward, samples = 1, temperature = 0, label", "  # {"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=["megatron vllm", "fsdp vllm", "fsdp hf"], help="trainer generator")
    parser.add_argument("--device", default="h100", help="a preset")
    parser.add_argument("--iterations", type=int, default=4)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
        endless(folder, "endless")
        randomised(folder, "half", SHAPE, "endless")
        for pair in options.pairs:
            place = folder / pair.replace(" ", "_")
            place.mkdir()
            file, chosen = engines(*pair.split())
            for source in ("grpo.rlg", "one_rank.rlg"):
                text = (folder / source).read_text()
                for old, new in (*CHANGES, chosen):
                    text = text.replace(old, new.replace("DEVICE", options.device))
                (place / source).write_text(text)
            command = ["msrl-run", str(place / file), "--iterations", str(options.iterations), "--measure-memory"]
            print(f"{pair}:", flush=True)
            if subprocess.run([*command, "--out", str(place / "out")]).returncode:
                return 1
            lines = [json.loads(line) for line in (place / "out" / "metrics.jsonl").read_text().splitlines()][1:]
            middle = {p: statistics.median(line["phases"].get(p, 0.0) for line in lines) for p in lines[0]["phases"]}
            seconds = statistics.median(line["seconds"] for line in lines)
            found[pair] = {"seconds": round(seconds, 3)} | {p: round(s, 4) for p, s in middle.items()}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
