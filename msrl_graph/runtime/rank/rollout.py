"""A batch of prompts whose responses a rank generates.

Invariant: the responses to a prompt are adjacent, and all ranks of a data-parallel group have the same rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ... import noise
from ...backends.engine_protocols import Sampling
from ..data.columns import Array, ColumnData, Verdicts
from .context import NodeBatch


def response_rows(prompts: Array, samples: int) -> Array:
    """Return the numbers of the responses to prompts, each with `samples` responses."""
    rows: Array = (prompts[:, None] * samples + np.arange(samples)).reshape(-1)
    return rows


@dataclass(frozen=True)
class Rollout(NodeBatch):
    """The prompts of a batch, and how the responses to them are sampled.

    - `contexts`: for each prompt, the tokens that its responses continue.
    - `stream`: the random stream from which tokens are sampled.
    - `metric_prefix`: the beginning of the names of this generation's metrics.
    - `context_lengths`: by the columns of tokens that the contexts consist of, their lengths for each prompt.
    """

    contexts: list[Array]
    sampling: Sampling
    stream: noise.RandomStream
    metric_prefix: str = ""
    context_lengths: Mapping[str, Array] = field(default_factory=dict)

    @property
    def rows(self) -> Array:
        """The numbers of the responses."""
        return response_rows(self.batch.rows, self.sampling.samples)

    @property
    def keys(self) -> Array:
        """The noise key of each response."""
        keys: Array = self.stream.keys(self.task.number, self.rows)
        return keys

    @property
    def response_contexts(self) -> list[Array]:
        """For each response, the tokens that it continues."""
        return [context for context in self.contexts for _ in range(self.sampling.samples)]

    def count(self, name: str, total: float, weight: float = 0) -> None:
        """Add to a metric of this generation."""
        self.report.count(self.metric_prefix + name, total, weight)

    def peak(self, name: str, value: float) -> None:
        """Record a maximum as a metric of this generation."""
        self.report.peak(self.metric_prefix + name, value)


@dataclass(frozen=True)
class MixedResponses:
    """Responses with tokens of the policy and of an environment or agent.

    - `rows`: the numbers of the responses that did not fail. `verdicts`: for all responses, whether they failed.
    - `response`: tokens, log-probabilities, a mask of the policy's tokens and, with agents, conversation starts.
    - `values`: the columns that the partner fills; empty except on the leader of the group.
    - `last_starts`: for each response, the position at which the policy's last turn begins.
    - `answers`: the number of turns of the policy in all these responses.
    """

    rows: Array
    response: list[ColumnData]
    values: dict[str, ColumnData]
    verdicts: dict[str, Verdicts]
    last_starts: Array
    answers: int
