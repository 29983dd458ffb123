"""Random numbers that depend only on a stream and a key, not on the layout.

Invariant: each use of random numbers in a run has a stream of its own, `RandomStream(seed, purpose, *names)`. A random
number depends only on its stream and on its key, which is a tuple of integers. It does not depend on the batch of a
row, the position of the row in the batch, the rank or the order of calls. This module is the only place that makes
keys.

The table shows each purpose, the names of its streams and the integers of its keys. In the table, `task` is "train" or
the name of an evaluation, and `step` is the position of the drawn token in its row:

    purpose     stream        key                                 used for
    token       node, task    iteration, row; then step           the tokens that a generation or a judge draws
    function    node, task    iteration, row or group             `rng` of functions, environments and agents
    episode     node, task    iteration, row                      the seed of gymnasium's `reset`
    loss        node          iteration, epoch, first row         `rng` of loss terms
    mini_batch  node          iteration, epoch, row               the rows of each optimizer step
    order       data          pass, row of the data               the order of a data file
    weighted    data          iteration, pass, row of the data    a source that draws by `weights`
    adapter     weight        -                                   the first values of a LoRA adapter
    dropout     node          step; then position, token          the tokens in masks of an adapter's dropout
    dropout     weight        input                               the inputs in these masks
    probe       edge          prompt, position                    the prompts that test whether weights arrived
    digest      -             dim, index                          the digests of weights, the same in all runs

A response that is cut and resumed in a later iteration still has the key of the iteration and row in which it began.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# The version of all streams. With another version, the same seed gives other numbers, and a resumed run would differ
# from an uninterrupted run. For this reason checkpoints store the version.
VERSION = 2

Purpose = Literal[
    "token",
    "function",
    "episode",
    "loss",
    "mini_batch",
    "order",
    "weighted",
    "adapter",
    "dropout",
    "mixture",
    "probe",
    "digest",
]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RandomStream:
    """A stream of random numbers for one purpose, such as the tokens of one node."""

    def __init__(self, seed: int, purpose: Purpose, *names: str) -> None:
        self.name = (seed, purpose, *names)
        digest = hashlib.blake2b("\0".join((purpose, *names)).encode(), digest_size=8).digest()
        self.key = _keys(seed, int.from_bytes(digest, "little"))

    def keys(self, *parts: Any) -> NDArray[np.uint64]:
        """Return 64 random bits for each key; `parts` are arrays of the keys' integers.

        The arrays are broadcast against each other. The elements at one position of all arrays form one key.
        """
        return _keys(self.key, *parts)

    def uniform(self, *parts: Any) -> NDArray[np.float64]:
        """Return a float in [0, 1) for each key; `parts` are arrays of the keys' integers.

        The arrays are broadcast against each other, as in `keys`.
        """
        return _floats(self.keys(*parts))

    def generator(self, *parts: int) -> np.random.Generator:
        """Return a numpy generator with a seed from this stream and the key `parts`."""
        return np.random.Generator(np.random.Philox(key=int(self.keys(*parts))))


def uniform(keys: NDArray[np.uint64], steps: Any) -> NDArray[np.float64]:
    """Return a float in [0, 1) for each pair of a key and a step.

    `keys` are results of `RandomStream.keys`. The arrays `keys` and `steps` are broadcast against each other.
    """
    return _floats(_keys(keys, steps))


def prefix_keys(key: int, parts: Any, lengths: Any) -> NDArray[np.uint64]:
    """Return 64 random bits for each prefix of some sequences of integers.

    `parts` are the integers of all sequences, one sequence after the other, and `lengths` their numbers. The bits of a
    prefix depend only on `key` and on the integers of the prefix. They are a hash of the sum of the hashes of these
    integers with their positions. So all prefixes are computed at once, as no chain of hashes could be.
    """
    ends = np.cumsum(lengths)
    positions = np.arange(len(parts)) - np.repeat(ends - lengths, lengths)
    sums = np.cumsum(_keys(key, positions, parts))
    before = np.append(np.uint64(0), sums)[ends - lengths]  # of the sequences before
    return _keys(key, sums - np.repeat(before, lengths))


def _floats(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _keys(*parts: Any) -> NDArray[np.uint64]:
    """Hash integers, in the given order, into 64 bits."""
    with np.errstate(over="ignore"):
        state = np.zeros((), np.uint64)
        for part in parts:
            state = _mix((state + _GOLDEN) ^ _mix(np.asarray(part).astype(np.uint64) + _GOLDEN))
    return np.asarray(state)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of a key with the finalizer of SplitMix64.

    The finalizer is a bijection. Each of its output bits depends on every input bit (Steele, Lea, Flood 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
