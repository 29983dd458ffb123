"""Partial rollout: prompts are cut when enough others are complete.

They continue in the next iteration, with newer weights. Invariant: every token of a row is generated once. An iteration
has as many prompts in progress as `partial` says: first those that were cut, then new ones in the order of the source.
After each stretch it checks whether the prompts that it takes are complete: the first of them, those that were cut most
often first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .generation import Sequence


@dataclass
class Group:
    """The responses to one prompt.

    `prompt` is its number over all iterations; `written` and `tokens` are what each response has and will have;
    `version` is the oldest that wrote some of them; `cuts` how often they were cut; `end` when the last was complete.
    """

    prompt: int
    context: int
    tokens: list[int]
    version: int
    written: list[int]
    cuts: int = 0
    end: float = 0.0

    def sequences(self, place: int, most: int, begins: bool) -> list[Sequence]:
        """Return what a stretch adds, at most `most` tokens per row.

        `place` is the group's position among those in progress. In an iteration's first stretch (`begins`) a new prompt
        is computed once, and cut responses row by row.
        """
        sequences: list[Sequence] = []
        for index, (done, total) in enumerate(zip(self.written, self.tokens, strict=True)):
            if done < total:
                context = self.context + done
                prefill = context if begins and (done or not sequences) else 0
                sequences.append(Sequence(place * len(self.tokens) + index, context, prefill, min(most, total - done)))
        return sequences

    @property
    def is_complete(self) -> bool:
        return self.written == self.tokens


@dataclass
class SimulatedRollout:
    """The state of a partial rollout.

    `prompt` returns the tokens of a prompt and of its responses, by its number. An iteration takes `prompts` of those
    `under_way`; a stretch adds `most` tokens per row. After `cuts` cuts a prompt is overdue: an iteration `waits` for
    it, or drops it if it is not complete in time.
    """

    prompts: int
    under_way: int
    samples: int
    most: int
    cuts: int
    waits: bool
    prompt: Callable[[int], tuple[int, list[int]]]
    cut_groups: list[Group] = field(default_factory=list)
    next: int = 0

    def begin(self, version: int) -> list[Group]:
        working = self.cut_groups
        self.cut_groups = []
        while len(working) < self.under_way:
            context, tokens = self.prompt(self.next)
            working.append(Group(self.next, context, tokens, version, [0] * self.samples))
            self.next += 1
        return working

    def is_done(self, working: list[Group]) -> bool:
        """Return whether the iteration has all the groups that it needs."""
        awaited = [group for group in working if self.waits and group.cuts >= self.cuts]
        return sum(group.is_complete for group in working) >= self.prompts and all(
            group.is_complete for group in awaited
        )

    def grow(self, working: list[Group], times: list[float]) -> None:
        """Add the tokens of a stretch.

        `times` are when its rows ended, 0 for a row that was complete before.
        """
        for place, group in enumerate(working):
            group.written = [
                min(total, written + self.most) for total, written in zip(group.tokens, group.written, strict=True)
            ]
            group.end = max(group.end, *times[place * self.samples : (place + 1) * self.samples])

    def take(self, working: list[Group]) -> list[Group]:
        """Return an iteration's groups; the others continue, or are overdue and dropped."""
        finished = [group for group in working if group.is_complete][: self.prompts]
        self.cut_groups = [
            group for group in working if group not in finished and (self.waits or group.cuts < self.cuts)
        ]
        for group in self.cut_groups:
            group.cuts += 1
        self.cut_groups.sort(key=lambda group: (-group.cuts, group.prompt))
        return finished
