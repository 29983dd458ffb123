"""Partial rollout: prompts that are cut when enough others are whole, and go on in the next iteration, with newer
weights.

Invariant: every token of a row is generated once; an iteration has as many prompts under way as `partial` says, those
that were cut first, then new ones in the order of the source. After each stretch it looks whether the prompts that it
takes are whole: the first of them, those first that were cut most often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .generation import Sequence


@dataclass
class Group:
    """The responses to one prompt: its number over all iterations, the tokens that each has and is to have; the oldest
    version that wrote some; how often they were cut; when the last was whole."""

    prompt: int
    context: int
    tokens: list[int]
    version: int
    written: list[int]
    cuts: int = 0
    end: float = 0.0

    def sequences(self, place: int, most: int, begins: bool) -> list[Sequence]:
        """What a stretch adds, at most `most` tokens a row; `place` is the group's among those under way. In the first
        one of an iteration (`begins`) a new prompt is computed once, what was cut row by row."""
        found: list[Sequence] = []
        for i, (done, whole) in enumerate(zip(self.written, self.tokens, strict=True)):
            if done < whole:
                context = self.context + done
                prefill = context if begins and (done or not found) else 0
                found.append(Sequence(place * len(self.tokens) + i, context, prefill, min(most, whole - done)))
        return found

    @property
    def whole(self) -> bool:
        return self.written == self.tokens


@dataclass
class SimulatedRollout:
    """`prompt` gives the tokens of a prompt and of its responses, by its number; an iteration takes `prompts` of those
    `under_way`; a stretch adds `most` tokens a row; after `cuts` cuts a prompt is overdue, and an iteration `waits`
    for it, or it leaves where it is not whole in time."""

    prompts: int
    under_way: int
    samples: int
    most: int
    cuts: int
    waits: bool
    prompt: Callable[[int], tuple[int, list[int]]]
    cut: list[Group] = field(default_factory=list)
    next: int = 0

    def begin(self, version: int) -> list[Group]:
        working = self.cut
        self.cut = []
        while len(working) < self.under_way:
            context, tokens = self.prompt(self.next)
            working.append(Group(self.next, context, tokens, version, [0] * self.samples))
            self.next += 1
        return working

    def enough(self, working: list[Group]) -> bool:
        """Whether the iteration has what it takes."""
        awaited = [g for g in working if self.waits and g.cuts >= self.cuts]
        return sum(g.whole for g in working) >= self.prompts and all(g.whole for g in awaited)

    def grow(self, working: list[Group], times: list[float]) -> None:
        """Takes what a stretch has added; `times` are when their rows ended, 0 for one that was whole before."""
        for place, group in enumerate(working):
            group.written = [min(t, w + self.most) for t, w in zip(group.tokens, group.written, strict=True)]
            group.end = max(group.end, *times[place * self.samples : (place + 1) * self.samples])

    def take(self, working: list[Group]) -> list[Group]:
        """The groups of an iteration; the others go on in the next one, or are overdue and leave."""
        taken = [g for g in working if g.whole][: self.prompts]
        self.cut = [g for g in working if g not in taken and (self.waits or g.cuts < self.cuts)]
        for group in self.cut:
            group.cuts += 1
        self.cut.sort(key=lambda g: (-g.cuts, g.prompt))
        return taken
