"""Time that user functions take for a batch of rows.

They run one after another, in workers, and, if they wait, in an event loop.

`sleeps` waits 20 ms per row, `computes` uses as much processor time, `judge` asks a server of this machine that answers
after 200 ms, and `nothing` shows the cost of the calls. Each figure is the median of some batches, after one that
starts the workers. Prints a table and, last, one line of JSON: seconds per batch, and microseconds per row.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import smoke
from aiohttp import web
from rich.console import Console
from rich.table import Table

from msrl_graph import compile
from msrl_graph.runtime.data.columns import ragged, texts
from msrl_graph.runtime.dock.messages import Batch, Share
from msrl_graph.runtime.dock.readers import list_node_reads
from msrl_graph.runtime.functions.function_node import FunctionNode
from msrl_graph.runtime.functions.workers import Workers, WorkerSpec
from msrl_graph.runtime.process.task import Task

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
FILE = """import time
import aiohttp

_sessions = []

def sleeps(response, answer):
    time.sleep(0.02)
    return float(answer)

def computes(response, answer):
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    return float(answer)

def nothing(response, answer):
    return float(answer)

async def judge(response, answer: str):
    if not _sessions:
        _sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    async with _sessions[0].post("URL", json={"answer": answer}) as said:
        return float((await said.json())["answer"])
"""
WAIT = 0.2  # seconds after which the judge answers


def serve(ready: Any) -> None:
    """Run the judge's server."""

    async def judged(request: web.Request) -> web.Response:
        asked = await request.json()
        await asyncio.sleep(WAIT)
        return web.json_response(asked)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/", judged)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def measure_batch(folder: Path, name: str, workers: int, rows: int, rounds: int) -> float:
    """Return the seconds of a batch."""
    text = (EXAMPLE / "grpo.rlg").read_text(encoding="utf-8")
    for path in ("./model", "train.jsonl", "test.jsonl"):
        text = text.replace(f'"{path}"', f'"{EXAMPLE / path}"')
    text = text.replace("exact_match()", f'"mine.py:{name}"')
    program = folder / "p.rlg"
    program.write_text(text, encoding="utf-8")
    plan = compile(program)
    node = plan.graph.node("host.reward")
    reader = next(node_reads for node_reads in list_node_reads(plan) if node_reads.node == "host.reward")
    spec = WorkerSpec("", plan.to_json(), {node.name: reader}, f"{folder}/note")
    function = FunctionNode(node, plan, reader, workers=Workers(workers, spec) if workers > 1 else None)
    numbers = np.arange(rows)
    share = Share(numbers, np.ones(rows, np.int64), numbers, {}, (), rows, rows, {}, 0, True)
    answers = [str(number) for number in range(rows)]
    columns = {"response": ragged([np.ones(4, np.int32)] * rows, np.int32), "answer": texts(answers)}
    batch = Batch(share, numbers, columns)
    times = []
    for number in range(rounds + 1):
        begun = time.perf_counter()
        result = function(batch, Task("train", number, rows // 8))
        times.append(time.perf_counter() - begun)
        assert np.array_equal(result.columns["reward"].column.values, numbers)
    return statistics.median(times[1:])


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="rows of each batch")
    options = smoke.parse(parser, rounds=1, rows=16)
    cases = [
        ("sleeps", 1, 512), ("sleeps", 8, 512), ("computes", 1, 512), ("computes", 2, 512), ("judge", 1, 1000),
        ("nothing", 1, 512), ("nothing", 2, 512),
    ]  # fmt: skip
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    table = Table("function", "workers", "rows", "s per batch", "us per row")
    figures = []
    try:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            url = f"http://127.0.0.1:{ours.recv()}/"
            (folder / "mine.py").write_text(FILE.replace("URL", url), encoding="utf-8")
            for name, workers, rows in cases:
                rows = options.rows or rows
                seconds = measure_batch(folder, name, workers, rows, options.rounds)
                microseconds = 1e6 * seconds / rows
                table.add_row(name, str(workers), str(rows), f"{seconds:.3f}", f"{microseconds:,.0f}")
                figures.append({"function": name, "workers": workers, "rows": rows, "s": round(seconds, 4)})
    finally:
        server.kill()
        server.join()
    Console().print(table)
    print(json.dumps({"functions": figures}))


if __name__ == "__main__":
    main()
