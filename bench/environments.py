"""Outcome of each row of examples/calculator with an environment that fails.

Some rows fail in every possible way, others run hostile code in the sandbox (bench/faulty.py). The outcome of each row
is compared with the expected one. In each iteration, only the rows whose environment failed and those of their groups
may be lost. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import smoke
from faulty import FATES, fate
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from msrl_graph import noise

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "calculator"
MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
GROUP = 8
PROGRAM = """
import "{example}/calculator.rlg"
algorithm faulty extends calculator {{
  node actor.generate(prompt, answer) -> response, mask, reward {{
    samples     = group
    environment = "{here}/faulty.py:Faulty"
    stop        = "="
    turns       = 3
    timeout     = 20 s
    on_failure  = drop_group
    memory      = 500 MB
  }}
}}
cluster here {{ device = "cpu", devices_per_node = 1 }}
deploy faulty on here {{
  set prompts = {prompts}
  set group = {group}
  set prompt_len = 9
  set response_len = 24
  model policy = "{example}/model"
  data source = "{example}/train.jsonl" {{ prompt = "prompt", answer = "answer" }}
  run {{ iterations = {iterations}, seed = 0 }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=5)
    options = smoke.parse(parser, prompts=32, iterations=1)
    rows = options.prompts * GROUP
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        text = PROGRAM.format(
            example=EXAMPLE, here=HERE, prompts=options.prompts, group=GROUP, iterations=options.iterations
        )
        (Path(folder) / "faulty.rlg").write_text(text)
        command = [sys.executable, "-c", MAIN, f"{folder}/faulty.rlg", "--out", str(out), "--record"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        outcomes = [
            compare_outcomes(iteration, rows, lines[iteration], out / "rows" / f"{iteration:06d}.parquet")
            for iteration in range(options.iterations)
        ]
    processes = count_processes()
    table = Table(box=None, padding=(0, 2, 0, 0))
    titles = (
        "iteration",
        "rows",
        "to fail",
        "failed",
        "of these",
        "left with their group",
        "trained on",
        "wrongly lost",
        "wrongly kept",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for iteration, (counts, reasons) in enumerate(outcomes):
        table.add_row(
            str(iteration),
            str(rows),
            *(str(counts[key]) if key in counts else ", ".join(reasons) for key in titles[2:]),
        )
    Console(width=160).print(table)
    total = sum((counts for counts, _ in outcomes), Counter())
    fates = Counter(fate_of(iteration, row) for iteration in range(options.iterations) for row in range(rows))
    print(", ".join(f"{count} {name or 'do nothing of the kind'}" for name, count in sorted(fates.items())))
    summary = {
        "rows": rows * options.iterations,
        "failed": total["failed"],
        "ran_hostile_code": sum(count for name, count in fates.items() if name.startswith("runs")),
        "wrongly_lost": total["wrongly lost"],
        "wrongly_kept": total["wrongly kept"],
        "processes_left": processes,
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(summary))


def fate_of(iteration: int, row: int) -> str:
    """Return what a row's instance draws."""
    return fate(noise.RandomStream(0, "function", "actor.generate", "train").generator(iteration, row))


def compare_outcomes(
    iteration: int, rows: int, line: dict[str, float], recorded: Path
) -> tuple[Counter[str], list[str]]:
    """Return the outcomes of an iteration's rows, and the reasons of failed rows."""
    due = {row for row in range(rows) if FATES.get(fate_of(iteration, row), (0, ""))[1]}
    gone = {row for row in range(rows) if any(other // GROUP == row // GROUP for other in due)}
    table = parquet.read_table(recorded)
    assert table.column("row").to_pylist() == [*range(rows)], "a row is not in the recording"
    times, rewards = (table.column(name).to_pylist() for name in ("actor_generate_times", "reward"))
    stay = {row for row in range(rows) if times[row]}
    assert all((rewards[row] is not None) == (row in stay) for row in range(rows)), "a row that failed has a reward"
    assert line["rows"] == len(stay), "rows were trained on that did not stay, or left out that did"
    counts = Counter(
        {
            "to fail": len(due),
            "failed": int(line["failed"]),
            "left with their group": rows - len(stay) - int(line["failed"]),
            "trained on": int(line["rows"]),
            "wrongly lost": len({*range(rows)} - gone - stay),
            "wrongly kept": len(stay & gone),
        }
    )
    reasons = [f"{int(line[key])} {key.removeprefix('failed/')}" for key in sorted(line) if key.startswith("failed/")]
    return counts, reasons


def count_processes() -> int:
    """Return the number of processes that the run or its sandboxes left behind.

    Other runs may be active at the same time. The processes of an active run have a parent that belongs to the run. A
    process that was left behind has another parent, see `find_heir`.
    """
    words = ("functions.nest", "bwrap")
    heir = find_heir()
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            while any(word in " ".join(process.cmdline()) for word in words):
                if process.ppid() == heir:
                    found += 1
                process = process.parent() or psutil.Process(1)
    return found


def find_heir() -> int:
    """Return the id of the process that becomes the parent of processes whose parent has ended."""
    done = subprocess.run(["sh", "-c", "sleep 60 > /dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = psutil.Process(int(done.stdout))
    heir = orphan.ppid()
    orphan.kill()
    return heir


if __name__ == "__main__":
    main()
