"""Advantage estimators: what a reward is worth beside its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import function

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@function(scope="group")
def group_norm(response: Sequence[NDArray[np.int32]], reward: NDArray[np.float32], *, std: bool = True) -> list[NDArray[np.float32]]:
    """GRPO's advantage, (s - mean) / (std + 1e-6) over a prompt's responses, given to every token (arXiv:2402.03300, section 4.1.2).

    `response` holds one array of token ids a row, `reward` one number a row. The standard deviation is the unbiased one; `std = false`
    leaves the division out (arXiv:2503.20783). A group of one, or without spread, gets 0; one with a nan gets nan. Gives one array a row,
    as long as its response.
    """
    import numpy as np

    centred = np.asarray(reward, dtype=np.float64)
    centred = centred - centred.mean()
    if len(centred) < 2 or np.all(np.abs(centred) <= 1e-12):
        centred = np.zeros_like(centred)
    elif std:
        centred = centred / (centred.std(ddof=1) + 1e-6)
    return [np.full(len(tokens), a, dtype=np.float32) for tokens, a in zip(response, centred, strict=True)]
