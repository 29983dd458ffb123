"""Decisions of a dock controller per second.

Rows are reported in a random order, a number at a time, to an update that reads five columns, all but one of which are
present for every row; and to an inference that takes batches.

A row is decided when its last missing column arrives. Each figure is of the last rows of all that wait: a flat figure
is the same for a thousand rows and a hundred thousand. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser

import numpy as np
import smoke

from msrl_graph.analysis.rowsets import Rowset, Sieve
from msrl_graph.runtime.dock.controller import Controller
from msrl_graph.runtime.dock.messages import RowLocation, RowsReady
from msrl_graph.runtime.dock.readers import ColumnRead, NodeReads
from msrl_graph.runtime.process.task import Task

FAN = 16
HOSTS = 8
COLUMNS = ("response", "old_logp", "ref_logp", "advantage")
READS = (ColumnRead("prompt", 0, "source"), *(ColumnRead(name, 1, "n") for name in COLUMNS))
SETS = (Rowset(0), Rowset(1, 0, FAN))
FILTER = Sieve("mixed", 1, 1)
CASES = {
    "update": {"update": True, "mini_batch": 512, "epochs": 1, "balance": True},
    "batches of 32": {"chunk": 32},
    "whole groups, by tokens": {"chunk": 32, "unit": 0, "balance": True},
    "batches of 16,000 tokens": {"chunk_tokens": 16_000},
    "after a filter": {"chunk": 32, "passed": (FILTER,)},
}


def reader(case: str) -> NodeReads:
    fields = {
        "node": "n",
        "reads": READS,
        "sets": SETS,
        "rows": 1,
        "unit": 1,
        "whole_batch": False,
        "seed": 1,
        "tokens": {"prompt": 1, "response": 1},
    }
    return NodeReads(**(fields | {"group_warehouses": tuple(range(HOSTS))} | CASES[case]))


def rate(case: str, rows: int, at_once: int, last: int) -> float:
    """Return the rows decided per second, over the `last` of all rows."""
    node_reads = reader(case)
    draw = random.Random(0)
    controller = Controller(node_reads)
    task = Task("train", 0, rows // FAN)
    controller.open(task)
    number = iter(range(1 << 40))

    def news(column: str, numbers: np.ndarray) -> list[RowsReady]:
        place = RowLocation(draw.randrange(HOSTS), f"{next(number)}")
        return [RowsReady(column, numbers, numbers % 1000 + 1, place, verdicts=column == FILTER.column)]

    for column in ("prompt", *COLUMNS[:-1]):
        all_rows = np.arange(rows // FAN if column == "prompt" else rows)
        for part in np.array_split(all_rows, max(1, rows // 1024)):
            controller.take_in_news(task.key, news(column, part))
    columns = (*([FILTER.column] if node_reads.passed else []), COLUMNS[-1])
    order = np.random.default_rng(0).permutation(rows)
    wait = order[last:]
    come = order[:last]
    if node_reads.passed:
        controller.take_in_news(task.key, news(FILTER.column, np.sort(wait)))
    parts = [np.sort(come[start : start + at_once]) for start in range(0, last, at_once)]
    messages = [[item for column in columns for item in news(column, part)] for part in parts]
    begin = time.perf_counter()
    for message in messages:
        for round in controller.take_in_news(task.key, message):
            controller.hand_out(task.key, round)
    return last / (time.perf_counter() - begin)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_024, 10_240, 102_400])
    arguments = smoke.parse(parser, rows=[1_024], rounds=1)
    rates_by_case: dict[str, float] = {}
    for at_once in (1, 64, 1024):
        for case in CASES:
            rates = [
                max(
                    rate(case, rows, at_once, min(rows, 8192 if at_once > 1 else 1024)) for _ in range(arguments.rounds)
                )
                for rows in arguments.rows
            ]
            print(
                f"{case:24}  {at_once:5} at once  "
                + "  ".join(f"{rows_per_second:10,.0f}" for rows_per_second in rates)
                + "  rows/s",
                flush=True,
            )
            rates_by_case[f"{case}, {at_once} at once"] = round(rates[-1])
    print(json.dumps({"rows": arguments.rows, "rows_per_second": rates_by_case}))


if __name__ == "__main__":
    main()
