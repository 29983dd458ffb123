"""Write train.jsonl (4,000 rows) and test.jsonl (250 rows): sums of three numbers.

The files are next to this one; the numbers are in 0..99. Guarantees: each row is {"prompt": "37+48+5-", "answer":
"90"}, the prompts are distinct, and they and their order depend only on SEED, so a second run writes the same bytes.
(The minus sign asks for the result: the tokenizer has no other unused sign.)
"""

import json
import random
from pathlib import Path

SEED = 0
TRAIN = 4000
HELD_OUT = 250


def rows():
    samples = random.Random(SEED).sample(range(10**6), TRAIN + HELD_OUT)
    numbers = [(sample // 10**4, sample // 100 % 100, sample % 100) for sample in samples]
    return [{"prompt": f"{a}+{b}+{c}-", "answer": str(a + b + c)} for a, b, c in numbers]


def main():
    here = Path(__file__).parent
    data = rows()
    for name, part in (("test", data[:HELD_OUT]), ("train", data[HELD_OUT:])):
        (here / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8", newline="\n"
        )
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
