"""Write train.jsonl (4,000 pairs) and test.jsonl (300 pairs) of sums.

Each row is {"prompt": "37+48=", "chosen": "85", "rejected": "63"}: the right answer, and the right answer of the next
prompt. Prompts of train.jsonl come from ../arithmetic/train.jsonl, those of test.jsonl from ../arithmetic/test.jsonl,
each at most once, in their order; a prompt whose next one has the same answer is skipped.

Guarantees: no prompt is in both files; no rejected response is right. Needs only the standard library.
"""

import json
from itertools import islice, pairwise
from pathlib import Path

PAIRS = {"train": 4000, "test": 300}
HERE = Path(__file__).parent


def pairs(rows):
    for row, other in pairwise(rows):
        if row["answer"] != other["answer"]:
            yield {"prompt": row["prompt"], "chosen": row["answer"], "rejected": other["answer"]}


def main():
    for name, count in PAIRS.items():
        source = HERE.parent / "arithmetic" / f"{name}.jsonl"
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        text = "".join(json.dumps(pair) + "\n" for pair in islice(pairs(rows), count))
        (HERE / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
