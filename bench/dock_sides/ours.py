"""The dock of a compiled plan, with the package's own processes.

Each host has a worker that handles rows as the ranks and functions of a run do, and computes nothing: it reads what a
node reads, as the dock hands it out, and writes what the node writes.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import numpy as np
import ray
from side import COLUMNS, NODES, Setup, Side, Times, actor_options, check, elapsed, marks, memory, pids, serve

from msrl_graph import compile
from msrl_graph.ir.plan import Plan, from_json
from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, offsets_from_lengths, texts
from msrl_graph.runtime.dock.client import Client
from msrl_graph.runtime.dock.host import DockHost
from msrl_graph.runtime.dock.messages import DockAddress
from msrl_graph.runtime.dock.readers import list_members, list_node_reads
from msrl_graph.runtime.dock.segments import room_name
from msrl_graph.runtime.process.processes import SHARED
from msrl_graph.runtime.process.run_key import new_key
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report

GROUP = 8  # responses to a prompt
ROOM = 1 << 30  # maximum bytes of the rows of a host
# What a side's plan states about its dock, and about the edges along which rows are shared out.
DOCKS = {"ours_one": "dock { mode = central }"}
EDGES = {"ours_tokens": "{ balance = tokens }"}
TEXT = """import grpo
algorithm rows extends grpo {{
  actor.generate -> actor.infer, reference.infer, host.reward {edge}
  actor.infer, reference.infer, host.advantage -> actor.update {edge}
}}
cluster hosts {{ device = "cpu", nodes = {hosts}, devices_per_node = 1 }}
deploy rows on hosts {{
  set prompts = {prompts}
  set group = {group}
  set prompt_len = 8
  set response_len = {length}
  model policy = "tiny"
  data source = "tiny.jsonl" {{ prompt = "prompt", answer = "answer" }}
  layout actor.update, actor.generate, reference.infer {{ dp = {hosts} }}
  {dock}
}}
"""


def plan_of(setup: Setup) -> Plan:
    hosts = len(setup.hosts)
    prompts = setup.samples // GROUP * hosts
    statements = {"dock": DOCKS.get(setup.name, ""), "edge": EDGES.get(setup.name, "")}
    text = TEXT.format(hosts=hosts, prompts=prompts, group=GROUP, length=setup.length, **statements)
    return compile("dock.rlg", text=text)


class Made:
    """The rows that a worker makes, with the given `lengths`; see side.Rows."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths
        total = int(lengths.sum())
        self.values = {column: np.ones(total, np.int32 if column == "response" else np.float32) for column in COLUMNS}

    def pieces(self, rows: Any, columns: tuple[str, ...]) -> dict[str, ColumnRows]:
        offsets = offsets_from_lengths(self.lengths[rows])
        pieces = {}
        for name in columns if len(rows) else ():
            if name == "reward":
                column = ColumnData(np.zeros(len(rows), np.float32))
            else:
                values = self.values[name][: offsets[-1]]
                values[offsets[:-1]] = marks(rows, name)
                column = ColumnData(values, offsets)
            pieces[name] = ColumnRows(rows, column)
        return pieces


def prompt_columns(task: Task) -> dict[str, ColumnRows]:
    numbers = np.arange(task.prompts)
    prompt = ColumnData(np.zeros(4 * len(numbers), np.int32), offsets_from_lengths(np.full(len(numbers), 4)))
    return {"prompt": ColumnRows(numbers, prompt), "answer": ColumnRows(numbers, texts(["1"] * len(numbers)))}


def check_batch(rows: Any, columns: dict[str, ColumnData]) -> None:
    check(
        rows,
        {
            name: column.values[column.offsets[:-1]]
            for name, column in columns.items()
            if name in COLUMNS and column.offsets is not None
        },
    )


@ray.remote
class Worker:
    """The ranks and functions of one host."""

    def __init__(self, plan: str, way: DockAddress, process: int, host: int, lengths: Any) -> None:
        self.plan = from_json(plan)
        self.host = host
        self.client = Client(f"rank {process}", list_node_reads(self.plan), way, host)
        self.rows = Made(lengths)

    def ready(self) -> None:
        self.client._local_segments()

    def run(self, task: Task, compute: float) -> tuple[Times, int]:
        """Run an iteration; return its start and end, and the tokens updated on."""
        start = time.perf_counter()
        client = self.client
        tokens = 0
        if self.host == 0:
            client.put_rows("source", task, prompt_columns(task))
        for node in self.plan.graph.nodes[1:]:
            last = False
            while not last:
                batch = client.take_share(node.name, task, self.host)
                last = batch.share.last
                check_batch(batch.rows, batch.columns)
                if node.verb == "update" and len(batch.rows):
                    tokens += len(batch.columns["response"].values)
                time.sleep(compute / len(NODES) if node.name in NODES else 0.0)
                rows = batch.rows
                if node.name == "actor.generate":
                    rows = (rows[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
                writes = {"host.reward": ("reward",), "host.advantage": ("advantage",)}.get(node.name)
                pieces = self.rows.pieces(rows, NODES[node.name][1] if writes is None else writes)
                if pieces:
                    client.put_rows(node.name, task, pieces)
        client.flush(task, Report(""))
        return (start, time.perf_counter()), tokens

    def write(self, task: Task) -> Times:
        """Write all that the update reads, with one put for each node that writes it."""
        rows = np.arange(task.prompts * GROUP)
        writes = (
            ("actor.generate", COLUMNS[:2]),
            *((name, (column,)) for name, column in zip(list(NODES)[1:], COLUMNS[2:], strict=False)),
        )
        pieces_by_node = [(node, self.rows.pieces(rows, columns)) for node, columns in writes]
        start = time.perf_counter()
        self.client.put_rows("source", task, prompt_columns(task))
        for node, pieces in pieces_by_node:
            self.client.put_rows(node, task, pieces)
        self.client.flush(task, Report(""))
        return start, time.perf_counter()

    def read(self, task: Task) -> Times:
        """Read what the update reads, and touch every page of it."""
        start = time.perf_counter()
        batch = self.client.take_share("actor.update", task, 0)
        for column in batch.columns.values():
            column.values[::1024].sum()
        end = time.perf_counter()
        check_batch(batch.rows, batch.columns)
        self.held = batch
        return start, end

    def end(self, task: Task) -> None:
        self.held = None
        self.client.flush(task, Report(""))


class Ours(Side):
    def __init__(self, setup: Setup, workers: int = 1) -> None:
        hosts = len(setup.hosts)
        self.plan = plan_of(setup)
        node_reads = list_node_reads(self.plan)
        dock_members, way = list_members(self.plan, node_reads, new_key() if hosts > 1 else b"")
        self.room = f"msrl-run-{secrets.token_hex(4)}"
        kinds: Any = (DockHost, Worker)
        self.docks = []
        for index, member in enumerate(dock_members):
            asks = [node_read for node_read in node_reads if way.controllers[node_read.node] == member.name]
            dock = kinds[0].options(name=member.name, **actor_options(setup.hosts[member.host]))
            self.docks.append(
                dock.remote(dock_members, index, asks, 60.0, way, room_name(self.room, member.host), ROOM)
            )
        lengths = np.array(setup.lengths or [setup.length] * (setup.samples * hosts))
        self.workers = [
            kinds[1]
            .options(**actor_options(setup.hosts[host]))
            .remote(self.plan.to_json(), way, host * workers + worker, host, lengths)
            for host in range(hosts)
            for worker in range(workers)
        ]
        ray.get([started.ready.remote() for started in self.workers])

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        task = Task("train", number, self.plan.graph.rows[0])
        ray.get([dock.open.remote(task) for dock in self.docks])
        answers = ray.get([worker.run.remote(task, compute) for worker in self.workers])
        ray.get([dock.drop.remote(task.key) for dock in self.docks])
        times, tokens = zip(*answers, strict=True)
        return {"seconds": elapsed(times), "uneven": max(tokens) / (sum(tokens) / len(tokens))}

    def close(self) -> None:
        for actor in (*self.workers, *self.docks):
            ray.kill(actor)
        until = time.monotonic() + 10
        while time.monotonic() < until and any(SHARED.glob(f"{self.room}-rows-*")):
            time.sleep(0.05)


class Local(Ours):
    """A writer and a reader on one host."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, workers=2)
        self.pids = pids([*self.workers, *self.docks])
        self.before = memory(self.pids)

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        task = Task("train", number, self.plan.graph.rows[0])
        writer, reader = self.workers
        ray.get([dock.open.remote(task) for dock in self.docks])
        put = ray.get(writer.write.remote(task))
        get = ray.get(reader.read.remote(task))
        shared = sum(file.stat().st_blocks * 512 for file in SHARED.glob(f"{self.room}*/**/*") if file.is_file())
        memory_used = memory(self.pids) - self.before + shared
        ray.get(reader.end.remote(task))
        ray.get([dock.drop.remote(task.key) for dock in self.docks])
        return {"put": put[1] - put[0], "get": get[1] - get[0], "held": memory_used}


if __name__ == "__main__":
    serve(lambda setup: Local(setup) if setup.name == "local" else Ours(setup))
