"""lengths: what costs need to know of rows that are computed together, in sums over them.

Invariant: numbers may be fractions: what stands for a mean, or for a part of rows that are like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """Tokens of the prompts (each row its own), of the responses, and squares of the whole lengths, for attention. A
    token that another row has too, after the same beginning, is computed once: so many of the prompts' and of the
    responses' tokens are `alike_prompt` and `alike_response`; `twins` rows are another's equals."""

    count: float
    prompt: float
    response: float
    squares: float
    longest: float
    alike_prompt: float = 0.0
    alike_response: float = 0.0
    twins: float = 0.0

    @property
    def tokens(self) -> float:
        return self.prompt + self.response

    @property
    def fed(self) -> float:
        """Tokens that are computed where each is once: all that differ but the last of a row, which predicts
        nothing."""
        return max(self.tokens - self.alike_prompt - self.alike_response - (self.count - self.twins), 0.0)

    @classmethod
    def alike(cls, count: float, prompt: float, response: float, samples: float = 1) -> Rows:
        """`count` rows, all of one length, `samples` of each prompt."""
        return cls(
            count,
            count * prompt,
            count * response,
            count * (prompt + response) ** 2,
            prompt + response,
            alike_prompt=count * prompt * (1 - 1 / samples),
        )

    @classmethod
    def of(cls, lengths: Iterable[tuple[float, float]]) -> Rows:
        """Rows of (prompt, response) tokens."""
        found = list(lengths)
        prompt, response = (sum(x[i] for x in found) for i in (0, 1))
        return cls(
            len(found), prompt, response, sum((p + r) ** 2 for p, r in found), max((p + r for p, r in found), default=0)
        )

    def part(self, share: float) -> Rows:
        """A share of these rows, that are like the rest: whole prompts."""
        found = (
            self.count,
            self.prompt,
            self.response,
            self.squares,
            self.alike_prompt,
            self.alike_response,
            self.twins,
        )
        count, prompt, response, squares, *alike = (x * share for x in found)
        return Rows(count, prompt, response, squares, self.longest, *alike)

    def drawn(self, share: float, samples: float) -> Rows:
        """A share of these rows, drawn whatever prompt they answer, `samples` the same one: most prompts still have
        some. How many of a prompt's responses differ, and the tokens of these, are taken to grow as a power of how many
        responses there are."""
        if samples <= 1 or not self.count:
            return self.part(share)
        part = self.part(share)
        left = max(1.0, share * samples)

        def alike(whole: float, same: float) -> float:
            differ = max(whole - same, whole / samples)
            return share * whole * (1 - left ** math.log(differ / whole, samples)) if whole else 0.0

        prompts = (self.prompt - self.alike_prompt) * (1 - (1 - share) ** samples)
        return replace(
            part,
            alike_prompt=max(part.prompt - prompts, 0.0),
            alike_response=alike(self.response, self.alike_response),
            twins=alike(self.count, self.twins),
        )
