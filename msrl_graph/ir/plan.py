"""The plan: everything that a run needs, and everything computed about it.

Invariant: a plan is plain data. `from_json` restores the plan that `to_json` wrote, except that `to_json` makes paths
of existing files absolute. Compiling a program twice gives the same bytes. Passes fill the plan from top to bottom:
placements, docks, traffic, reshards, schedule, memory, estimate and environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..diagnostics import NOWHERE, Span
from ..files.plugins import PlugIn
from ..hardware.cluster import ClusterSpec, Figure
from ..hardware.environment_variables import Setting
from ..model.architecture import Model
from ..model.freezing import freeze
from ..model.lora import StatedLora, adapt
from ..sharding.device_range import DeviceRange, iterate_runs
from ..sharding.layout import Layout
from .attributes import ReshardingEdgeAttributes
from .data_options import DataOptions
from .evaluation import Evaluation
from .graph import Edge, Expr, Graph, OptionValue
from .instruction import InstructionStream
from .options import DockOptions, ReshardOptions, Run
from .resharding_plan import Reshard
from .search_record import SearchRecord
from .views import PlanViews

T = TypeVar("T")

FORMAT_VERSION = 1
# The names of the pool with all devices, and of the pool of the hosts' processes that call functions.
DEVICES = "devices"
FUNCTIONS = "functions"


def shared_staleness(graph: Graph, pool_of: Callable[[str], str]) -> list[Edge]:
    """Return the resharding edges with `staleness` whose two nodes are in one pool."""
    return [
        edge
        for edge in graph.reshards()
        if ReshardingEdgeAttributes.of(edge).staleness and pool_of(edge.src) == pool_of(edge.dst)
    ]


def is_reported(graph: Graph, column: str) -> bool:
    """Return whether a run reports the mean of a column.

    A run reports columns with one floating-point number per row, except the columns of the source.
    """
    kind = graph.column(column)
    return graph.writer(column).verb != "source" and kind.element in ("f32", "bf16") and not kind.dims


@dataclass(frozen=True)
class DataSource:
    """Data: files, or a mixture of other data.

    - `path`: a file, a folder, a glob, a URL or a name on the Hugging Face Hub; "" for a mixture.
    - `fields`: for each column, the field or the template from which the column is read; {} for a mixture.
    - `stated`: the span of each field that the program names.
    - `options`: which rows are read, and how.
    - `parts`: for a mixture, the weight of each part, by the name of its data.
    - `files`: the files in which a name on the Hub is stored on this host; () for all other data.
    """

    name: str
    path: str
    fields: dict[str, str]
    span: Span = NOWHERE
    stated: dict[str, Span] = field(default_factory=dict)
    options: DataOptions = field(default_factory=DataOptions)
    parts: dict[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()


# The options of an engine that limit a micro-batch. Only one of them is stated.
MICRO_BATCH = ("micro_batch", "micro_batch_tokens")


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its options; `chosen` says where the choice comes from."""

    name: str
    options: dict[str, OptionValue] = field(default_factory=dict)
    chosen: str = "the file"
    span: Span = NOWHERE

    def read_count(self, name: str) -> int:
        """Return the value of an option that is a whole number; 0 if it has none."""
        value = self.options.get(name)
        return value if isinstance(value, int) else 0

    def shared(self) -> dict[str, OptionValue]:
        """Return the options in which nodes that share weights must agree.

        These are all options except those in MICRO_BATCH.
        """
        return {key: value for key, value in self.options.items() if key not in MICRO_BATCH}


@dataclass(frozen=True)
class Pool(DeviceRange):
    """Nodes that share a range of devices.

    In a deploy, `devices` is 0 if the planner chooses the range.
    """

    nodes: tuple[str, ...]
    first: int = 0
    devices: int = 0
    name: str = ""
    reason: str = ""
    span: Span = NOWHERE
    each: int = 0


@dataclass(frozen=True)
class Deployment:
    """The deploy of a program: where and how the program runs, as the file states."""

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
    together: tuple[tuple[str, ...], ...] = ()  # nodes that stay in one pool, whichever it is

    @property
    def saves(self) -> tuple[int, ...]:
        """The intervals, in iterations, after which a checkpoint can be written."""
        return (
            *filter(None, (self.run.save,)),
            *(evaluation.every for evaluation in self.evaluations if evaluation.best),
        )

    def evaluation(self, task: str) -> Evaluation | None:
        """Return the evaluation with the task name `task`; None for training."""
        return next((evaluation for evaluation in self.evaluations if evaluation.task == task), None)


@dataclass(frozen=True)
class Placement(DeviceRange):
    """The devices of a node, or the hosts on whose CPUs the node runs.

    A node with weights has the first `layout.devices` devices of its pool. Nodes that run on the hosts' CPUs are in the
    pool `functions`.

    Of a generation, `sequences` is the most responses that a data-parallel group generates at one time (0: one), and
    `cache_bytes` is the size of the KV cache on a device (0: all these responses fit at their greatest length).
    """

    node: str
    pool: str
    layout: Layout
    first: int
    engine: EngineChoice
    reason: str
    weight_bytes: int = 0  # the node's weights at rest, on the busiest device
    each: int = 0
    sequences: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True)
class ControllerSpec:
    """The controller of a node, which tracks only the columns that the node reads."""

    node: str
    host: int
    columns: tuple[str, ...]
    groups: int  # data-parallel groups that request rows
    chunk: int  # units of a batch; 0: not limited
    chunk_tokens: int  # tokens of a batch, if they are reached with fewer units; 0: not limited
    lockstep: bool  # a collective spans the groups: all get the same number of micro-batches

    @property
    def streams(self) -> bool:
        """Whether the node takes batches of ready rows, without waiting for all rows."""
        return self.chunk > 0 or self.chunk_tokens > 0


@dataclass(frozen=True)
class DockPlan:
    mode: str
    controllers: tuple[ControllerSpec, ...]
    warehouses: tuple[int, ...]  # the host of each; one per host
    deadline: float
    capacity: int = 0
    imbalance: float = 1.0


@dataclass(frozen=True)
class Traffic:
    """The traffic of a sample edge in an iteration, for columns of maximum length."""

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
    """The peak memory of a phase, such as generate, on one device or one host."""

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

    - `mean`: the average age of the weights that generate, in versions.
    - `bound`: the largest age of a row, in versions (`async_schedule.row_age_bound`).
    - `in_step_seconds`: the seconds that an iteration would take if the same pools were in step with the updates.
    """

    mean: Figure
    bound: int
    in_step_seconds: Figure


@dataclass(frozen=True)
class Estimate:
    """The estimated time of an iteration.

    `staleness` is None if all pools are in step with the updates.
    """

    phases: tuple[Phase, ...]
    iteration_seconds: Figure
    tokens_per_second_per_device: Figure  # eq. 5
    staleness: StalenessEstimate | None = None


@dataclass(frozen=True)
class ProcessEnvironment:
    """The environment of the processes of a pool.

    `settings` are environment variables, which are set unless the user has set them. `python` is the Python
    interpreter; "" means the interpreter of the run.
    """

    pool: str
    settings: tuple[Setting, ...]
    python: str = ""


@dataclass(frozen=True)
class PlanNote:
    """A remark, or a choice that the compiler made; with its reason."""

    about: str
    text: str


@dataclass(frozen=True, repr=False)
class Plan(PlanViews):
    graph: Graph
    cluster: ClusterSpec
    deploy: Deployment
    format_version: int = FORMAT_VERSION
    pools: tuple[Pool, ...] = ()  # of devices; no device is in two pools
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
    plugins: tuple[PlugIn, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, kind: type[T]) -> T | None:
        """Return the results of a pass that has no fields of its own.

        None if the pass has not run.
        """
        import msgspec

        return msgspec.convert(self.parts[name], kind) if name in self.parts else None

    def with_part(self, name: str, results: object) -> Plan:
        """Return the plan with the results of a pass that has no fields of its own.

        `results` is a dataclass or a Struct, which is stored as plain data.
        """
        import msgspec

        return replace(self, parts={**self.parts, name: msgspec.to_builtins(results)})

    @cached_property
    def _by_node(self) -> tuple[dict[str, Placement], dict[str, ControllerSpec]]:
        return {placement.node: placement for placement in self.placements}, {
            controller.node: controller for controller in self.docks.controllers
        }

    def placement(self, node: str) -> Placement:
        return self._by_node[0][node]

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    def pool_of(self, device: int) -> Pool | None:
        """Return the pool of a device; None if no pool has the device."""
        per_host = self.cluster.devices_per_node
        return next((pool for pool in self.pools if 0 <= pool.rank(device, per_host) < pool.devices), None)

    def on_hosts(self, pool: str) -> list[int]:
        """Return how many devices of a pool each host has."""
        placed = self.pool(pool)
        per_host = self.cluster.devices_per_node
        counts = [0] * self.cluster.nodes
        for first, stop in iterate_runs(placed.first, placed.devices, placed.each, per_host):
            for host in range(first // per_host, min(self.cluster.nodes, -(-stop // per_host))):
                counts[host] += min(stop, (host + 1) * per_host) - max(first, host * per_host)
        return counts

    def group_hosts(self, node: str) -> list[int]:
        """Return the host of the first rank of each data-parallel group of a node.

        A function has one group per host.
        """
        placement = self.placement(node)
        per_host = self.cluster.devices_per_node
        if placement.pool == FUNCTIONS:
            return [*range(self.cluster.nodes)]
        layout = placement.layout
        return [placement.device(layout.rank(tp=0, dp=group), per_host) // per_host for group in range(layout.dp)]

    def environment_of(self, place: int | str) -> ProcessEnvironment:
        """Return the process environment of a pool (by name) or of a device (by number)."""
        pool = self.pool_of(place) if isinstance(place, int) else self.pool(place)
        name = pool.name if pool is not None else ""
        own = (environment for environment in self.surroundings if environment.pool == name)
        return next(own, ProcessEnvironment(name, ()))

    def controller(self, node: str) -> ControllerSpec:
        return self._by_node[1][node]

    def model(self, node: str) -> Model:
        """Return the model of a node's worker.

        A worker that follows another one has the adapter of that worker.
        """
        worker = self.graph.worker(self.graph.node(node).worker)
        model = self.deploy.models[worker.model]
        model = model.scoring if worker.kind in ("value", "reward_model") else model
        stated = self.graph.worker(worker.follows or worker.name).adapter
        if stated is None and model.initial is None:
            return freeze(model, worker.freeze)
        lora = (stated or StatedLora()).resolve(model.initial, self.deploy.run.seed)
        return adapt(model, lora, self.graph.node(node).verb == "generate")


def from_json(text: str | bytes) -> Plan:
    """Decode a plan from JSON, without verifying it (verify.py does this).

    Raises msgspec.ValidationError or DecodeError.
    """
    import msgspec

    return msgspec.json.decode(text, type=Plan)


__all__ = ["Expr", "Plan", "from_json"]
