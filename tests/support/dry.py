"""A run without Ray, engines and time: the real driver, docks, function hosts and ranks of a plan, one step at a time,
in an order that is drawn.

Invariant: what runs is the code that runs on Ray, but for what computes: a row's value in a column is its number,
filters say what `Truth` says, and work takes the seconds that `takes` says, else none. The order is `world.py`'s.
"""

from __future__ import annotations

import random
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from truth import Truth
from world import Method, Ref, Strand, Stuck, World

from msrl_graph import noise
from msrl_graph.analysis.async_schedule import count_lanes, fetched_edges, staleness_bounds
from msrl_graph.analysis.rowsets import Numbers, rowsets
from msrl_graph.backends.engine_protocols import GenerateRequest, Response, Sampling
from msrl_graph.ir.attributes import UpdateAttributes
from msrl_graph.ir.graph import Graph, Node
from msrl_graph.ir.plan import Plan
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.data.columns import Array, ColumnData, ColumnRows, Verdicts, ragged, texts
from msrl_graph.runtime.data.numerics import sampled_columns
from msrl_graph.runtime.dock import client
from msrl_graph.runtime.dock import host as dock
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.dock.readers import list_members, list_node_reads
from msrl_graph.runtime.dock.segments import Room
from msrl_graph.runtime.dock.warehouse import Warehouse, payload_bytes
from msrl_graph.runtime.driver import function_hosts
from msrl_graph.runtime.driver.iterations import Driver
from msrl_graph.runtime.driver.run_state import RunState
from msrl_graph.runtime.functions import host as functions
from msrl_graph.runtime.functions.crash_journal import CrashJournal
from msrl_graph.runtime.functions.function_node import Results
from msrl_graph.runtime.functions.values import InjectedArguments
from msrl_graph.runtime.metrics.ports import Ports
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import NextValues, Report
from msrl_graph.runtime.rank.context import NodeBatch, RankContext
from msrl_graph.runtime.rank.engines import Engines
from msrl_graph.runtime.rank.generation import GeneratorRole
from msrl_graph.runtime.rank.rank import InstructionRunner, Rank
from msrl_graph.runtime.rank.rollout import Rollout
from msrl_graph.runtime.rank.share_requests import ShareRequests
from msrl_graph.runtime.rank.training import TrainerRole
from msrl_graph.runtime.weights import checkpoint

CLASSES = {kind: kind.__ray_metadata__.modified_class for kind in (dock.DockHost, functions.FunctionHost)}


def cells(graph: Graph, column: str, rows: Array) -> ColumnData:
    """A column's values: each row's number, as often as it is long."""
    known = next((c for c in graph.columns if c.name == column), None)  # none: only the dock knows it
    if known is not None and known.element in ("text", "json"):
        return texts([str(r) for r in rows])
    if known is not None and not known.dims:
        return ColumnData(rows.astype(np.float64))
    return ragged([np.full(r % 5 + 1, r) for r in rows.tolist()], np.int64)


class Handed(client.Client):
    """Keeps what it hands out, and looks at the values."""

    def __init__(self, dry: Dry, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dry = dry

    def take_share(self, node: str, task: Task, group: int, at_once: bool = False) -> Batch:
        batch = super().take_share(node, task, group, at_once)
        self.dry.sizes[task.key] = task.prompts
        reader = self.readers[node]
        graph = self.dry.plan.graph
        for column, rows in ((r.column, r.rows) for r in reader.reads):
            if not len(batch.rows):
                continue
            if column in {s.name for s in graph.states}:
                prompts = reader.numbers(task).above(batch.rows, reader.rows, rows)
                self.dry.see(task, column, zip(prompts.tolist(), batch.columns[column].values.tolist(), strict=True))
                continue
            right = cells(graph, column, reader.numbers(task).above(batch.rows, reader.rows, rows))
            assert np.array_equal(batch.columns[column].values, right.values), (node, column, task.key)
        self.dry.handed[task.key, node].append((group, batch.share))
        return batch

    def put_rows(self, node: str, task: Task, pieces: dict[str, ColumnRows], asks: bool = False) -> None:
        super().put_rows(node, task, pieces, asks)
        self.dry.stored[task.key] += payload_bytes(pieces)
        rows = (payload_bytes({c: p.take(np.array([i]))}) for c, p in pieces.items() for i in range(len(p.rows)))
        self.dry.largest = max([self.dry.largest, *rows])
        assert not self.dock_address.capacity or all(w.free >= 0 for w in self.dry.warehouses)

    def _place_segments(self, *arguments: Any) -> Iterator[Any]:
        for warehouse, name, some in super()._place_segments(*arguments):
            self.dry.away += warehouse != self.home
            yield warehouse, name, some


class Plain(Room):
    """A room that somebody else removes."""

    @classmethod
    def create(cls, path: Path) -> Plain:
        path.mkdir()
        return cls(path)

    def join(self) -> None:
        pass


@dataclass
class Telling:
    """A coroutine's line in a world."""

    world: World
    name: str

    async def send(self, method: str, *arguments: Any) -> Any:
        return await Method(self.world, self.name, method).remote(*arguments)


@dataclass
class Lines:
    """Lines in a world."""

    world: World

    def connection_to(self, name: str) -> Any:
        def send(method: str, *arguments: Any, wait: bool = False) -> Any:
            return SimpleNamespace(get=Method(self.world, name, method).remote(*arguments).result)

        return SimpleNamespace(send=send, flush=lambda: None)

    def wait(self, asked: Ref) -> Any:
        return asked.result()


class Computed:
    """Stands in for calling.Function."""

    def __init__(self, dry: Dry, node: Node) -> None:
        self.dry = dry
        self.node = node
        self.sieve = dry.rows.sieves.get(node.name)
        self.filled = InjectedArguments(SimpleNamespace(fills=("rng",)), node, dry.plan)  # type: ignore[arg-type]

    def find_spoilt_rows(self, batch: Batch) -> Array:
        return np.zeros(len(batch.rows), bool)

    def parts(self, batch: Batch, task: Task, part_seconds: float) -> Iterator[Results]:
        """All of a batch at once: no time passes."""
        yield self(batch, task)

    def __call__(self, batch: Batch, task: Task) -> Results:
        self.dry.work(self.node.name, task)
        for unit in batch.share.units:
            self.filled(task.name, task.number, int(unit))
        reader = self.dry.readers[self.node.name]
        numbers = self.dry.readers[self.node.name].numbers(task)
        failed: dict[str, ColumnRows] = {}
        rows = batch.rows
        if self.sieve is not None:
            truth = self.dry.truth(task)
            keys = (truth.key(numbers, int(r), reader.rows) for r in batch.rows)
            times = np.array([truth.verdict(self.node.name, k) for k in keys], np.int32)
            failed = {self.sieve.column: Verdicts(batch.rows, ColumnData(times))}
            if not self.sieve.failures:
                return Results(failed, rows=len(batch.rows))
            rows = batch.rows[times > 0]
        states = {}
        units = [int(u) for u in batch.share.units]
        self.dry.see(task, "", ((name, value) for name, value in task.states.items() if name in self.node.states))
        for name in self.node.sets:
            if name not in batch.columns:
                states[name] = NextValues(units, [task.states[name] + 1] * len(units))
                self.dry.counted[name, task.number] |= {*units}
                continue
            prompts = numbers.above(batch.share.units, reader.unit, 0).tolist()  # of a repeated one the same
            old = dict(zip(numbers.above(rows, reader.rows, 0).tolist(), batch.columns[name].values, strict=True))
            states[name] = NextValues(units, [old[p] + 1 for p in prompts])
            self.dry.counted[name, task.number] |= {*prompts}
        columns = failed | self.dry.written(self.node, reader.rows, numbers, rows)
        return Results(columns, states, rows=len(batch.rows))


class Versions:
    """A resharding edge with staleness, as weight_publication.py has it: of each of the update's ranks the version of
    its copy, and how many it has sent; of each of the generation's how many it has asked for, and has. `taken`: by
    task, the version that it generates with; `told`: the versions in the order in which they are fetched."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.told = list[int]()
        self.taken: dict[str, int] = {}
        self.copied = set[int]()  # versions that a copy was made of
        self.asked: Counter[int] = Counter()
        self.copy: dict[int, int] = {}
        self.sent: Counter[int] = Counter()
        self.fetched: Counter[int] = Counter()

    def pass_on(self, sends: list[DryRank], fetches: list[DryRank]) -> None:
        for rank in (r.context.rank for r in sends):
            count = self.sent[rank]
            if min(self.fetched[r.context.rank] for r in fetches) > count and self.copy.get(rank) == self.told[count]:
                self.sent[rank] += 1


class Weightless(InstructionRunner):
    """Ranks that share an edge meet at it, unless one may be ahead; there are no weights to go over it."""

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        rank: Any = self.rank
        context = rank.context
        plan = rank.dry.plan
        ends = [plan.placement(n).pool for n in (src, dst)]
        name = next(r.name for r in plan.reshards if (r.src, r.dst) == (src, dst))
        if (src, dst) not in fetched_edges(plan):
            if (src, dst) in rank.dry.versions:
                found = rank.dry.versions[src, dst]
                said = self.task.fetches.get(name)
                version = said.version if said else self.task.number
                if context.local < plan.placement(src).layout.devices:
                    due = UpdateAttributes.of(plan.graph.node(src)).due
                    updated = [*dict.fromkeys(rank.training.updated[src])]  # each step of an update counts once here
                    assert updated == [*filter(due, range(version))], "another version than it has"
                assert self.task.number - found.allowed <= version <= self.task.number
                found.taken[self.task.key] = version
            context.meet((src, dst), context.here(*ends))
            rank.dry.work(f"reshard {dst}", self.task)
            return
        versions = rank.dry.versions[src, dst]
        number = self.task.number
        many = rank.engines.sparse.get((src, dst), 1)
        sends, fetches = (context.here(pool) for pool in ends)
        fetch = self.task.fetches.get(name)

        def sent(count: int, by: list[DryRank]) -> bool:
            versions.pass_on(sends, fetches)
            return all(versions.sent[r.context.rank] >= count for r in by)

        if rank in fetches:
            assert number - versions.allowed <= fetch.version <= number, (self.task.key, fetch.version)
            versions.taken[self.task.key] = fetch.version
            count = fetch.fetch_count
            if count == versions.asked[context.rank]:  # it has that version: it stays from one task to the next
                assert many > 1 and versions.told[count - 1] == fetch.version
                return
            versions.asked[context.rank] += 1
            assert versions.asked[context.rank] == count
            if len(versions.told) < count:
                versions.told.append(fetch.version)
            assert versions.told[count - 1] == fetch.version
            assert many == 1 or fetch.version not in versions.told[: count - 1], "fetched twice"
            rank.dry.world.block(lambda: all(versions.copy.get(r.context.rank) == fetch.version for r in sends))
            rank.dry.work(f"fetch {dst}", self.task)
            versions.fetched[context.rank] = count
            rank.dry.world.block(lambda: sent(count, sends))
        elif name in self.task.sends and versions.copy.get(context.rank) != number:
            versions.copied.add(number)
            told = fetch.fetch_count if fetch else 0
            rank.dry.world.block(lambda: sent(told, [rank]))
            rank.dry.work(f"copy {src}", self.task)
            versions.copy[context.rank] = number

    def release(self, pool: str, node: str) -> None:
        pass

    swap_in = wait = release


class Growing:
    """Stands in for a generator: after each stretch some responses have ended."""

    def generate(self, request: GenerateRequest) -> Iterator[Response]:
        assert not isinstance(request.begun, int)
        lengths = dict(enumerate(request.begun.tolist()))
        longest = int(request.sampling.max_tokens)
        while lengths:
            for i, length in [*lengths.items()]:
                count = min(request.stretch, longest - length)
                bits = zlib.crc32(repr((int(request.keys[i]), length)).encode())
                ended = bits % 3 == 0 or length + count == longest
                yield Response(i, np.full(count, 2, np.int32), np.zeros(count, np.float32), ended)
                lengths[i] += count
                if ended:
                    del lengths[i]


class DryContext(RankContext):
    """What one rank of a group finds, the others have by meeting it."""

    def __init__(self, dry: Dry, rank: int) -> None:
        super().__init__(dry.plan, rank)
        self.dry = dry
        self.times: Counter[Any] = Counter()

    def meet(self, what: Any, members: list[DryRank]) -> None:
        self.dry.world.meet(what, len(members), self.times)

    def here(self, *pools: str) -> list[DryRank]:
        return [r for r in self.dry.ranks if r.context.pool is not None and r.context.pool.name in pools]

    def meet_pool(self, what: Any) -> None:
        self.meet(what, self.here(self.pool.name))  # type: ignore[union-attr]

    def share_result(self, node: Node, find: Callable[..., Any], *arguments: Any) -> Any:
        layout = self.plan.placement(node.name).layout
        group = layout.coordinates(self.local).dp
        pool = self.here(self.pool.name)  # type: ignore[union-attr]
        members = [r for r in pool if layout.coordinates(r.context.local).dp == group]
        what = ("shared", node.name, group)
        if self.is_group_leader(node):
            self.dry.shared[what, self.times[what] + 1] = find(*arguments)
        self.meet(what, members)
        return self.dry.shared[what, self.times[what]]

    def sum_over_groups(self, node: Node, numbers: Array) -> Array:
        what = ("summed", node.name)
        key = (what, self.times[what] + 1)
        if self.is_group_leader(node):
            self.dry.shared[key] = self.dry.shared.get(key, 0) + numbers
        self.meet_pool(what)
        found: Array = self.dry.shared[key]
        return found


class DryShares(ShareRequests):
    """Ranks that compute in step meet for each batch."""

    def __init__(self, context: DryContext, client: Handed) -> None:
        dry = self.dry = context.dry
        self.lockstep = {c.node for c in dry.plan.docks.controllers if c.lockstep}
        super().__init__(context, client, Strand(dry.world, f"rank {context.rank} asks"))  # type: ignore[arg-type]

    def batches(self, node: Node, task: Task, report: Report) -> Iterator[Batch]:
        context: Any = self.context
        for batch in super().batches(node, task, report):
            if node.name in self.lockstep:
                context.meet_pool(("batch", node.name))
            yield batch


class DryGenerator(GeneratorRole):
    """Writes numbers of rows in place of responses."""

    def __init__(self, context: DryContext, engines: Engines) -> None:
        super().__init__(context, engines)
        self.dry = context.dry

    def compute(self, work: NodeBatch) -> Iterator[dict[str, ColumnRows]]:
        node = work.node
        task = work.task
        batch = work.batch
        self.dry.work(node.name, task)
        reader = self.dry.readers[node.name]
        numbers = reader.numbers(task)
        made = self.dry.rows.columns[node.writes[0]]
        names = dict.fromkeys((*node.writes, *sampled_columns(self.dry.plan.graph, node)))
        sampling = Sampling(numbers.fans[made], 4, 1.0, 1.0, 0, (1,))
        context = [np.zeros(1, np.int32)] * len(batch.rows)
        rollout = Rollout(node, task, batch, work.report, context, sampling, self.random_stream(node, task))
        if node.cuts and task.trains:
            yield self._run_partial_rollout(rollout)
            self.dry.begun[task.number] = task
            return
        rows = rollout.rows
        assert len(rollout.keys) == len(rows)
        failed: dict[str, ColumnRows] = {}
        if len(rows) and node.fails:
            sieve = self.dry.rows.sieves[node.name]
            truth = self.dry.truth(task)
            times = np.array([truth.verdict(node.name, truth.key(numbers, int(r), made)) for r in rows], np.int32)
            failed[sieve.column] = Verdicts(rows, ColumnData(times))
            rows = rows[times > 0]
        chance = self.dry.world.random
        order = chance.sample(range(len(rows)), len(rows))
        count = chance.randint(1, 3)
        for i, part in enumerate(np.array_split(rows[order], count)) if len(batch.rows) else ():  # as they end
            some = np.sort(part)
            columns = {c: ColumnRows(some, cells(self.dry.plan.graph, c, some)) for c in names}
            yield (failed if i == 0 else {}) | columns

    def _columns(self, rollout: Rollout, rows: Array, *_: Any, **__: Any) -> dict[str, ColumnRows]:
        """What a partial rollout has taken."""
        node = rollout.node
        if self.context.is_group_leader(node):
            self.dry.taken[rollout.task.number] += np.unique(rows // rollout.sampling.samples).tolist()
        names = dict.fromkeys((*node.writes, *sampled_columns(self.dry.plan.graph, node)))
        return {c: ColumnRows(rows, cells(self.dry.plan.graph, c, rows)) for c in names}


class DryTrainer(TrainerRole):
    """Writes numbers of rows, and learns nothing. `updated`: by node, in which iterations."""

    def __init__(self, context: DryContext, engines: Engines) -> None:
        super().__init__(context, engines)
        self.dry = context.dry
        self.updated: dict[str, list[int]] = defaultdict(list)

    def infer(self, work: NodeBatch) -> dict[str, ColumnRows]:
        node = work.node
        task = work.task
        rows = work.batch.rows
        self.dry.work(node.name, task)
        reader = self.dry.readers[node.name]
        return self.dry.written(node, reader.rows, reader.numbers(task), rows) if len(rows) else {}

    def update(self, work: NodeBatch) -> None:
        node = work.node
        task = work.task
        for first in work.batch.rows[:1]:
            self._rng(node, task, work.batch.share.epoch, int(first))
        self.updated[node.name].append(task.number)
        self.dry.see(task, "", ((name, task.states[name]) for name in node.states if name in task.states))
        self.dry.work(node.name, task)


class DryRank(Rank):
    """A rank, and what its Ray actor would pass on to its parts."""

    runner = Weightless

    def __init__(self, dry: Dry, rank: int) -> None:
        plan = dry.plan
        context = DryContext(dry, rank)
        super().__init__(context)
        self.dry = dry
        self.client = Handed(dry, f"rank {rank}", list(dry.readers.values()), dry.way, plan.cluster.host(rank))
        self.shares = DryShares(context, self.client)
        self.generation = DryGenerator(context, self.engines)
        self.training: DryTrainer = DryTrainer(context, self.engines)
        self.roles = {"generate": self.generation, "infer": self.training, "update": self.training}
        self.engines.generators = {n.name: Growing() for n in plan.graph.verb("generate")}  # type: ignore[dict-item,misc]

    def save(self, worker: str, folder: str) -> None:
        pass

    def resume(self, folder: str, manifest: checkpoint.Manifest) -> None:
        for node in self.dry.plan.graph.verb("update"):
            self.training.updated[node.name] = [*filter(UpdateAttributes.of(node).due, range(manifest.iteration))]


class Saved(NamedTuple):
    """A checkpoint, which holds the run state alone: its manifest, and its files by name."""

    manifest: checkpoint.Manifest
    files: dict[str, bytes]


class Store:
    """Keeps checkpoints. `saved`: by iteration."""

    def __init__(self) -> None:
        self.saved: dict[int, Saved] = {}

    def save(self, _: Path, iteration: int, recorder: Any, decides: Any, state: RunState, wait: Any) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            files = tuple(state.save(Path(folder), {}))
            content = {file.name: (Path(folder) / file.name).read_bytes() for file in files}
        manifest = checkpoint.Manifest(1, iteration, 0, {}, {}, files, state.position)
        self.saved[iteration] = Saved(manifest, content)

    def collect(self, folder: Path) -> None:
        pass


class Mute:
    """Stands in for who only tells: the display, the metrics."""

    live = True
    lines = ()
    bests = ()

    def __getattr__(self, name: str) -> Callable[..., dict[str, float]]:
        return lambda *_: {}


class Data:
    """Stands in for a data file of so many rows."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self.plan = plan
        self.rows = rows
        self.excluded = 0

    def __len__(self) -> int:
        return self.rows

    def indices(self, position: int, count: int) -> Array:
        return np.arange(position, position + count) % self.rows

    def draw(self, weights: Array, iteration: int, first: int, count: int) -> Array:
        return self.indices(first, count)

    def take(self, chosen: Array) -> dict[str, ColumnData]:
        return {c: ColumnData(chosen) for c in self.plan.graph.node("source").writes}


class Dry:
    """One run of a plan; `handed` are the shares that each node got, by task."""

    def __init__(self, plan: Plan, seed: int, kindness: float) -> None:
        self.plan = plan
        self.seed = seed
        self.kindness = kindness
        self.world = World(random.Random(seed))
        self.rows = rowsets(plan.graph)
        self.readers = {r.node: r for r in list_node_reads(plan)}
        self.handed: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
        self.shared: dict[Any, Any] = {}
        self.stored: Counter[str] = Counter()  # by task, bytes of rows that were written
        self.largest = 0  # of these rows
        self.away = 0  # how often rows found their place on another host
        self.versions = {edge: Versions(n) for edge, n in staleness_bounds(plan).items()}
        self.takes: dict[tuple[str, str], float] = {}  # by what is done and task, seconds
        self.times: dict[tuple[str, str], tuple[float, float]] = {}  # and from when to when it was done
        self.sizes: dict[str, int] = {}  # by task, how many prompts came at once
        self.taken: dict[int, list[int]] = defaultdict(list)  # by iteration, the prompts that a partial rollout took
        # By state and iteration: what its readers saw, by prompt or for the run; and the units of who counts it up.
        self.seen: dict[tuple[str, int], dict[int, set[float]]] = defaultdict(lambda: defaultdict(set))
        self.counted: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.chosen: dict[int, dict[int, list[int]]] = defaultdict(dict)  # by iteration and round, rows of the data
        self.begun: dict[int, Task] = {}  # by iteration, as a partial rollout was asked to do it
        self.warehouses: list[Warehouse] = []
        self.ranks: list[DryRank] = []
        self.members, self.way = list_members(plan, list(self.readers.values()), b"")
        self.store = Store()
        self.drawn: dict[int, Any] = {}  # by key of random numbers, the stream and the place in it
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")

    @property
    def oldest(self) -> int:
        """How many versions a generation was behind at most."""
        taken = (item for found in self.versions.values() for item in found.taken.items())
        return max((int(key.rpartition("/")[2]) - version for key, version in taken), default=0)

    @property
    def keyed(self) -> Callable[..., Any]:
        """Makes keys, each of which is of one stream and place alone."""
        made = noise.RandomStream.keys
        drawn = self.drawn

        def keys(stream: noise.RandomStream, *parts: Any) -> Any:
            found = made(stream, *parts)
            places = zip(*(p.ravel().tolist() for p in np.broadcast_arrays(*parts)), strict=True)
            for key, place in zip(found.ravel().tolist(), places, strict=True):
                assert drawn.setdefault(key, (stream.name, place)) == (stream.name, place), "two draw the same"
            return found

        return keys

    def work(self, what: str, task: Task) -> None:
        begin = self.world.now
        if seconds := self.takes.get((what, task.key), 0.0):
            self.world.take(seconds)
        self.times[what, task.key] = begin, self.world.now

    def see(self, task: Task, column: str, values: Iterable[tuple[Any, float]]) -> None:
        """A reader sees values of the states of the run, by name, or of a `column`, by prompt."""
        for key, value in values if task.trains else ():
            self.seen[column or key, task.number][key if column else 0].add(value)

    def truth(self, task: Task) -> Truth:
        return Truth(self.plan, (self.seed, task.number), self.kindness, self.taken.get(task.number, ()))

    def written(self, node: Node, of: int, numbers: Numbers, rows: Array) -> dict[str, ColumnRows]:
        """What a node writes beside generations, of rows of a set."""
        found = {}
        for column in node.writes:
            mine = np.unique(numbers.above(rows, of, self.rows.columns[column]))
            found[column] = ColumnRows(mine, cells(self.plan.graph, column, mine))
        return found

    def run(self, rows: int, resume: Saved | None = None) -> RunState:
        """All iterations and evaluations, over data of so many rows, or those after a checkpoint; what they leave.
        Stuck, or what goes wrong in a process."""
        world = self.world
        with (
            self.folder,
            patch.object(dock, "ray", world),
            patch.object(dock, "AsyncRpcConnection", lambda name, *_: Telling(world, name)),
            patch.object(client, "RpcConnections", lambda *_: Lines(world)),
            patch.object(client, "Room", Plain),
            patch.object(noise.RandomStream, "keys", self.keyed),
            patch.object(
                dock, "Room", SimpleNamespace(create=lambda name, _: Plain.create(Path(self.folder.name, name)))
            ),
        ):
            try:
                for name, content in (resume.files if resume else {}).items():
                    Path(self.folder.name, name).write_bytes(content)
                driver = self._driver(rows, self.folder.name if resume else "")
                data = dict.fromkeys(("source", *(e.data for e in self.plan.deploy.evaluations)), rows)
                self.world.run(lambda: driver._train(data, Path(), resume and resume.manifest), self._words)
                return driver.run_state
            finally:
                self.world.close()

    def _driver(self, rows: int, resume: str) -> Driver:
        plan = self.plan
        world = self.world
        docks = []
        for i, member in enumerate(self.members):
            some = [self.readers[node] for node, name in self.way.controllers.items() if name == member.name]
            made = CLASSES[dock.DockHost](self.members, i, some, plan.docks.deadline, self.way, member.name, 0)
            docks.append(world.actor(member.name, made))
            self.warehouses.append(made.warehouse)
        self.ranks += [DryRank(self, r) for r in range(plan.cluster.devices)]
        ranks = [world.actor(f"rank {r.context.rank}", r) for r in self.ranks]
        hosted = function_hosts.FunctionHosts(
            plan.cluster.nodes,
            0,
            lambda host, lane, _: self._functions(host, function_hosts.name(host, lane), rows),
            lambda asked: {r: None for r in asked if r.done},
            count_lanes(plan),
        )
        attempt = SimpleNamespace(
            plan=plan,
            resume=resume,
            url="",
            lines=int(bool(resume)),
            options=RunOptions(),
            ports=Ports(),
            out="",
            folder="",
            edited=(),
        )
        pool = SimpleNamespace(ranks=ranks, functions=hosted, docks=docks, checkpoints=self.store, nodes=[])
        driver = Driver(attempt, pool, Mute(), SimpleNamespace(asked=0, training=False))  # type: ignore[arg-type]
        driver.ray = world
        driver.recorder = Mute()  # type: ignore[assignment]
        return driver

    def _functions(self, host: int, called: str, rows: int) -> Any:
        """A real function host, over data of so many rows, but for what it loads."""
        instead = {
            "set_up_process": lambda *_: None,
            "CrashJournal": lambda *_: CrashJournal(),
            "Client": lambda *arguments: Handed(self, *arguments),
            "load_data": lambda plan, *_: {name: Data(self.plan, rows) for name in plan.deploy.data},
            "FunctionNode": lambda node, *_: Computed(self, node),
            "DrawWeights": lambda *_: lambda *_: np.ones(1),
        }
        with patch.multiple(functions, **instead):
            plan = zlib.compress(self.plan.to_json().encode())
            made = CLASSES[functions.FunctionHost](plan, host, called, "", "", self.way, False, {})
            made.start()
        made._run_source = lambda *arguments: self._source(made, *arguments)
        return self.world.actor(called, made)

    def _source(self, host: Any, task: Task, round: int, tables: Any, report: Report) -> None:
        """The real source, whose columns get the numbers of their rows."""
        put = host.client.put_rows

        def numbered(node: str, task: Task, pieces: dict[str, ColumnRows], asks: bool) -> None:
            states = {s.name for s in self.plan.graph.states}
            put(
                node,
                task,
                {
                    c: p if c in states else ColumnRows(p.rows, cells(self.plan.graph, c, p.rows))
                    for c, p in pieces.items()
                },
                asks,
            )

        with patch.object(host.client, "put_rows", numbered):
            CLASSES[functions.FunctionHost]._run_source(host, task, round, tables, report)
        if task.trains:
            self.chosen[task.number][round] = host._choose_rows(task, round, tables.draws).tolist()

    def _words(self) -> str:
        lines = []
        for made, _ in self.world.actors.values():
            if isinstance(made, CLASSES[dock.DockHost]):
                lines += [str(w) for w in self.world.loop.run_until_complete(made.status()).waits]
        lines += [f"{s.name} waits" for s in self.world.strands if s.calls or s.name == "driver"]
        return "\n".join(lines) or "nobody waits"


__all__ = ["Dry", "Stuck"]
