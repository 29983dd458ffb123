"""Messages between a rank and the process that runs the rank's agents.

The rank sends a Setup once, and a BatchStart for each batch. After the BatchStart, the rank sends SampleReplies
repeatedly. The process answers each SampleReplies with the agents' next requests for tokens, until all agents of the
batch have finished.

Invariant: the process sends one answer to each BatchStart and SampleReplies, in order. A row is identified by its index
in the batch (`place`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..data.columns import Array, ColumnData
from ..dock.messages import Batch
from ..functions.instances import Failure


@dataclass(frozen=True)
class Setup:
    """The first message to the process: the plan, and the node whose agents it runs.

    - `plan`: the plan as JSON.
    - `node`: the name of the generation node.
    - `files`: the folder of the shipped files.
    - `log`: the file to which the rank logs.
    """

    plan: str
    node: str
    files: str
    log: str


@dataclass(frozen=True)
class BatchStart:
    """A message that asks the process to start an agent for each row of a batch.

    - `task`, `iteration`: the name of the task, and its iteration.
    - `batch`: the rows that the agents read, such as prompts.
    - `rows`: the numbers of the rows that the agents write, such as responses. Each row in `batch` has the same number
      of responses in `rows`.
    - `contexts`: for each of `rows`, the tokens before its response.
    - `bound`: the maximum number of tokens of a response.
    """

    task: str
    iteration: int
    batch: Batch
    rows: Array
    contexts: list[Array]
    bound: int


@dataclass(frozen=True)
class SampleRequest:
    """A request to draw tokens for one row.

    - `number`: the number of the request.
    - `place`: the index of the row in the batch.
    - `key`: the key of the noise with which tokens are drawn.
    - `tokens`: the tokens after which the policy draws.
    - `response_tokens`: how many tokens at the end of `tokens` belong to the response.
    - `most`: the maximum number of tokens to draw.
    - `stop`: texts that end the answer.
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
    """The tokens that were drawn for the SampleRequest with the same `number`."""

    number: int
    tokens: Array
    logps: Array


@dataclass(frozen=True)
class SampleReplies:
    """The replies to the requests that the process sent last.

    The process answers with AgentsFinished, or with the list of the agents' next requests. The list is empty if no
    agent has sent a request for a while.
    """

    drawn: list[SampleReply] = field(default_factory=list)


@dataclass(frozen=True)
class AgentsFinished:
    """The last message of a batch: all agents of the batch have ended.

    Either all agents have finished, or the failure of an agent ends the run.

    - `response`: the responses of all rows as four columns: tokens, log-probabilities, mask, and beginnings of
      conversations. The response of a failed row is empty.
    - `last`: for each row, the index of the token at which the row's last answer begins.
    - `values`: the other columns that the node writes, with one value for each row.
    - `failed`: the failure of each failed row, with the arguments of the row's agent. The keys are the indices of the
      rows in the batch.
    - `answers`: the number of answers that the policy gave in all rows.
    - `figures`: other metrics, as sums over all rows.
    - `remarks`: texts for the user.
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
    """A message that says why the process cannot run the agents."""

    message: str
