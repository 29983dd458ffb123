"""How long a run waits for a million rows, and how much memory they take, by format.

For each form of the same rows, in a process of its own: `seconds` from nothing to the rows of the first iteration
(`cpu_seconds` of CPU time), `again_seconds` where a run has read the same data before, and `mb`, the memory of the
process that the rows add. Then `first_s` and `few_first_s`: the seconds from `msrl-run` to the first line of metrics,
with all rows and with 1,000. The rows of each form must be those of JSON lines. The last line is JSON."""

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import smoke

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "arithmetic"
PROGRAM = "grpo.rlg"


def write(folder: Path, count: int) -> list[str]:
    """Write the same rows in each form; return the names that a program states."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers = [(i % 100, i * 7919 % 100) for i in range(count)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in numbers]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1))
    (folder / "rows.jsonl.zst").write_bytes(pa.compress(text.encode(), codec="zstd", asbytes=True))
    (folder / "list.json").write_text(json.dumps(rows))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows(row.values() for row in rows)
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "rows.parquet")
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
        stream.write_table(table)
    parts = folder / "parts"
    parts.mkdir()
    half = len(rows) // 2
    for i, part in enumerate((table.slice(0, half), table.slice(half))):
        parquet.write_table(part, parts / f"train-{i:05d}-of-00002.parquet")
    shards = folder / "shards"
    shards.mkdir()
    lines = text.splitlines(keepends=True)
    for i, lines_of_part in enumerate((lines[:half], lines[half:])):
        (shards / f"part-{i}.jsonl").write_text("".join(lines_of_part))
    return [
        *("rows.jsonl", "list.json", "rows.csv", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows.arrow"),
        *("parts/", "shards/*.jsonl"),
    ]


def load(target: str) -> None:
    """Load data as the first process of a run does, and print the figures; this runs in a process of its own."""
    import hashlib
    from dataclasses import replace

    import numpy as np

    import msrl_graph
    from msrl_graph.runtime.data.dataset import Dataset

    plan = msrl_graph.compile(EXAMPLE / PROGRAM)
    data = replace(plan.deploy.data["source"], path=target)
    np.ones(1)
    process = psutil.Process()
    before = process.memory_full_info().uss
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    dataset = Dataset(data, plan)
    rows = dataset.rows(0, 64)
    seconds = time.perf_counter() - begin
    cpu_seconds = time.process_time() - begin_cpu
    memory = process.memory_full_info().uss
    digest = hashlib.sha256()
    sample = dataset.rows(0, min(len(dataset), 50_000))
    for column in (*rows.values(), *sample.values()):
        digest.update(column.values.tobytes())
        digest.update(column.lengths.tobytes())
    figures = {"rows": len(dataset), "seconds": seconds, "cpu_seconds": cpu_seconds, "mb": (memory - before) / 1e6}
    print(json.dumps(figures | {"digest": digest.hexdigest()}))


def first_iteration(folder: Path, target: Path, cache: Path) -> float:
    """Return the seconds from the start of a run with these data to its first line of metrics."""
    program = (EXAMPLE / PROGRAM).read_text().replace('"./model"', f'"{EXAMPLE / "model"}"')
    program = program.replace('"train.jsonl"', f'"{target}"').replace('"test.jsonl"', f'"{EXAMPLE / "test.jsonl"}"')
    program = program.replace("evaluate held_out { every = 40,", "evaluate held_out { every = 400,")
    (folder / "p.rlg").write_text(program)
    out = Path(tempfile.mkdtemp(dir=folder))
    code = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(folder / "p.rlg"), "--iterations", "1", "--out", str(out), "--overwrite"]
    begin = time.monotonic()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    lines = out / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        if run.poll() is not None:
            raise SystemExit(f"the run ended with status {run.returncode}: {run.stderr.read() if run.stderr else ''}")
        time.sleep(0.05)
    waited = time.monotonic() - begin
    run.communicate()
    return waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = smoke.parse(parser, rounds=1, rows=20_000)
    if options.load:
        load(options.load)
        return
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forms = write(folder, options.rows)
        digests = set()
        for form in forms:
            cache = tempfile.mkdtemp(dir=folder)
            found = []
            for _ in range(2):
                command = [sys.executable, __file__, "--load", str(folder / form)]
                done = subprocess.run(
                    command, env={**os.environ, "XDG_CACHE_HOME": cache}, capture_output=True, text=True, check=True
                )
                found.append(smoke.figures(done.stdout))
            digests |= {(item["rows"], item["digest"]) for item in found}
            first, again = found
            figures[form] = {
                "rows": first["rows"],
                "seconds": first["seconds"],
                "cpu_seconds": first["cpu_seconds"],
                "again_seconds": again["seconds"],
                "mb": max(first["mb"], again["mb"]),
            }
            shown = figures[form]
            print(
                f"{form}: {shown['rows']:,} rows, {shown['seconds']:.1f} s ({shown['cpu_seconds']:.1f} s of CPU time), "
                f"again {shown['again_seconds']:.2f} s, {shown['mb']:.0f} MB",
                flush=True,
            )
        if len(digests) != 1:
            raise SystemExit(f"the forms have other rows than JSON lines: {digests}")
        lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
        (folder / "few.jsonl").write_text("".join(lines[:1000]))
        cache = folder / "run"
        few = first_iteration(folder, folder / "few.jsonl", cache)
        many = first_iteration(folder, folder / "rows.jsonl", cache)
        again = first_iteration(folder, folder / "rows.jsonl", cache)
    print(f"first iteration after {many:.1f} s, again {again:.1f} s, with 1,000 rows {few:.1f} s")
    print(json.dumps({"forms": figures, "first_s": many, "again_first_s": again, "few_first_s": few}))


if __name__ == "__main__":
    main()
