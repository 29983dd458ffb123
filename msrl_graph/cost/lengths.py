"""Sums of token counts over the rows that are computed together.

The cost formulas need only these sums. Invariant: the numbers need not be integers, because a sum may be an average, or
may be computed as a fraction of the sum over more rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rows:
    """Token counts of a set of rows; each row has one prompt and one response.

    - `count` is the number of rows. `prompt` and `response` are the sums of prompt and response tokens over all rows.
    - `squares` is the sum of the squared lengths of the rows; attention needs this sum. The length of a row is the
      length of its prompt and response together. `longest` is the length of the longest row.
    - If several rows begin with the same tokens, these tokens are computed once. `alike_prompt` and `alike_response`
      are the numbers of prompt tokens and of response tokens that need no computation for this reason.
    - `twins` is the number of rows that equal another row.
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
        """The number of tokens to compute if equal beginnings of rows are computed once.

        The last token of a row is not computed, because no token follows it.
        """
        return max(self.tokens - self.alike_prompt - self.alike_response - (self.count - self.twins), 0.0)

    @classmethod
    def equal_rows(cls, count: float, prompt: float, response: float, samples: float = 1) -> Rows:
        """Return the sums over `count` rows of equal length.

        `prompt` and `response` are the numbers of tokens of one row. `samples` is the number of rows per prompt.
        """
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
        """Return the sums over rows, from the (prompt, response) token counts of each row."""
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
        """Return the sums over a fraction of these rows; `share` is for example 0.5.

        If a row is taken, all rows of its prompt are taken. The taken rows are assumed to have the same mean lengths as
        the other rows.
        """
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
        """Return the sums over a random fraction `share` of these rows.

        There are `samples` rows per prompt. Single rows are drawn, not whole prompts, so the result has some of the
        rows of most prompts. The number of different responses to a prompt, and the number of different tokens in these
        responses, are assumed to grow as a power of the number of responses.
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
