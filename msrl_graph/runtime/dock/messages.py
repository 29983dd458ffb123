"""Messages that the processes of a run send each other through the dock.

A *task* is one iteration of training or of an evaluation (process/task.py). *News* is a message about rows that arrived
in a warehouse (`RowsReady`). A *segment* is a file of rows (segments.py).

Invariant: a message is plain data that does not change once the message is sent. A message may be sent twice: news that
is received again changes nothing. The rows themselves are sent as `ColumnRows` and `Verdicts` (data/columns.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..process.task import Task
from ..process.task_report import RunError


class DockTimeout(RunError):
    """A process has waited for the dock longer than the run's deadline."""


class DockFull(RunError):
    """There is no space for rows, and no open task can end and release space."""


@dataclass(frozen=True)
class Member:
    """What the dock processes of other hosts know about a dock process.

    `host` is the number of the process's host, and `warehouse` is the index of the process's warehouse (-1: no
    warehouse). `needed_columns` are the columns about which the process's controllers need news.
    """

    name: str
    host: int
    warehouse: int
    needed_columns: frozenset[str]


@dataclass(frozen=True)
class DockAddress:
    """What a process needs to find the dock of its run.

    - `controllers`: for each node, the name of the process that has the node's controller.
    - `warehouses`: for each warehouse, by its index, the name of the process that has the warehouse. `hosts`: for each
      warehouse, the number of its host.
    - `key`: authenticates the processes of a run on several hosts (channel.py); empty for a run on one host.
    - `token`: authenticates the objects that ranks exchange (rank/object_collectives.py).
    - `capacity`: the bytes of rows that a warehouse accepts; 0: the memory of its host is the only limit.
    """

    controllers: Mapping[str, str]
    warehouses: Sequence[str]
    hosts: Sequence[int]
    key: bytes
    token: bytes
    capacity: int = 0


class RowLocation(NamedTuple):
    """The location of rows: the index of a warehouse, and the name of a segment in it."""

    warehouse: int
    segment: str


@dataclass(frozen=True)
class RowsReady:
    """The news that new rows of a column are in a warehouse.

    A warehouse sends this message to controllers. It contains the numbers of the rows (`rows`), the length of each row
    (`lengths`), and the location of the rows (`place`). If `verdicts` is true, the column has the verdicts of a filter,
    and `lengths` has the verdicts (how often each row continues) instead of lengths.
    """

    column: str
    rows: Array
    lengths: Array
    place: RowLocation
    verdicts: bool = False

    @classmethod
    def from_piece(cls, column: str, piece: ColumnRows, place: RowLocation) -> RowsReady:
        """Return the news that the rows of `piece` are stored at `place`."""
        return cls(column, piece.rows, piece.reported_values, place, isinstance(piece, Verdicts))


@dataclass(frozen=True)
class WorkShare:
    """The units that one data-parallel group gets by one decision of a controller.

    `sizes` is the number of rows of each unit, and `rows` are the rows of all units, unit by unit.
    """

    units: Array
    sizes: Array
    rows: Array


@dataclass(frozen=True)
class Round:
    """A decision of a controller: the units that each data-parallel group gets next.

    `parts` has one entry for each group. `last` means that this decision is the last decision of the iteration. If the
    node works in rounds of prompts (before a filter with `refill`), `last` means the last decision of the current round
    of prompts.
    """

    epoch: int
    parts: tuple[WorkShare, ...]
    last: bool


@dataclass(frozen=True)
class WarehouseInventory:
    """The data of one open task in a warehouse.

    A replacement of a dead process rebuilds its controllers from this data. `news` is about all rows of the task in the
    warehouse. `rounds` are, for each node, the decisions that the node's controller has stored in the warehouse.
    """

    task: Task
    news: Sequence[RowsReady]
    rounds: Mapping[str, Sequence[Round]]


@dataclass(frozen=True)
class Share:
    """The units that one data-parallel group gets by a decision, and their locations.

    - `units`: the number of each unit to compute, which is the number of a prompt or of a response. `sizes`: how many
      rows each unit has. `rows`: the numbers of the rows of all units, unit by unit. Two prompts of four responses each
      are 2 units, sizes [4, 4], and 8 rows.
    - `where`: for each column, the locations of the rows that the share needs. The rows are in ascending order without
      repetition. A location is an index into `places`.
    - `largest_share_rows`: the number of rows of the largest share of the decision (`Round`), over all groups. With
      this number all groups make the same number of micro-batches.
    - `round_rows`: the total number of rows of the decision's shares, over all groups. `elements`: for
      each column, the number of elements in these rows.
    - `epoch`: the epoch of an update. `last`: the value of `Round.last`.
    """

    units: Array
    sizes: Array
    rows: Array
    where: dict[str, Array]
    places: tuple[RowLocation, ...]
    largest_share_rows: int
    round_rows: int
    elements: dict[str, int]
    epoch: int
    last: bool


@dataclass(frozen=True)
class Batch:
    """The rows of a share: their numbers, and their values by column.

    A rank or a function host has a batch while it computes the share. A column has one entry for each row of the share.
    """

    share: Share
    rows: Array
    columns: dict[str, ColumnData]


@dataclass(frozen=True)
class CurrentActivity:
    """What a process is doing, since when, and how far it is.

    `rows` is the progress in words, empty if the process does not count its rows.
    """

    activity: str
    seconds: float
    rows: str = ""

    def __str__(self) -> str:
        return f"{self.activity}{', ' * bool(self.rows)}{self.rows}"


class ProcessStatus(NamedTuple):
    """What a process reports about itself.

    - `activity`: what the process does. `since`: when the activity began (time.monotonic). `pid`: the process id on its
      host (0: not reported).
    - `done`: for each node that writes no rows, the number of rows that the process finished in the task `key`.
    - `rows`: how many of the share's `total_rows` rows the process has computed. `total_rows` is 0 if the process does
      not count its rows. `last_row_at`: when the last row was computed (time.monotonic; 0: none yet). `where`: a text
      with more detail, such as the turn of an episode.
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
        """Describe how many rows of a share this process has computed.

        Returns only `where` if the process does not count its rows.
        """
        if not self.total_rows:
            return self.where
        last = f", the last {now - self.last_row_at:.0f} s ago" if self.rows and self.last_row_at else ""
        return f"{self.rows} of {self.total_rows} rows are done{last}{', ' * bool(self.where)}{self.where}"


@dataclass(frozen=True)
class Wait:
    """A process that waits for a controller's answer.

    `who` names the node and, for a request for rows, also the data-parallel group. `key` is the task. `missing`
    describes the rows that are not ready: their column and the node that writes it, or the filter whose verdict is
    missing.
    """

    who: str
    key: str
    seconds: float
    missing: str

    def __str__(self) -> str:
        return f"{self.who} has waited {self.seconds:.0f} s in {self.key} for {self.missing}"


@dataclass(frozen=True)
class DockSnapshot:
    """The rows and the memory of a host's dock, for showing the progress of a run.

    - `rows`: for each task and each node whose controller is in this dock, the number of rows that were handed out and
      the number of rows known to exist. Both count a row once per epoch.
    - `done`: for each task and node, the number of rows written on this host. For a node that writes no rows, it is the
      number of rows that the processes of this host finished.
    - `row_bytes`: the bytes of rows in the warehouse; None if this dock has no warehouse.
    - `memory`: for each process of this host, its resident bytes, including shared memory. `used` and `total`: bytes of
      the host's memory.
    - `pid`: the id of the dock's process. A replacement of the process has another id.
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

    - `last`: the last node that received a share. `moves`: a counter that grows when rows arrive, are handed out or are
      computed.
    - `waits`: the requests that wait for an answer. `doing`: the last activity that each process reported.
    - `ended`: for the id of each killed process of the host, the name of the process and the reason for the kill. A
      process is killed when it stops responding.
    - `bytes`: the number of bytes that the processes of the host have read and written.
    """

    last: str
    moves: int
    waits: tuple[Wait, ...]
    doing: dict[str, CurrentActivity]
    snapshot: DockSnapshot | None = None  # if somebody watches the run
    ended: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    bytes: int = 0
