"""What a rank and the process of its agents say to each other: the rank begins a batch, and then asks again and again
what it is to draw, with what it has drawn, until all agents are through.

Invariant: one question, one answer, in turn. Rows go by their places in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..data.columns import Array, ColumnData
from ..dock.messages import Batch
from ..functions.instances import Failure


@dataclass(frozen=True)
class Setup:
    """What the process begins with: the plan and a node of it; `files`: the folder of what was shipped, `log`: the file
    in which the rank writes."""

    plan: str
    node: str
    files: str
    log: str


@dataclass(frozen=True)
class BatchStart:
    """A batch of an iteration of a task (by its name). Each of its rows has equally many of `rows`; `contexts` are the
    tokens that their responses stand after; a response has room for `bound` tokens."""

    task: str
    iteration: int
    batch: Batch
    rows: Array
    contexts: list[Array]
    bound: int


@dataclass(frozen=True)
class SampleRequest:
    """What is to be drawn for the row at `place`: after `tokens`, of which `begun` count as its response, at most
    `most` more; `key` numbers the noise."""

    number: int
    place: int
    key: int
    tokens: Array
    begun: int
    most: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class SampleReply:
    """What was drawn for a number."""

    number: int
    tokens: Array
    logps: Array


@dataclass(frozen=True)
class SampleReplies:
    """What has been drawn; the answer is what is wanted next: nothing, if for a while nobody asks, or Over."""

    drawn: list[SampleReply] = field(default_factory=list)


@dataclass(frozen=True)
class AgentsFinished:
    """All agents are through, or one has failed where that ends the run.

    - Of each row, nothing of those that failed: the `response`, its log-probabilities, its mask and where its
      conversations begin, the token of it at which its `last` answer begins, and by column the other `values` that the
      node writes. `failed`: by place the failure, and what the agent had been given.
    - Of all together: how many `answers` the policy gave, other `figures`, and what a person should hear of.
    """

    response: tuple[ColumnData, ColumnData, ColumnData, ColumnData]
    last: list[int]
    values: dict[str, list[Any]]
    failed: dict[int, tuple[Failure, dict[str, Any]]]
    answers: int
    figures: dict[str, int]
    remarks: list[str]


@dataclass(frozen=True)
class AgentsBroken:
    """The process cannot run these agents; why."""

    message: str
