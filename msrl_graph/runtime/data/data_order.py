"""The order in which the rows of a data file are used.

Invariant: the row at a position is a function of the stream and the arguments. Any process can compute any part of
an order without the parts before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...noise import RandomStream
from .columns import Array


def shuffle_rows(stream: RandomStream, size: int, position: int, count: int) -> Array:
    """Return `count` rows from `position` on, of endless passes over the data.

    Each pass over the `size` rows has an order of its own.
    """
    return _take_passes(lambda turn: _argsort(stream.keys(turn, np.arange(size))), size, position, count)


def draw_rows(stream: RandomStream, iteration: int, weights: Array, position: int, count: int) -> Array:
    """Draw `count` rows of an iteration by weight, from `position` on.

    The draw is without replacement: each next row is one of the remaining rows, with the probability of its weight
    among theirs. With weights [2, 1, 0] row 0 comes first in two draws of three. Rows of weight 0 come last, in an
    order that the stream gives; if all weights are 0, all rows are treated alike. When all rows were drawn, the
    next draw of all rows begins. `weights` has one number per row, finite and not negative.

    Source: Efraimidis and Spirakis 2006, the rows in the order of u^(1/w) for random u, here as log(-log u) - log
    w.
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
