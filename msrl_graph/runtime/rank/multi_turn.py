"""Generation with an environment: turns of the policy and of the environment.

Invariant: a response ends with tokens of the policy, and has at most `bound` tokens. A token of the environment has the
log-probability NaN, because it was not sampled. A log-probability of the policy that is not finite is stored as -inf.
Only the leader of a data-parallel group calls environments. It shares their replies with the other ranks.
"""

from __future__ import annotations

import numpy as np

from ...backends.engine_protocols import GenerateRequest, Generator, collect_responses
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ..agents.template import ChatTemplate
from ..data.columns import Array, ColumnData, offsets_from_lengths
from ..data.numerics import sampled_columns
from ..data.tokens import model_tokens
from ..functions.environments import EnvironmentClass
from .context import RankContext
from .environment_turns import BEGINNING, Dialogue
from .rollout import MixedResponses, Rollout


class EnvironmentPartner:
    """The environment with which a generation's policy exchanges turns."""

    def __init__(self, context: RankContext, node: Node) -> None:
        self.context = context
        self.environment = EnvironmentClass(node, context.plan)
        if context.is_group_leader(node):  # only this rank calls the environment
            self.environment.start()

    def play(self, rollout: Rollout, generator: Generator) -> MixedResponses:
        """Run turns of the policy and of the environment until each row's episode is over."""
        node = rollout.node
        plan = self.context.plan
        rows = rollout.rows
        episodes = self.environment.begin(rollout.batch, rows, rollout.task)
        contexts = rollout.response_contexts
        dialogue = Dialogue(episodes, ChatTemplate(model_tokens(plan, plan.model(node.name).path)), contexts)
        bound = int(rollout.sampling.max_tokens)
        responses = GrowingResponses(len(rows), bound)
        turns = GenerateAttributes.of(node).turns or bound
        last_starts = np.zeros(len(rows), int)
        answers = np.zeros(len(rows), int)
        keys = rollout.keys
        with rollout.report.phase("environment"):
            first = self.context.share_result(node, dialogue.begin)
        started = np.array([i for i, ids in enumerate(first) if ids is not None], int)
        active = responses.append_replies(started, [ids for ids in first if ids is not None])
        for i in started[~np.isin(started, active)]:
            reason = f"the environment's first message has {len(first[i])} tokens, but a response has room for"
            episodes.refuse(int(i), f"{reason} {bound}", BEGINNING)
        for turn in range(1, turns + 1) if len(active) else ():
            before = [np.concatenate([contexts[i], responses[i]]) for i in active]
            sampling = rollout.sampling.select(active)
            request = GenerateRequest(before, keys[active], sampling, responses.lengths[active])
            drawn = collect_responses(generator.generate(request))
            last_starts[active] = responses.lengths[active]
            responses.append_sampled(active, *drawn)
            answers[active] += 1
            with rollout.report.phase("environment"):
                replies = self.context.share_result(node, dialogue.step, active, drawn[0], turn, turn < turns)
            continues = np.array([ids is not None for ids in replies])
            active = responses.append_replies(active[continues], [ids for ids in replies if ids is not None])
            if not len(active):
                break
        response, _ = sampled_columns(plan.graph, node)
        alive = self.context.share_result(node, episodes.end, {response: responses.lengths})
        verdicts = episodes.verdicts(rollout.report, rollout.metric_prefix)
        return MixedResponses(
            rows[alive],
            [column.take(np.flatnonzero(alive)) for column in responses.columns()],
            episodes.columns() if self.context.is_group_leader(node) else {},
            verdicts,
            last_starts[alive],
            int(answers[alive].sum()),
        )


class GrowingResponses:
    """The responses of some rows, to which turns are appended.

    Methods identify a row by its position. Each response has room for `bound` tokens.
    """

    def __init__(self, rows: int, bound: int) -> None:
        self.bound = bound
        self.lengths = np.zeros(rows, np.int64)
        self._ids = np.zeros((rows, bound), np.int32)
        self._logps = np.full((rows, bound), np.nan, np.float32)
        self._written = np.zeros((rows, bound), bool)  # by the policy

    def __getitem__(self, row: int) -> Array:
        """Return the tokens that were appended to a row's response so far."""
        return self._ids[row, : self.lengths[row]]

    def append_sampled(self, rows: Array, tokens: list[Array], logps: list[Array]) -> None:
        """Append the tokens that the policy sampled for these rows."""
        for row, ids, logp in zip(rows, tokens, logps, strict=True):
            new = slice(self.lengths[row], self.lengths[row] + len(ids))
            self._ids[row, new] = ids
            self._logps[row, new] = logp
            self._written[row, new] = True
            self.lengths[row] += len(ids)

    def append_replies(self, rows: Array, tokens: list[Array]) -> Array:
        """Append the tokens that the environment replied for these rows.

        A reply is appended only if the response has room for the reply and for one more token of the policy. Returns
        the rows that had room.
        """
        fits = self.lengths[rows] + [len(ids) for ids in tokens] < self.bound
        for row, ids, fit in zip(rows, tokens, fits, strict=True):
            if fit:
                self._ids[row, self.lengths[row] : self.lengths[row] + len(ids)] = ids
                self.lengths[row] += len(ids)
        fitting: Array = rows[fits]
        return fitting

    def columns(self) -> tuple[ColumnData, ColumnData, ColumnData]:
        """Return the tokens, the log-probabilities, and a mask of the policy's tokens."""
        inside = np.arange(self.bound) < self.lengths[:, None]
        offsets = offsets_from_lengths(self.lengths)
        mask = self._written[inside]
        logps = self._logps[inside]
        logps[mask & ~np.isfinite(logps)] = -np.inf
        return ColumnData(self._ids[inside], offsets), ColumnData(logps, offsets), ColumnData(mask, offsets)
