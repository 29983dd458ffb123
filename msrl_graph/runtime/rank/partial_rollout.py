"""Partial rollout: the responses of an iteration grow by equal stretches until as many prompts are whole as it takes;
those that are not go on in the next iteration, from their tokens.

Invariant: which prompts an iteration takes is a function of what is drawn, whoever draws it: the responses of all
groups have grown by as many tokens when all ranks look, and all hear of all prompts. A token is drawn once, and by the
key of the row that its response began as, however often it was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ... import noise
from ...backends.spec import Generator, Response, Sampling
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ..data.columns import Array
from ..data.row_files import SAME, Recording
from ..process.task import CutPrompt, Task
from ..process.task_report import RunError

# What a prompt is to all ranks: of another group, not whole, not whole and waited for, whole.
ELSEWHERE, GROWS, AWAITED, WHOLE = range(4)


@dataclass
class PartialResponse:
    """A response so far."""

    tokens: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    logps: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    ended: bool = False

    def more(self, drawn: Response, version: int) -> None:
        self.tokens = np.concatenate([self.tokens, drawn.tokens])
        self.logps = np.concatenate([self.logps, drawn.logps])
        self.versions = np.concatenate([self.versions, np.full(len(drawn.tokens), version, np.int32)])
        self.ended = drawn.ended


class PartialRollout:
    """The prompts `rows` of an iteration that this rank's group has, `takes` of all of which the iteration takes.
    `version`: of the weights. `told` adds up what all groups say of each of the iteration's prompts."""

    def __init__(
        self,
        task: Task,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        said: GenerateAttributes,
        takes: int,
        version: int,
        told: Callable[[Array], Array],
        stream: noise.RandomStream,
    ) -> None:
        self.task = task
        self.rows = rows.tolist()
        self.context = context
        self.sampling = sampling
        self.takes = takes
        self.said = said
        self.version = version
        self.told = told
        self.longest = int(sampling.max_tokens)
        self.stretch = said.stretch(self.longest)
        self.grown: dict[int, list[PartialResponse]] = {}
        self.keys: dict[int, Any] = {}
        for row in self.rows:
            iteration, number = self._began(row)
            of = np.arange(number * sampling.samples, (number + 1) * sampling.samples)
            self.keys[row] = stream.keys(iteration, of)
            known = task.cut[row].responses if row < len(task.cut) else ()
            self.grown[row] = [PartialResponse(*r) for r in known] or [
                PartialResponse() for _ in range(sampling.samples)
            ]

    def run(self, generator: Generator) -> list[int]:
        """Draws; of this group's prompts those that the iteration takes."""
        live = [(p, i) for p, row in enumerate(self.rows) for i, g in enumerate(self.grown[row]) if not g.ended]
        drawn = self._drawn(generator, live) if live else iter(())
        while True:
            of = self.told(self._state())
            whole = np.flatnonzero(of == WHOLE)
            # Fewer where prompts have left before, so that no more can be whole.
            enough = len(whole) >= self.takes or not (of == GROWS).any()
            if enough and not (of == AWAITED).any():
                taken = set(whole[: self.takes].tolist())
                return [row for row in self.rows if row in taken]
            for _ in range(sum(not g.ended for grown in self.grown.values() for g in grown)):
                next(drawn)

    def replay(self, recording: Recording, node: Node, columns: Sequence[str]) -> list[int]:
        """As `run`, with what a recorded run drew and took: `columns` name its tokens, their log-probabilities, and
        their versions where it has them. Of what it cut nothing is there: it goes on as prompts alone."""
        fan = self.sampling.samples
        of = (node, columns, self.task.number)
        there = recording.prompts(*of, fan)
        if len(there) != self.takes:
            what = f"iteration {self.task.number} of {recording.folder} has responses to {len(there)} prompts"
            raise RunError(f"{what}, and `{node.name}` ({node.span.place}) takes {self.takes}: {SAME}")
        places = np.flatnonzero(np.isin(self.rows, there))
        taken = [self.rows[place] for place in places]
        rows = (np.array(taken, np.int64)[:, None] * fan + np.arange(fan)).reshape(-1)
        found = recording.responses(*of, [self.context[place] for place in places], rows, fan)
        grown = [PartialResponse(*known) for known in zip(*found, strict=True)]
        for response in grown:
            response.ended = True
        self.grown |= {row: grown[i * fan : (i + 1) * fan] for i, row in enumerate(taken)}
        return taken

    def cut(self, taken: list[int]) -> list[CutPrompt]:
        """What is not taken, as the next iteration goes on with it; what is overdue goes, unless it is waited for."""
        found = []
        for row in sorted({*self.rows} - {*taken}):
            if self._overdue(row) and not self.said.waits:
                continue
            old = row < len(self.task.cut)
            position = self.task.cut[row].position if old else self.task.position + row - len(self.task.cut)
            responses = tuple((g.tokens, g.logps, g.versions, g.ended) for g in self.grown[row])
            cuts = 1 + (self.task.cut[row].cuts if old else 0)
            found.append(CutPrompt(position, responses, cuts, *self._began(row)))
        return found

    def _state(self) -> Array:
        of = np.full(self.task.prompts, ELSEWHERE, np.int64)
        for row in self.rows:
            awaited = self._overdue(row) and self.said.waits
            of[row] = WHOLE if all(g.ended for g in self.grown[row]) else AWAITED if awaited else GROWS
        return of

    def _began(self, row: int) -> tuple[int, int]:
        """The iteration that a prompt's responses began in, and its number there."""
        if row < len(self.task.cut):
            return self.task.cut[row].iteration, self.task.cut[row].row
        return self.task.number, row

    def _overdue(self, row: int) -> bool:
        """Whether a prompt was cut as often as it may be."""
        return row < len(self.task.cut) and self.task.cut[row].cuts >= self.said.cuts

    def _drawn(self, generator: Generator, live: list[tuple[int, int]]) -> Iterator[None]:
        """Stretch by stretch the parts of those responses, by prompt and number; each is added as it comes."""
        fan = self.sampling.samples
        grown = [self.grown[self.rows[place]][i] for place, i in live]
        prompts = [np.concatenate([self.context[p], g.tokens]) for (p, _), g in zip(live, grown, strict=True)]
        keys = np.array([self.keys[self.rows[place]][i] for place, i in live], np.uint64)
        begun = np.array([len(g.tokens) for g in grown])
        # A stop string may lie across a cut.
        sampling = replace(self.sampling.of(np.array([place * fan + i for place, i in live])), joined=begun)
        for part in generator.generate(prompts, keys, sampling, begun, self.stretch):
            grown[part.place].more(part, self.version)
            yield
