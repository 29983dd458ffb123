"""lengths: what costs need to know of rows that are computed together, as sums.

Invariant: numbers may be fractions: they may be a mean, or a share of similar rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """Token counts of the prompts (one per row) and responses of some rows.

    `squares` are the squared lengths of whole rows, for attention. A token that another row also has, after the same
    beginning, is computed once: `alike_prompt` and `alike_response` are the numbers of such tokens, and `twins` the
    rows that equal another one.
    """

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
        """The tokens that are computed if each is computed once.

        The last token of a row is not: it predicts nothing.
        """
        return max(self.tokens - self.alike_prompt - self.alike_response - (self.count - self.twins), 0.0)

    @classmethod
    def equal_rows(cls, count: float, prompt: float, response: float, samples: float = 1) -> Rows:
        """Return `count` rows of one length, `samples` of each prompt."""
        return cls(
            count,
            count * prompt,
            count * response,
            count * (prompt + response) ** 2,
            prompt + response,
            alike_prompt=count * prompt * (1 - 1 / samples),
        )

    @classmethod
    def from_lengths(cls, lengths: Iterable[tuple[float, float]]) -> Rows:
        """Return the sums of rows with (prompt, response) tokens."""
        pairs = list(lengths)
        prompt, response = (sum(pair[i] for pair in pairs) for i in (0, 1))
        return cls(
            len(pairs),
            prompt,
            response,
            sum((prompt_tokens + response_tokens) ** 2 for prompt_tokens, response_tokens in pairs),
            max((prompt_tokens + response_tokens for prompt_tokens, response_tokens in pairs), default=0),
        )

    def take_share(self, share: float) -> Rows:
        """Return a share of these rows, by whole prompts; the rows are like the rest."""
        sums = (
            self.count,
            self.prompt,
            self.response,
            self.squares,
            self.alike_prompt,
            self.alike_response,
            self.twins,
        )
        count, prompt, response, squares, *alike = (number * share for number in sums)
        return Rows(count, prompt, response, squares, self.longest, *alike)

    def sample(self, share: float, samples: float) -> Rows:
        """Return a random share of these rows, which have `samples` rows per prompt.

        Most prompts keep some of their rows. The number of different responses to a prompt, and of their tokens, is
        assumed to grow as a power of the number of responses.
        """
        if samples <= 1 or not self.count:
            return self.take_share(share)
        part = self.take_share(share)
        kept_samples = max(1.0, share * samples)

        def alike(count: float, same: float) -> float:
            differ = max(count - same, count / samples)
            return share * count * (1 - kept_samples ** math.log(differ / count, samples)) if count else 0.0

        prompts = (self.prompt - self.alike_prompt) * (1 - (1 - share) ** samples)
        return replace(
            part,
            alike_prompt=max(part.prompt - prompts, 0.0),
            alike_response=alike(self.response, self.alike_response),
            twins=alike(self.count, self.twins),
        )
