"""Write train.jsonl (2,000 rows) and test.jsonl (200 rows): countdowns.

The files are next to this one. A prompt is a number of two hexadecimal digits, "05>"; its answer counts down from it,
with a letter after each number: "04w03z02w01x00y". The letters are free, so that two responses to a prompt differ. The
length of a countdown is lognormal: most prompts ask for a few numbers, some for a hundred, and the longest response of
a batch is about ten times as long as the mean.

Guarantees: the numbers depend only on SEED, so a second run writes the same bytes.
"""

import json
import random
from pathlib import Path

SEED = 0
ROWS = {"train": 2000, "test": 200}
MEDIAN = 6.0
SIGMA = 1.0
MOST = 100


def number(chance):
    return max(1, min(MOST, round(chance.lognormvariate(0, SIGMA) * MEDIAN)))


def main():
    here = Path(__file__).parent
    chance = random.Random(SEED)
    for name, count in ROWS.items():
        rows = [{"prompt": f"{number(chance):02x}>"} for _ in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (here / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        lengths = [3 * int(row["prompt"][:2], 16) + 1 for row in rows]
        print(f"{name}.jsonl: {count} rows, {sum(lengths) / count:.1f} tokens on average, {max(lengths)} at most")


if __name__ == "__main__":
    main()
