"""The order in which the rows of a data file are dealt.

Invariant: which row is at a position is a function of the stream and the arguments, so that any part of an order can be
had without those before it, in any order, by any process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...noise import RandomStream
from .columns import Array


def shuffled(stream: RandomStream, size: int, position: int, count: int) -> Array:
    """`count` rows from `position` on of an endless sequence of passes over `size` rows, each pass in an order of its
    own."""
    return _passes(lambda turn: _sorted(stream.keys(turn, np.arange(size))), size, position, count)


def drawn(stream: RandomStream, iteration: int, weights: Array, position: int, count: int) -> Array:
    """`count` rows of an iteration's draw, from `position` on: rows of the data by weight, without replacement.

    Each next row is one of those left, with the probability of its weight among theirs; with the weights [2, 1, 0]
    row 0 comes first in two draws of three. Rows of weight 0 come last, in an order of the stream; where all weights
    are 0, all rows are alike. When all rows were drawn, another draw of all follows. `weights` has one number a row,
    finite and not negative. (Efraimidis and Spirakis 2006: the rows in the order of u^(1/w) for random u, here as
    log(-log u) - log w.)
    """
    certain = weights > 0
    log = np.log(np.where(certain, weights, 1.0))

    def order(turn: int) -> Array:
        u = stream.uniform(iteration, turn, np.arange(len(weights)))
        with np.errstate(divide="ignore"):
            key = np.log(-np.log1p(-u)) - log
        found: Array = np.lexsort((key, ~certain))
        return found

    return _passes(order, len(weights), position, count)


def _sorted(keys: Array) -> Array:
    order: Array = np.argsort(keys, kind="stable")
    return order


def _passes(order: Callable[[int], Array], size: int, position: int, count: int) -> Array:
    positions = np.arange(position, position + count)
    turns = positions // size
    return np.concatenate(
        [np.zeros(0, np.int64), *(order(int(t))[positions[turns == t] % size] for t in np.unique(turns))]
    )
