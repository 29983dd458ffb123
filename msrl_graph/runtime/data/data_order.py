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


class RowOrder:
    """The rows at all positions: each pass over the data has its own random order.

    The order of the last pass is kept, since computing it for millions of rows takes a second.
    """

    def __init__(self, stream: RandomStream, size: int) -> None:
        self.stream = stream
        self.size = size
        self._kept: tuple[int, Array] = (-1, np.zeros(0, np.int64))

    def take(self, position: int, count: int) -> Array:
        """Return the rows at `count` positions, from `position` on."""
        return _take_passes(self._order, self.size, position, count)

    def _order(self, turn: int) -> Array:
        if self._kept[0] != turn:
            self._kept = (turn, np.argsort(self.stream.keys(turn, np.arange(self.size)), kind="stable"))
        return self._kept[1]


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


def _take_passes(order: Callable[[int], Array], size: int, position: int, count: int) -> Array:
    positions = np.arange(position, position + count)
    turns = positions // size
    return np.concatenate(
        [np.zeros(0, np.int64), *(order(int(turn))[positions[turns == turn] % size] for turn in np.unique(turns))]
    )
