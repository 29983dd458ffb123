"""Partial rollout: prompts are cut when enough other prompts are complete.

To cut a prompt is to stop generating its responses. The prompt continues in the next iteration, with newer weights. An
iteration begins with the prompts that the previous iteration cut. It adds new prompts in the order of the source, until
the number of prompts in progress is the number in the attribute `partial`.

The rollout proceeds in stretches: a stretch generates a limited number of tokens per response. After each stretch, the
iteration checks whether enough prompts are complete. The iteration then uses the complete prompts that were cut most
often.

Invariant: each token of a row is generated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .generation import Sequence


@dataclass
class Group:
    """The responses to one prompt.

    - `prompt`: the number of the prompt, counted over all iterations.
    - `context`: the number of tokens of the prompt.
    - `tokens`: the final number of tokens of each response.
    - `version`: the oldest version of the weights that generated tokens of the responses.
    - `written`: the number of tokens of each response that are already generated.
    - `cuts`: how often the prompt was cut.
    - `end`: the time at which the last response was complete.
    """

    prompt: int
    context: int
    tokens: list[int]
    version: int
    written: list[int]
    cuts: int = 0
    end: float = 0.0

    def sequences(self, place: int, most: int, begins: bool) -> list[Sequence]:
        """Return the sequences that a stretch generates, with at most `most` tokens each.

        `place` is the position of the group among the groups in progress. The first stretch of an iteration (`begins`)
        needs a prefill: of the prompt, if the group is new, or of every response, if the group was cut.
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
    """A partial rollout, with the groups that continue in the next iteration.

    - `prompts`: the number of complete prompts that an iteration needs.
    - `under_way`: the number of prompts that are in progress at the same time.
    - `samples`: the number of responses to a prompt.
    - `most`: the number of tokens that a stretch adds to each response.
    - `cuts`: how often a prompt may be cut. A prompt that was cut this often is overdue.
    - `waits`: whether an iteration waits for overdue prompts. If it is False, overdue prompts are dropped.
    - `prompt`: a function from the number of a prompt to the token counts of the prompt and of each response to it.
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
        """Return whether the iteration has all groups that it needs."""
        awaited = [group for group in working if self.waits and group.cuts >= self.cuts]
        return sum(group.is_complete for group in working) >= self.prompts and all(
            group.is_complete for group in awaited
        )

    def grow(self, working: list[Group], times: list[float]) -> None:
        """Add the tokens of a stretch to the groups `working`.

        `times` has the time at which each row ended; it is 0 for a row that was complete before the stretch.
        """
        for place, group in enumerate(working):
            group.written = [
                min(total, written + self.most) for total, written in zip(group.tokens, group.written, strict=True)
            ]
            group.end = max(group.end, *times[place * self.samples : (place + 1) * self.samples])

    def take(self, working: list[Group]) -> list[Group]:
        """Return the complete groups that an iteration uses.

        Overdue groups are dropped, unless iterations wait for overdue groups. All other groups continue in the next
        iteration.
        """
        finished = [group for group in working if group.is_complete][: self.prompts]
        self.cut_groups = [
            group for group in working if group not in finished and (self.waits or group.cuts < self.cuts)
        ]
        for group in self.cut_groups:
            group.cuts += 1
        self.cut_groups.sort(key=lambda group: (-group.cuts, group.prompt))
        return finished
