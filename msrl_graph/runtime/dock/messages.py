"""Messages that the processes of a run send each other through the dock.

Invariant: messages are plain data that does not change once it is sent. They may be sent twice: repeated news changes
nothing. Rows themselves travel as `ColumnRows` and `Verdicts` (data/columns.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..process.task import Task


@dataclass(frozen=True)
class Member:
    """A process of the dock, as the others know it.

    It has a name, a host, the index of its warehouse (-1: none), and the columns that its controllers need news of.
    """

    name: str
    host: int
    warehouse: int
    needed_columns: frozenset[str]


@dataclass(frozen=True)
class DockAddress:
    """What a process needs to find the dock of its run.

    - `controllers`: by node, the name of the process that has its controller.
    - `warehouses`: by the warehouse's index, the name of its process; `hosts`: the host of each.
    - `key`: authenticates the processes of a run on several hosts (channel.py); empty on one host.
    - `token`: authenticates the objects that ranks exchange (rank/object_collectives.py).
    - `capacity`: bytes of rows that a warehouse takes; 0: as much as its host's memory holds.
    """

    controllers: Mapping[str, str]
    warehouses: Sequence[str]
    hosts: Sequence[int]
    key: bytes
    token: bytes
    capacity: int = 0


class RowLocation(NamedTuple):
    """Where rows are stored: a segment of a warehouse, by its name."""

    warehouse: int
    segment: str


@dataclass(frozen=True)
class RowsReady:
    """The news that a warehouse sends to controllers when it gets rows of a column.

    It has the numbers of the rows, the length of each row, and their location. For a filter's verdicts (`verdicts`),
    `lengths` are how often each row continues.
    """

    column: str
    rows: Array
    lengths: Array
    place: RowLocation
    verdicts: bool = False

    @classmethod
    def from_piece(cls, column: str, piece: ColumnRows, place: RowLocation) -> RowsReady:
        """Return the news that a piece makes."""
        return cls(column, piece.rows, piece.reported_values, place, isinstance(piece, Verdicts))


@dataclass(frozen=True)
class WorkShare:
    """What a group gets of a round.

    Its units, the number of rows of each, and those rows, unit by unit.
    """

    units: Array
    sizes: Array
    rows: Array


@dataclass(frozen=True)
class Round:
    """A decision of a controller: what each group gets next.

    `last` means the last of the iteration, or of a round of its prompts.
    """

    epoch: int
    parts: tuple[WorkShare, ...]
    last: bool


@dataclass(frozen=True)
class WarehouseInventory:
    """What a warehouse tells a rebuilt controller about an open task.

    The news of all its rows and, by node, the rounds that a controller has stored there.
    """

    task: Task
    news: Sequence[RowsReady]
    rounds: Mapping[str, Sequence[Round]]


@dataclass(frozen=True)
class Share:
    """What one data-parallel group gets of a round.

    - `units`: what it computes, as prompts or responses; `sizes`: the number of rows of each unit; `rows`: those rows,
      unit by unit. Two prompts of four responses each are 2 units, sizes [4, 4], and 8 rows.
    - `where`: by column, the place of each row that these rows need, as an index into `places`. The rows of the column
      are ascending and unique.
    - `most`: the number of rows of the round's largest share, so that all groups make the same number of micro-batches.
    - `round_units`: the number of rows of the whole round; `elements`: by column, the number of elements of the whole
      round.
    - `epoch`: of an update; `last`: nothing comes after it in this iteration, or in this round of prompts.
    """

    units: Array
    sizes: Array
    rows: Array
    where: dict[str, Array]
    places: tuple[RowLocation, ...]
    largest_share_rows: int
    round_units: int
    elements: dict[str, int]
    epoch: int
    last: bool


@dataclass(frozen=True)
class Batch:
    """The rows of a share: their numbers, and each column with one entry per row."""

    share: Share
    rows: Array
    columns: dict[str, ColumnData]


@dataclass(frozen=True)
class CurrentActivity:
    """What a process began to do, how many seconds ago, and its progress.

    `rows` is the progress in words, empty if the process does not count its rows.
    """

    activity: str
    seconds: float
    rows: str = ""

    def __str__(self) -> str:
        return f"{self.activity}{', ' * bool(self.rows)}{self.rows}"


class ProcessStatus(NamedTuple):
    """What a process reports about itself.

    - `what` it does, `since` when (time.monotonic), and its `pid` on its host (0: not reported).
    - `done`: by node that writes no rows, the number of finished rows in the task `key`.
    - `rows`: the number of computed rows `of` its share (0: it does not count). `moved`: when the last one was done
      (time.monotonic; 0: none yet). `where`: more about the position, such as the turn.
    """

    activity: str
    since: float
    pid: int = 0
    key: str = ""
    done: Mapping[str, int] = {}
    rows: int = 0
    total_rows: int = 0
    last_row_at: float = 0.0
    where: str = ""

    def progress(self, now: float) -> str:
        """Describe the progress of its rows; empty if it does not count them."""
        if not self.total_rows:
            return self.where
        last = f", the last {now - self.last_row_at:.0f} s ago" if self.rows and self.last_row_at else ""
        return f"{self.rows} of {self.total_rows} rows are done{last}{', ' * bool(self.where)}{self.where}"


@dataclass(frozen=True)
class Wait:
    """A process that waits for a controller's answer.

    `who` names the node, and its group if one requests rows. `missing` describes the rows that are not there yet and
    names the edges.
    """

    who: str
    key: str
    seconds: float
    missing: str

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds:.0f} s in {self.key} for {self.missing}"


@dataclass(frozen=True)
class DockSnapshot:
    """What the dock of a host shows to the observers of a run.

    - `rows`: by task and node of a controller here, the rows that were handed out and the rows known to exist, each
      once per epoch.
    - `done`: by task and node, the rows written here, or for a node that writes none, the rows that its processes
      finished.
    - `held`: bytes of rows in the warehouse, None if there is none.
    - `memory`: by process of this host, its resident bytes, shared memory included; `used` and `total`: of the host.
    - `pid`: of this process, which tells a replacement from its predecessor.
    """

    host: int
    rows: dict[str, dict[str, tuple[int, int]]]
    done: dict[str, dict[str, int]]
    row_bytes: int | None
    memory: dict[str, int]
    used: int
    total: int
    pid: int


@dataclass(frozen=True)
class Status:
    """What the dock of a host knows of the run.

    - `last`: the node that took rows last; `moves`: a counter that grows while rows move.
    - `doing`: what each process reported last.
    - `ended`: the processes of the host that stopped responding and were killed, by id, with the name and the reason.
    - `bytes`: what the host's processes have read and written.
    """

    last: str
    moves: int
    waits: tuple[Wait, ...]
    doing: dict[str, CurrentActivity]
    snapshot: DockSnapshot | None = None  # if somebody watches the run
    ended: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    bytes: int = 0
