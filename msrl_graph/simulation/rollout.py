"""Partial rollout: groups that are cut after some tokens and go on in a later round, perhaps of a later iteration, with
newer weights.

Invariant: every token of a row is generated once; a round works on as many groups as an iteration has prompts, those
that were cut first, then new ones in the order of the source; an iteration takes the first of the whole ones in the
order of the source, and what is whole beyond them waits for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .generation import Sequence


@dataclass
class Group:
    """The responses to one prompt: its number over all iterations, the tokens that each has and is to have; the oldest
    version that wrote some; when the last was whole."""

    prompt: int
    context: int
    tokens: list[int]
    version: int
    written: list[int] = field(default_factory=list)
    end: float = 0.0

    def sequences(self, place: int, most: int) -> list[Sequence]:
        """What a round adds, at most `most` tokens a row; `place` is the group's among those of the round. A new prompt
        is computed once, what was cut row by row."""
        found: list[Sequence] = []
        for i, (done, whole) in enumerate(zip(self.written, self.tokens, strict=True)):
            if done < whole:
                context = self.context + done
                prefill = context if done or not found else 0
                found.append(Sequence(place * len(self.tokens) + i, context, prefill, min(most, whole - done)))
        return found

    @property
    def whole(self) -> bool:
        return self.written == self.tokens


@dataclass
class Rollout:
    """`prompt` gives the tokens of a prompt and of its responses, by its number; `most` tokens a row are added in a
    round."""

    prompts: int
    samples: int
    most: int
    prompt: Callable[[int], tuple[int, list[int]]]
    cut: list[Group] = field(default_factory=list)
    whole: list[Group] = field(default_factory=list)
    next: int = 0

    def begin_round(self, version: int) -> list[Group]:
        working = self.cut[: self.prompts]
        self.cut = self.cut[self.prompts :]
        while len(working) < self.prompts:
            context, tokens = self.prompt(self.next)
            working.append(Group(self.next, context, tokens, version, [0] * self.samples))
            self.next += 1
        return working

    def end_round(self, working: list[Group], times: list[float]) -> None:
        """Takes the groups of a round back; `times` are when their rows ended, 0 for one that was whole before."""
        for place, group in enumerate(working):
            group.written = [min(t, w + self.most) for t, w in zip(group.tokens, group.written, strict=True)]
            group.end = max(times[place * self.samples : (place + 1) * self.samples])
            (self.whole if group.whole else self.cut).append(group)
        self.cut.sort(key=lambda g: g.prompt)

    def take(self) -> list[Group]:
        """The groups of an iteration."""
        self.whole.sort(key=lambda g: g.prompt)
        taken, self.whole = self.whole[: self.prompts], self.whole[self.prompts :]
        return taken
