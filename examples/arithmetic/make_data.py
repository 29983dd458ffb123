"""Write train.jsonl (9,500 rows) and test.jsonl (500 rows): sums of two numbers.

The files are next to this one; the numbers are in 0..99. Guarantees:

- each of the 10,000 ordered pairs (a, b) occurs once, in one of the two files; no pair is in both (48+37 may be in
  train.jsonl while 37+48 is in test.jsonl)
- a row is {"prompt": "37+48=", "answer": "85"}, without zero padding
- the split and the order depend only on SEED, so a second run writes the same bytes
"""

import json
import random
from pathlib import Path

SEED = 0
HELD_OUT = 500


def rows():
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(SEED).shuffle(pairs)
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


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
