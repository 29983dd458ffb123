"""Messages between a rank and the process of its agents.

The rank begins a batch. Then it asks what to draw next, sending what was drawn, until all agents have finished.

Invariant: one answer to each question, in turn. Rows are identified by their places in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..data.columns import Array, ColumnData
from ..dock.messages import Batch
from ..functions.instances import Failure


@dataclass(frozen=True)
class Setup:
    """What the process begins with: the plan, and a node of it.

    `files` is the folder of the shipped files, `log` the file to which the rank logs.
    """

    plan: str
    node: str
    files: str
    log: str


@dataclass(frozen=True)
class BatchStart:
    """A batch of an iteration of a task (by the task's name).

    Each row of the batch has the same number of `rows`. `contexts` are the tokens before their responses; a response
    has room for `bound` tokens.
    """

    task: str
    iteration: int
    batch: Batch
    rows: Array
    contexts: list[Array]
    bound: int


@dataclass(frozen=True)
class SampleRequest:
    """What to draw for the row at `place`: at most `most` tokens after `tokens`.

    The last `begun` of `tokens` count as its response. `key` is the key of the noise.
    """

    number: int
    place: int
    key: int
    tokens: Array
    response_tokens: int
    most: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class SampleReply:
    """What was drawn for a request, by its number."""

    number: int
    tokens: Array
    logps: Array


@dataclass(frozen=True)
class SampleReplies:
    """The replies to the requests.

    The answer is the list of next requests, empty if none came for a while, or AgentsFinished.
    """

    drawn: list[SampleReply] = field(default_factory=list)


@dataclass(frozen=True)
class AgentsFinished:
    """All agents have finished, or one has failed and ends the run.

    - By row, empty for failed rows: the `response` (tokens, log-probabilities, mask, beginnings of conversations), the
      token at which its `last` answer begins, and by column the other `values` that the node writes.
    - `failed`: by place, the failure and the agent's arguments.
    - Of all rows together: the number of `answers` of the policy, other `figures`, and `remarks` for the user.
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
    """The process cannot run these agents, for this reason."""

    message: str
