"""The order in which the rows of a data file are used.

The uses of rows are numbered from 0, and the number of a use is its position. After the last row of the file, the next
pass over the file begins.

Invariant: the row at a position is a function of the random stream and the arguments. Any process can compute the rows
at any range of positions without the rows before that range.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...noise import RandomStream
from .columns import Array


def shuffle_rows(stream: RandomStream, size: int, position: int, count: int) -> Array:
    """Return the rows at `count` positions, from `position` on.

    Each pass over the `size` rows of the file has its own random order.
    """
    return _take_passes(lambda turn: _argsort(stream.keys(turn, np.arange(size))), size, position, count)


def draw_rows(stream: RandomStream, iteration: int, weights: Array, position: int, count: int) -> Array:
    """Draw rows of a data file by weight; return the draws from `position` on.

    Returns `count` rows for the iteration `iteration`. Rows are drawn without replacement. The probability that a
    remaining row is drawn next is its weight, divided by the sum of the weights of all remaining rows. With the weights
    [2, 1, 0], row 0 comes first in two draws of three. Rows of weight 0 come last, in a random order; if all weights
    are 0, all rows are equally likely. After all rows were drawn, a new draw of all rows begins. `weights` has one
    number per row, finite and not negative.

    Source: Efraimidis and Spirakis 2006. The rows are sorted by u^(1/w) for random u, here by log(-log u) - log w.
    """
    certain = weights > 0
    log = np.log(np.where(certain, weights, 1.0))

    def order(turn: int) -> Array:
        u = stream.uniform(iteration, turn, np.arange(len(weights)))
        with np.errstate(divide="ignore"):
            key = np.log(-np.log1p(-u)) - log
        order_of_rows: Array = np.lexsort((key, ~certain))
        return order_of_rows

    return _take_passes(order, len(weights), position, count)


def _argsort(keys: Array) -> Array:
    order: Array = np.argsort(keys, kind="stable")
    return order


def _take_passes(order: Callable[[int], Array], size: int, position: int, count: int) -> Array:
    positions = np.arange(position, position + count)
    turns = positions // size
    return np.concatenate(
        [np.zeros(0, np.int64), *(order(int(turn))[positions[turns == turn] % size] for turn in np.unique(turns))]
    )
