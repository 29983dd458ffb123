"""Partial rollout: an iteration ends when enough prompts are complete.

A prompt is complete when all responses to it have ended. Responses grow in stretches: in one stretch, each response
that has not ended gets the same number of new tokens. After each stretch the data-parallel groups find out which
prompts are complete. Once there are enough complete prompts, the iteration trains on these prompts (it *takes* them).
The other prompts are cut: their responses continue in the next iteration, after the tokens that were already sampled.

Invariant: which prompts an iteration takes depends only on the sampled tokens, not on the ranks that sample them. After
each stretch, every rank knows whether each prompt of any group is complete. A token is sampled once. The noise key of a
token has the iteration and the row in which the response began, however often the response was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...backends.engine_protocols import GenerateRequest, Generator, Response
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ..data.columns import Array
from ..data.row_files import REPLAY_HINT, Recording
from ..process.task import CutPrompt
from ..process.task_report import RunError
from .rollout import Rollout, response_rows

# The state of a prompt: computed by another group; incomplete; incomplete, and the iteration waits for it; complete.
ELSEWHERE, GROWS, AWAITED, WHOLE = range(4)


@dataclass
class PartialResponse:
    """The already sampled tokens of a response, and whether the response has ended."""

    tokens: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    logps: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    ended: bool = False

    def append(self, drawn: Response, version: int) -> None:
        self.tokens = np.concatenate([self.tokens, drawn.tokens])
        self.logps = np.concatenate([self.logps, drawn.logps])
        self.versions = np.concatenate([self.versions, np.full(len(drawn.tokens), version, np.int32)])
        self.ended = drawn.ended


class PartialRollout:
    """The prompts of an iteration that this rank's data-parallel group computes.

    - `takes`: how many prompts the iteration takes, in total over all groups.
    - `version`: the version of the weights.
    - `sum_states`: a function that adds up the groups' arrays. Each array has one number for each prompt of the
      iteration: whether the prompt is complete (`WHOLE`), or 0 if another group computes the prompt.
    """

    def __init__(self, rollout: Rollout, takes: int, version: int, sum_states: Callable[[Array], Array]) -> None:
        task = self.task = rollout.task
        sampling = self.sampling = rollout.sampling
        self.rows = rollout.batch.rows.tolist()
        self.context = rollout.contexts
        self.takes = takes
        self.attributes = GenerateAttributes.of(rollout.node)
        self.version = version
        self.sum_states = sum_states
        self.longest = int(sampling.max_tokens)
        self.stretch = self.attributes.stretch(self.longest)
        self.responses: dict[int, list[PartialResponse]] = {}
        self.keys: dict[int, Any] = {}
        for row in self.rows:
            iteration, number = self._find_origin(row)
            numbers = np.arange(number * sampling.samples, (number + 1) * sampling.samples)
            self.keys[row] = rollout.stream.keys(iteration, numbers)
            known = task.cut[row].responses if row < len(task.cut) else ()
            self.responses[row] = [PartialResponse(*response) for response in known] or [
                PartialResponse() for _ in range(sampling.samples)
            ]

    def run(self, generator: Generator) -> list[int]:
        """Sample until enough prompts are complete.

        Returns the prompts of this group that the iteration takes.
        """
        live = [
            (place, i)
            for place, row in enumerate(self.rows)
            for i, response in enumerate(self.responses[row])
            if not response.ended
        ]
        drawn = self._grow(generator, live) if live else iter(())
        while True:
            states = self.sum_states(self._prompt_states())
            complete = np.flatnonzero(states == WHOLE)
            # Also stop if no further prompt can become complete: rows may have been dropped earlier.
            enough = len(complete) >= self.takes or not (states == GROWS).any()
            if enough and not (states == AWAITED).any():
                taken_places = set(complete[: self.takes].tolist())
                return [row for row in self.rows if row in taken_places]
            for _ in range(sum(not response.ended for grown in self.responses.values() for response in grown)):
                next(drawn)

    def replay(self, recording: Recording, node: Node, columns: Sequence[str]) -> list[int]:
        """Use the responses of a recorded run instead of sampling.

        Returns the prompts of this group that the recorded iteration took. `columns` names the recorded columns:
        tokens, log-probabilities and, if they were recorded, versions. For prompts that were cut, the recording has no
        responses. So the responses to these prompts have no tokens when they continue in the next iteration.
        """
        fan = self.sampling.samples
        arguments = (node, columns, self.task.number)
        prompts = recording.prompts(*arguments, fan)
        if len(prompts) != self.takes:
            recorded = f"iteration {self.task.number} of {recording.folder} has responses to {len(prompts)} prompts"
            raise RunError(f"{recorded}, but `{node.name}` ({node.span.place}) takes {self.takes}: {REPLAY_HINT}")
        places = np.flatnonzero(np.isin(self.rows, prompts))
        taken_rows = [self.rows[place] for place in places]
        rows = response_rows(np.array(taken_rows, np.int64), fan)
        columns_read = recording.responses(*arguments, [self.context[place] for place in places], rows, fan)
        grown = [PartialResponse(*known) for known in zip(*columns_read, strict=True)]
        for response in grown:
            response.ended = True
        self.responses |= {row: grown[i * fan : (i + 1) * fan] for i, row in enumerate(taken_rows)}
        return taken_rows

    def cut_prompts(self, taken_rows: list[int]) -> list[CutPrompt]:
        """Return the prompts of this group that continue in the next iteration.

        `taken_rows` are the prompts on which this iteration trains; all other prompts continue. A prompt that was cut
        as often as the program allows is dropped, unless the program says that the iteration waits for such prompts.
        """
        prompts = []
        for row in sorted({*self.rows} - {*taken_rows}):
            if self._is_overdue(row) and not self.attributes.waits:
                continue
            carried = row < len(self.task.cut)
            position = self.task.cut[row].position if carried else self.task.position + row - len(self.task.cut)
            responses = tuple(
                (response.tokens, response.logps, response.versions, response.ended) for response in self.responses[row]
            )
            cuts = 1 + (self.task.cut[row].cuts if carried else 0)
            prompts.append(CutPrompt(position, responses, cuts, *self._find_origin(row)))
        return prompts

    def _prompt_states(self) -> Array:
        states = np.full(self.task.prompts, ELSEWHERE, np.int64)
        for row in self.rows:
            awaited = self._is_overdue(row) and self.attributes.waits
            states[row] = (
                WHOLE if all(response.ended for response in self.responses[row]) else AWAITED if awaited else GROWS
            )
        return states

    def _find_origin(self, row: int) -> tuple[int, int]:
        """Return where a prompt's responses began: the iteration, and the prompt's row."""
        if row < len(self.task.cut):
            return self.task.cut[row].iteration, self.task.cut[row].row
        return self.task.number, row

    def _is_overdue(self, row: int) -> bool:
        """Return whether a prompt was cut as often as the program allows."""
        return row < len(self.task.cut) and self.task.cut[row].cuts >= self.attributes.cuts

    def _grow(self, generator: Generator, live: list[tuple[int, int]]) -> Iterator[None]:
        """Sample tokens for unfinished responses, one stretch after another.

        In one stretch, each unfinished response gets a fixed number of new tokens. `live` has a pair for each response:
        the position of its prompt, and its number among the prompt's responses. When the new tokens of a response
        arrive, the function appends the tokens to the response and yields.
        """
        fan = self.sampling.samples
        grown = [self.responses[self.rows[place]][i] for place, i in live]
        prompts = [
            np.concatenate([self.context[place], response.tokens])
            for (place, _), response in zip(live, grown, strict=True)
        ]
        keys = np.array([self.keys[self.rows[place]][i] for place, i in live], np.uint64)
        begun = np.array([len(response.tokens) for response in grown])
        # A stop string may begin before a cut and end after it.
        sampling = replace(self.sampling.select(np.array([place * fan + i for place, i in live])), joined=begun)
        for part in generator.generate(GenerateRequest(prompts, keys, sampling, begun, self.stretch)):
            grown[part.place].append(part, self.version)
            yield
