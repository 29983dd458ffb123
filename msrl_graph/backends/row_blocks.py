"""Blocks of rows: attention of rows of different lengths, with little padding.

Rows are sorted by length. A block is some of these rows, padded to the longest of them. Fewer blocks need fewer
operators, more blocks have less padding.

Invariant: the tokens of all blocks, with padding, are at most FEW or the bound of `bound_row_tokens`, whichever is
larger. Each of the `cp` ranks of a ring has every cp-th token of each row: at most a cp-th of the bound, and one token
a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PADDING = 8  # one token of padding for this number of tokens of rows
# Tokens that are computed in one block, however long its rows are: operators for more blocks would take longer.
FEW = 2048


def bound_row_tokens(tokens: int) -> int:
    """Return the most tokens in blocks of rows, with padding.

    The lengths of the rows sum to `tokens`. Up to FEW tokens are in one block, whatever its padding.
    """
    return tokens + tokens // PADDING


def divide_rows(lengths: NDArray[np.int64]) -> list[slice]:
    """Divide rows into the fewest blocks whose tokens are within the bound.

    Of these, the blocks have the least padding. `lengths` rise, and the result is a slice of them for each block.
    """
    import numpy as np

    bound = max(bound_row_tokens(int(lengths.sum())), FEW)
    if len(lengths) * int(lengths[-1]) <= bound:
        return [slice(0, len(lengths))]
    # The number of distinct lengths is at most the square root of twice the tokens.
    widths, firsts = np.unique(lengths, return_index=True)
    ends = np.append(firsts[1:], len(lengths))
    # sizes[i, j]: the tokens of a block of the i-th to the j-th length.
    sizes = np.where(firsts[:, None] < ends, widths * (ends - firsts[:, None]), np.inf)
    fewest = sizes[0]  # the fewest tokens of the first lengths, for each number of lengths
    last_blocks = []
    while fewest[-1] > bound:
        options = fewest[:-1, None] + sizes[1:]
        last_blocks.append(options.argmin(0) + 1)
        fewest = options.min(0)
    blocks = []
    length = stop = len(widths)
    for begins in reversed(last_blocks):
        length = int(begins[stop - 1])
        blocks.append(slice(int(firsts[length]), int(ends[stop - 1])))
        stop = length
    return [slice(0, int(ends[stop - 1])), *reversed(blocks)]
