"""Stop strings: whether the text of a response holds one of them.

Invariant: the answer is that of the text of all tokens, special tokens too, however the string and its characters fall
on tokens. Each new token costs the decoding of a tail as long as the longest string, not of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Characters at the beginning of a tail that may not be those of the whole text: a character whose first bytes are cut
# off (at most three pieces), a blank that decoders take off the first token.
BLURRED = 4


def joined(prompt: NDArray[np.int32], count: int, drawn: NDArray[np.int32]) -> NDArray[np.int32]:
    """What is looked at of a response: what is drawn, after so many tokens at the end of its prompt."""
    import numpy as np

    return np.concatenate([prompt[len(prompt) - count :], drawn]) if count else drawn


@lru_cache(maxsize=64)
def looks_for(folder: str, strings: tuple[str, ...]) -> Stops:
    """What looks for these strings; a tokenizer is read once."""
    return Stops(folder, strings)


class Stops:
    """Looks for `strings` in what the tokenizer of a model's folder makes of tokens."""

    def __init__(self, folder: str, strings: tuple[str, ...]) -> None:
        from tokenizers import Tokenizer

        self.tokenizer: Any = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.strings = strings
        self.longest = max(
            len(s.encode()) for s in strings
        )  # in bytes: a token has at least one, most special ones aside

    def __call__(self, rows: Sequence[NDArray[np.int32]]) -> NDArray[np.bool_]:
        """Of rows of tokens, which hold none before their last token: which hold one now."""
        import numpy as np

        found = np.zeros(len(rows), bool)
        open, width = [*range(len(rows))], self.longest + BLURRED
        while open:
            tails = [rows[i][-width:].tolist() for i in open]
            texts: list[str] = self.tokenizer.decode_batch(tails, skip_special_tokens=False)
            found[open] = [any(s in t for s in self.strings) for t in texts]
            short = [i for i, t in zip(open, texts, strict=True) if len(t) < self.longest + BLURRED]
            # Tokens without a text of their own.
            open = [i for i in short if not found[i] and len(rows[i]) > width]
            width *= 2
        return found
