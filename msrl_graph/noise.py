"""Random numbers that no layout changes: functions of their stream and key only.

Invariant: every user of random numbers in a run has its own stream, `RandomStream(seed, purpose, *names)`. A number
depends on the stream and on the parts of its key, and on nothing else: not on the batch of a row, its place there, the
rank or the order of calls. This module is the only place that makes keys. The purposes, with the names of a stream and
the parts of its keys (`task` is "train" or an evaluation's name):

    purpose     stream        key                                 used for
    token       node, task    iteration, row; then step           the tokens that a generation draws, a judge's too
    function    node, task    iteration, row or group             `rng` of functions, environments and agents
    episode     node, task    iteration, row                      the seed of gymnasium's `reset`
    loss        node          iteration, epoch, first row         `rng` of loss terms
    mini_batch  node          iteration, epoch, row               the rows of each optimizer step
    order       data          pass, row of the data               the order of a data file
    weighted    data          iteration, pass, row of the data    a source that draws by `weights`
    probe       edge          prompt, position                    the prompts that prove a delivery of weights
    digest      -             dim, index                          the digests of weights, the same in all runs

A response that is cut and resumed in a later iteration has the key of the row that it began as.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# The version of all streams. Another version draws other numbers from the same seed, so a run that is resumed with it
# differs from an uninterrupted run: checkpoints store it.
VERSION = 2

Purpose = Literal["token", "function", "episode", "loss", "mini_batch", "order", "weighted", "probe", "digest"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RandomStream:
    """The random numbers of one user."""

    def __init__(self, seed: int, purpose: Purpose, *names: str) -> None:
        self.name = (seed, purpose, *names)
        digest = hashlib.blake2b("\0".join((purpose, *names)).encode(), digest_size=8).digest()
        self.key = _keys(seed, int.from_bytes(digest, "little"))

    def keys(self, *parts: Any) -> NDArray[np.uint64]:
        """Return 64 random bits for each element of the broadcast integer arrays `parts`."""
        return _keys(self.key, *parts)

    def uniform(self, *parts: Any) -> NDArray[np.float64]:
        """Return a float in [0, 1) for each element of the broadcast arrays `parts`."""
        return _floats(self.keys(*parts))

    def generator(self, *parts: int) -> np.random.Generator:
        """Return a numpy generator, keyed by the parts."""
        return np.random.Generator(np.random.Philox(key=int(self.keys(*parts))))


def uniform(keys: NDArray[np.uint64], steps: Any) -> NDArray[np.float64]:
    """Return a float in [0, 1) for a step of each of a stream's keys, broadcast."""
    return _floats(_keys(keys, steps))


def _floats(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _keys(*parts: Any) -> NDArray[np.uint64]:
    """Hash integers in their order into a key."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for part in parts:
            state = _mix((state + _GOLDEN) ^ _mix(np.asarray(part).astype(np.uint64) + _GOLDEN))
    return np.asarray(state)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of a key with the finaliser of SplitMix64.

    It is a bijection whose output bits each depend on every input bit (Steele, Lea, Flood 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
