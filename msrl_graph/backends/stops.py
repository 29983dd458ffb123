"""Stop strings: whether the text of a response holds one of them.

Invariant: the answer is that of the text of all tokens, special tokens too, however the string and its characters fall
on tokens. Each new token costs the decoding of a tail as long as the longest string, not of the response.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Characters at the beginning of a tail that may not be those of the whole text: a character whose first bytes are cut
# off (at most three pieces), a blank that decoders take off the first token.
BLURRED = 4


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

    def __call__(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Of rows of tokens [rows, tokens], which hold none before their last token: which hold one now."""
        import numpy as np

        found = np.zeros(len(rows), bool)
        open, width = np.arange(len(rows)), self.longest + BLURRED
        while len(open):
            texts = self._texts(rows[open, -width:])
            hit = np.array([any(s in t for s in self.strings) for t in texts])
            found[open[hit]] = True
            short = np.array([len(t) < self.longest + BLURRED for t in texts])
            open = open[~hit & short] if width < rows.shape[1] else open[:0]  # tokens without a text of their own
            width *= 2
        return found

    def _texts(self, rows: NDArray[np.int32]) -> list[str]:
        texts: list[str] = self.tokenizer.decode_batch(rows.tolist(), skip_special_tokens=False)
        return texts
