"""Search for stop strings in the text of responses.

Invariant: the result equals the result of a search in the text of all tokens, special tokens included. The result does
not depend on how a stop string and its characters are split into tokens. For each new token, only the last tokens of
the response are decoded. Usually the number of these tokens is a little larger than the number of bytes of the longest
stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Characters at the beginning of a decoded tail that may differ from the whole text: a character whose first bytes are
# cut off (at most three pieces), and a blank that decoders strip from the first token.
BLURRED = 4


def join_response(prompt: NDArray[np.int32], count: int, drawn: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the last `count` tokens of a prompt, followed by the drawn tokens."""
    import numpy as np

    return np.concatenate([prompt[len(prompt) - count :], drawn]) if count else drawn


@lru_cache(maxsize=64)
def load_stops(folder: str, strings: tuple[str, ...]) -> Stops | None:
    """Return a search for `strings` in the text of tokens; None without strings.

    The tokenizer in `folder` decodes the tokens. The search is cached, so that repeated calls do not read the tokenizer
    again.
    """
    return Stops(folder, strings) if strings else None


class Stops:
    """A search for `strings` in the text of tokens.

    The tokenizer in `folder` (a model's folder) decodes the tokens.
    """

    def __init__(self, folder: str, strings: tuple[str, ...]) -> None:
        from tokenizers import Tokenizer

        self.tokenizer: Any = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.strings = strings
        # In bytes: a token has at least one byte, except most special tokens.
        self.longest = max(len(string.encode()) for string in strings)

    def __call__(self, rows: Sequence[NDArray[np.int32]]) -> NDArray[np.bool_]:
        """Return, for each row of tokens, whether its text contains one of the strings.

        Only the end of each row is searched. So the caller must call this function after each new token of a row, until
        a string is found.
        """
        import numpy as np

        matches = np.zeros(len(rows), bool)
        unresolved = [*range(len(rows))]
        width = self.longest + BLURRED
        while unresolved:
            tails = [rows[i][-width:].tolist() for i in unresolved]
            texts: list[str] = self.tokenizer.decode_batch(tails, skip_special_tokens=False)
            matches[unresolved] = [any(string in text for string in self.strings) for text in texts]
            short = [i for i, text in zip(unresolved, texts, strict=True) if len(text) < self.longest + BLURRED]
            # Some tokens have no text: repeat with a longer tail where the decoded text is too short.
            unresolved = [i for i in short if not matches[i] and len(rows[i]) > width]
            width *= 2
        return matches
