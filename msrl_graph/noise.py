"""Sampling noise that no layout changes: a number is a function of its key alone.

Invariant: `uniform(seed, iteration, rows, step)` depends on (seed, iteration, row, step) and on nothing else: not on
the batch a row is in, its place there, the rank or the order of calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output bits each depend on every input
    bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(*parts: Any) -> NDArray[np.uint64]:
    """64 random bits for each element of the broadcast integer arrays `parts`: a keyed hash, in the order of the
    parts."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for part in parts:
            state = _mix((state + _GOLDEN) ^ _mix(np.asarray(part).astype(np.uint64) + _GOLDEN))
    return np.asarray(state)


def uniform(*parts: Any) -> NDArray[np.float64]:
    """A float in [0, 1) for each element of the broadcast integer arrays `parts`."""
    return (keys(*parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(*parts: int) -> np.random.Generator:
    """numpy's generator, keyed by the parts."""
    return np.random.Generator(np.random.Philox(key=int(keys(*parts))))
