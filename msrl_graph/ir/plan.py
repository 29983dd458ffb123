"""The plan: everything that running needs, and everything that was worked out about it.

Invariant: a plan is plain data; `to_json` and `from_json` are inverse (files are where they were, whatever their paths
begin at), and compiling twice gives the same bytes. Passes fill it from top to bottom: placements, docks, reshards,
schedule, then traffic, memory and estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ..diagnostics import NOWHERE, Span
from ..hardware.cluster import ClusterSpec, Figure
from ..hardware.environment_variables import Setting
from ..model.architecture import Model
from ..sharding.device_range import DeviceRange, runs
from ..sharding.layout import Layout, Tensor
from .attributes import ReshardingEdgeAttributes
from .evaluation import Evaluation
from .graph import Edge, Expr, Graph, Value
from .instruction import InstructionStream
from .options import DockOptions, ReshardOptions, Run
from .search_record import SearchRecord
from .views import PlanViews

FORMAT_VERSION = 1
# The names of the pool that has all devices, and of the hosts' processes that call functions.
DEVICES = "devices"
FUNCTIONS = "functions"
# What every run reports by itself: the keys of a line of metrics.jsonl. A column that a run reports too has another
# name.
METRICS = frozenset(
    {
        *(
            "iteration",
            "seconds",
            "rows",
            "loss",
            "grad_norm",
            "updates",
            "response_length",
            "prompt_tokens",
            "response_tokens",
        ),
        *(
            "tokens_per_second",
            "throughput_eq5",
            "prompts",
            "phases",
            "dock_bytes",
            "dock_messages",
            "imbalance",
            "reshard_bytes",
            "evaluation",
            "after_iterations",
            "changed",
        ),
        *("refills", "prompts_drawn", "prompts_kept", "turns", "policy_tokens", "environment_tokens", "failed"),
        *("left_out_answers", "left_out_tokens", "strayed", "conversations"),
        *(
            "response_length_max",
            "distinct_prompt_tokens",
            "distinct_tokens",
            "distinct_rows",
            "skipped",
            "carried_over",
            "overdue",
            "logp_drift",
            "logp_drift_max",
        ),
        *("lr", "entropy", "response_truncated", "staleness", "staleness_max"),
    }
)


def shared_staleness(graph: Graph, pool_of: Callable[[str], str]) -> list[Edge]:
    """Edges with `staleness` whose ends take turns on the devices of one pool."""
    return [
        e for e in graph.reshards() if ReshardingEdgeAttributes.of(e).staleness and pool_of(e.src) == pool_of(e.dst)
    ]


def reported(graph: Graph, column: str) -> bool:
    """Whether a run tells the mean of a column: a scalar that is no field of the data."""
    kind = graph.column(column)
    return graph.writer(column).verb != "source" and kind.element in ("f32", "bf16") and not kind.dims


@dataclass(frozen=True)
class DataSource:
    """A data file and which of its fields fills which column; `stated` is where the program names the field of a
    column."""

    name: str
    path: str
    fields: dict[str, str]
    span: Span = NOWHERE
    stated: dict[str, Span] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its options; `chosen` says who chose it."""

    name: str
    options: dict[str, Value] = field(default_factory=dict)
    chosen: str = "the file"
    span: Span = NOWHERE

    def shared(self) -> dict[str, Value]:
        """The options that nodes of the same weights have in common: all but the micro-batch."""
        return {k: v for k, v in self.options.items() if k != "micro_batch"}


@dataclass(frozen=True)
class Pool(DeviceRange):
    """Nodes that have a stretch of devices to themselves. In a deploy `devices` 0 leaves the stretch to the planner."""

    nodes: tuple[str, ...]
    first: int = 0
    devices: int = 0
    name: str = ""
    reason: str = ""
    span: Span = NOWHERE
    each: int = 0


@dataclass(frozen=True)
class Deployment:
    """The where and how of a program, as the file states it."""

    name: str
    models: dict[str, Model]  # by the name that workers use
    data: dict[str, DataSource]
    layouts: dict[str, Layout]  # by node
    engines: dict[str, EngineChoice]  # by node
    dock: DockOptions = field(default_factory=DockOptions)
    reshard: ReshardOptions = field(default_factory=ReshardOptions)
    evaluations: tuple[Evaluation, ...] = ()
    run: Run = field(default_factory=Run)
    span: Span = NOWHERE
    pools: tuple[Pool, ...] = ()  # as `place` and `apart` state them
    together: tuple[tuple[str, ...], ...] = ()  # nodes that stay together, wherever that is

    @property
    def saves(self) -> tuple[int, ...]:
        """The intervals, in iterations, at which a checkpoint is written, or may be."""
        return (*filter(None, (self.run.save,)), *(e.every for e in self.evaluations if e.best))

    def evaluation(self, task: str) -> Evaluation | None:
        """The evaluation whose tasks are called so; None for training."""
        return next((e for e in self.evaluations if e.task == task), None)


@dataclass(frozen=True)
class Placement(DeviceRange):
    """A node on the devices of a pool (the first `layout.devices`), or on the hosts' CPUs (pool `functions`)."""

    node: str
    pool: str
    layout: Layout
    first: int
    engine: EngineChoice
    reason: str
    weight_bytes: int = 0  # the node's weights at rest, on the busiest device
    each: int = 0


@dataclass(frozen=True)
class ControllerSpec:
    """The controller of a node: hears only of the columns that the node reads."""

    node: str
    host: int
    columns: tuple[str, ...]
    groups: int  # data-parallel groups that ask it
    chunk: int  # units handed out at once; 0: it does not count them
    chunk_tokens: int  # those that hold so many tokens are handed out at once, if fewer; 0: it does not count them
    lockstep: bool  # a collective spans the groups: all get the same number of micro-batches

    @property
    def streams(self) -> bool:
        """Whether batches are cut from what is ready."""
        return self.chunk > 0 or self.chunk_tokens > 0


@dataclass(frozen=True)
class DockPlan:
    mode: str
    controllers: tuple[ControllerSpec, ...]
    warehouses: tuple[int, ...]  # the host of each, one a host
    deadline: float
    capacity: int = 0
    imbalance: float = 1.0


@dataclass(frozen=True)
class Step:
    """A step of a reshard: bytes and seconds a device."""

    name: str
    bytes: int
    seconds: Figure


@dataclass(frozen=True)
class ReshardRoute:
    """How weights of a kind (`of`: weights, embeddings or experts) come to the ranks that generate with them: `how`
    is in place, all-gather, all-to-all or send.

    `block` consecutive ranks take part together; with `block` 2, the ranks 0 and 1, 2 and 3, and so on. Where layers
    change their pipeline stage the move goes `across` stages: the same block of every stage takes part, so that
    `ranks` do in all. `bytes` is what the busiest device receives.
    """

    of: str
    how: str
    block: int
    across: bool
    ranks: int
    bytes: int


@dataclass(frozen=True)
class Reshard:
    """An allgather-swap, or between two pools a send (mode `send`): from a copy that the update makes as it begins,
    `copied`, where the other pool may be ahead of it. Bytes are a device's, at its busiest."""

    src: str
    dst: str
    mode: str
    order: str
    reason: str
    ways: tuple[ReshardRoute, ...]
    bucket_bytes: int
    buckets: tuple[tuple[str, ...], ...]  # tensor names
    steps: tuple[Step, ...]
    swap_in: Step
    update_bytes_per_device: int
    generate_bytes_per_device: int
    released_bytes_per_device: int
    peak_bytes_per_device: int
    redundant_bytes: int  # what naive resharding would leave on all devices (eq. 3)
    copied: Step | None = None

    @property
    def name(self) -> str:
        """As the program writes the edge; ranks count its bytes under this name."""
        return f"{self.src} => {self.dst}"

    @property
    def received_bytes_per_device(self) -> int:
        """Each time that weights come."""
        return next((s.bytes for s in self.steps if s.name.endswith("by bucket")), 0)

    def way(self, tensor: Tensor) -> ReshardRoute:
        """How a tensor comes: embeddings go as all other weights do, where they have no way of their own."""
        kind = "experts" if tensor.experts else "embeddings" if tensor.padded else "weights"
        ways = {way.of: way for way in self.ways}
        return ways[kind if kind in ways else "weights"]


@dataclass(frozen=True)
class Traffic:
    """What a sample edge moves in an iteration, at the columns' bounds."""

    src: str
    dst: str
    columns: tuple[str, ...]
    rows: int
    bytes: int
    seconds: Figure
    central_seconds: Figure
    how: str


@dataclass(frozen=True)
class PhaseMemory:
    """What a phase holds on one device, or one host, at its peak."""

    place: str  # device or host
    pool: str
    phase: str
    items: dict[str, int]
    capacity: Figure
    remark: str = ""

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class Phase:
    name: str
    pool: str
    seconds: Figure


@dataclass(frozen=True)
class StalenessEstimate:
    """The effect of `staleness` on an iteration, in the long run.

    - `mean`: the age of the weights that generate, on average, in versions.
    - `bound`: the most versions that a row can be old (`ir.ahead.row_age_bound`).
    - `in_step_seconds`: an iteration's seconds with the same pools in step.
    """

    mean: Figure
    bound: int
    in_step_seconds: Figure


@dataclass(frozen=True)
class Estimate:
    """`staleness`: None if all pools are in step."""

    phases: tuple[Phase, ...]
    iteration_seconds: Figure
    tokens_per_second_per_device: Figure  # eq. 5
    staleness: StalenessEstimate | None = None


@dataclass(frozen=True)
class ProcessEnvironment:
    """What the processes of a pool begin in: the environment variables that they are given, unless the user has set
    them, and the interpreter that runs them, "" for the run's own."""

    pool: str
    settings: tuple[Setting, ...]
    python: str = ""


@dataclass(frozen=True)
class PlanNote:
    """A choice or a remark, with its reason."""

    about: str
    text: str


@dataclass(frozen=True, repr=False)
class Plan(PlanViews):
    graph: Graph
    cluster: ClusterSpec
    deploy: Deployment
    format_version: int = FORMAT_VERSION
    pools: tuple[Pool, ...] = ()  # of devices, none of which is in two
    placements: tuple[Placement, ...] = ()
    docks: DockPlan = DockPlan("distributed", (), (), 600.0)
    reshards: tuple[Reshard, ...] = ()
    schedule: tuple[InstructionStream, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    memory: tuple[PhaseMemory, ...] = ()
    estimate: Estimate | None = None
    surroundings: tuple[ProcessEnvironment, ...] = ()
    notes: tuple[PlanNote, ...] = ()
    search: SearchRecord | None = None  # None: the file left nothing open

    @cached_property
    def _by_node(self) -> tuple[dict[str, Placement], dict[str, ControllerSpec]]:
        return {p.node: p for p in self.placements}, {c.node: c for c in self.docks.controllers}

    def placement(self, node: str) -> Placement:
        return self._by_node[0][node]

    def pool(self, name: str) -> Pool:
        return next(p for p in self.pools if p.name == name)

    def pool_of(self, device: int) -> Pool | None:
        """None: it is idle."""
        each = self.cluster.devices_per_node
        return next((p for p in self.pools if 0 <= p.rank(device, each) < p.devices), None)

    def on_hosts(self, pool: str) -> list[int]:
        """How many devices of a pool each host has."""
        found = self.pool(pool)
        each = self.cluster.devices_per_node
        held = [0] * self.cluster.nodes
        for first, stop in runs(found.first, found.devices, found.each, each):
            for host in range(first // each, min(self.cluster.nodes, -(-stop // each))):
                held[host] += min(stop, (host + 1) * each) - max(first, host * each)
        return held

    def group_hosts(self, node: str) -> list[int]:
        """The host of each data-parallel group of a node, where its first rank is; a function has one group a host."""
        placement = self.placement(node)
        each = self.cluster.devices_per_node
        if placement.pool == FUNCTIONS:
            return [*range(self.cluster.nodes)]
        layout = placement.layout
        return [placement.device(layout.rank(tp=0, dp=group), each) // each for group in range(layout.dp)]

    def around(self, at: int | str) -> ProcessEnvironment:
        """What the processes of a pool begin in, or the process of a device."""
        pool = self.pool_of(at) if isinstance(at, int) else self.pool(at)
        found = (s for s in self.surroundings if pool is not None and s.pool == pool.name)
        return next(found, ProcessEnvironment(pool.name if pool is not None else "", ()))

    def controller(self, node: str) -> ControllerSpec:
        return self._by_node[1][node]

    def model(self, node: str) -> Model:
        """The model of a node's worker."""
        worker = self.graph.worker(self.graph.node(node).worker)
        model = self.deploy.models[worker.model]
        return model.scoring if worker.kind in ("value", "reward_model") else model


def from_json(text: str | bytes) -> Plan:
    """The plan of a JSON text; msgspec.ValidationError or DecodeError where it is none. Whether it is right, verify.py
    says."""
    import msgspec

    return msgspec.json.decode(text, type=Plan)


__all__ = ["Expr", "Plan", "from_json"]
