"""What the processes of a run send each other through the dock.

Invariant: plain data that nobody changes once it is sent, and that may be sent twice: what is heard a second time
changes nothing. Rows themselves travel as `Piece` and `Verdicts` (data/columns.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..process.task import Task


@dataclass(frozen=True)
class Member:
    """A process of the dock, as the others know it: its name, its host, the warehouse that it has (-1: none), and the
    columns that its controllers hear of."""

    name: str
    host: int
    warehouse: int
    hears: frozenset[str]


@dataclass(frozen=True)
class DockAddress:
    """What a process needs to find the dock of its run.

    - `controllers`: by node the name of the process that has its controller; `warehouses`: by the warehouse's index the
      name of the process that has it, and `hosts` its host.
    - `key`: what processes of the run on several hosts know each other by (channel.py); nothing on one host.
    - `token`: what ranks know each other's objects by (rank/object_collectives.py).
    - `capacity`: bytes of rows that a warehouse takes; 0: what its host's memory holds.
    """

    controllers: Mapping[str, str]
    warehouses: Sequence[str]
    hosts: Sequence[int]
    key: bytes
    token: bytes
    capacity: int = 0


class RowLocation(NamedTuple):
    """Where rows lie: a segment of a warehouse, by its name."""

    warehouse: int
    segment: str


@dataclass(frozen=True)
class RowsReady:
    """What a warehouse tells controllers when it gets rows of a column: their numbers, how long each row is, and where
    they lie. Of a filter's verdicts (`verdicts`) `lengths` are how often each row goes on."""

    column: str
    rows: Array
    lengths: Array
    place: RowLocation
    verdicts: bool = False

    @classmethod
    def of(cls, column: str, piece: ColumnRows, place: RowLocation) -> RowsReady:
        """The news that a piece makes."""
        return cls(column, piece.rows, piece.told, place, isinstance(piece, Verdicts))


@dataclass(frozen=True)
class WorkShare:
    """What a group gets of a round: its units, how many rows each has, and those rows, unit by unit."""

    units: Array
    sizes: Array
    rows: Array


@dataclass(frozen=True)
class Round:
    """What a controller decided: what each group gets next; `last` of the iteration, or of a round of its prompts."""

    epoch: int
    parts: tuple[WorkShare, ...]
    last: bool


@dataclass(frozen=True)
class WarehouseInventory:
    """What a warehouse has to say of an open task to a controller that begins anew: the news of all its rows, and by
    node the rounds that a controller has left with it."""

    task: Task
    news: Sequence[RowsReady]
    rounds: Mapping[str, Sequence[Round]]


@dataclass(frozen=True)
class Share:
    """What one data-parallel group gets of a round.

    - `units`: what it is to compute, as prompts or responses; `sizes`: how many rows each unit has; `rows`: those
      rows, unit by unit. Two prompts of four responses each are 2 units, sizes [4, 4], and 8 rows.
    - `where`: by column the place of each row that these rows need, as an index of `places`, the rows of the column
      ascending, each once.
    - `most`: the rows of the round's largest share, so that all groups make equally many micro-batches;
      `round_units`: the rows of the whole round; `elements`: by column, how many elements the whole round has.
    - `epoch`, of an update; `last`: nothing comes after it in this iteration, or in this round of prompts.
    """

    units: Array
    sizes: Array
    rows: Array
    where: dict[str, Array]
    places: tuple[RowLocation, ...]
    most: int
    round_units: int
    elements: dict[str, int]
    epoch: int
    last: bool


@dataclass(frozen=True)
class Batch:
    """The rows of a share: their numbers, and each column with one entry a row."""

    share: Share
    rows: Array
    columns: dict[str, ColumnData]


@dataclass(frozen=True)
class CurrentActivity:
    """What a process began to do, how many seconds ago, and how far it is with its rows, in words (empty: it does not
    count them)."""

    what: str
    seconds: float
    rows: str = ""

    def __str__(self) -> str:
        return f"{self.what}{', ' * bool(self.rows)}{self.rows}"


class ProcessStatus(NamedTuple):
    """What a process says of itself: what it does, since when (time.monotonic), its id on its host (0: not told), and
    how many rows it is done with of nodes that write none, by node, in the task of this key.

    `rows` are those that it has computed `of` its share (0: it does not count), `moved` is when it had the last one
    (time.monotonic; 0: it had none yet), `where` says more of where it is."""

    what: str
    since: float
    pid: int = 0
    key: str = ""
    done: Mapping[str, int] = {}
    rows: int = 0
    of: int = 0
    moved: float = 0.0
    where: str = ""

    def progress(self, now: float) -> str:
        """How far it is with its rows, in words; empty if it does not count them."""
        if not self.of:
            return self.where
        last = f", the last {now - self.moved:.0f} s ago" if self.rows and self.moved else ""
        return f"{self.rows} of {self.of} rows are done{last}{', ' * bool(self.where)}{self.where}"


@dataclass(frozen=True)
class Wait:
    """A process that waits for a controller's answer: `who` names the node, and its group where one asks for rows;
    `missing` the rows that are not there yet, in words that name the edges."""

    who: str
    key: str
    seconds: float
    missing: str

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds:.0f} s in {self.key} for {self.missing}"


@dataclass(frozen=True)
class DockSnapshot:
    """What the dock of a host tells those who watch a run.

    - `rows`: by task and node, of the controllers here, how many rows were handed out and how many there are as far as
      that is known, each once an epoch.
    - `done`: by task and node how many rows were written here, or of a node that writes none are behind its processes.
    - `held`: bytes of rows in the warehouse, None where there is none.
    - `memory`: by process of this host its resident bytes, what it shares included; `used` and `total`: of the host.
    - `pid`: of this process, by which one that took another's place is known.
    """

    host: int
    rows: dict[str, dict[str, tuple[int, int]]]
    done: dict[str, dict[str, int]]
    held: int | None
    memory: dict[str, int]
    used: int
    total: int
    pid: int


@dataclass(frozen=True)
class Status:
    """What the dock of a host knows of the run. `last` is the node that took rows last, `moves` grows while rows move;
    `doing` is what each process said last. `ended` are the processes of the host that did not move and were killed, by
    id with the name and why; `bytes` what the host's processes have read and written."""

    last: str
    moves: int
    waits: tuple[Wait, ...]
    doing: dict[str, CurrentActivity]
    seen: DockSnapshot | None = None  # where somebody watches
    ended: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    bytes: int = 0
