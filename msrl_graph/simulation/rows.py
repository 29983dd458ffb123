"""Random numbers of a simulation: lengths of rows, slowness of devices.

Invariant: a random number is a function of its key (seed, purpose, iteration, row) and of nothing else. It depends
neither on the plan's placements nor on the order of calls.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis.sequences import bound
from ..cost import holdings
from ..ir.plan import Plan
from .assumptions import Distribution, RecordedLengths, Specs

_MASK = (1 << 64) - 1


def _mix(bits: int) -> int:
    """Mix 64 bits with the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def key(*parts: int) -> int:
    """Hash the parts of a random number's key to 64 random bits."""
    state = 0
    for part in parts:
        state = _mix((state + 0x9E3779B97F4A7C15 & _MASK) ^ _mix(part + 0x9E3779B97F4A7C15 & _MASK))
    return state


def keys(prefix: Sequence[int], numbers: range) -> list[int]:
    """Return 64 random bits for each number in `numbers`.

    The key from which a number's bits are computed is `prefix` followed by the number.
    """
    state = key(*prefix) + 0x9E3779B97F4A7C15 & _MASK
    return [_mix(state ^ _mix(number + 0x9E3779B97F4A7C15 & _MASK)) for number in numbers]


def stream_key(seed: int, purpose: str, name: str) -> int:
    """Return the key of a random stream.

    The key is the same as in `noise.RandomStream`, but this function does not import NumPy.
    """
    digest = hashlib.blake2b(f"{purpose}\0{name}".encode(), digest_size=8).digest()
    return key(seed, int.from_bytes(digest, "little"))


def to_unit_interval(bits: int) -> float:
    """Map 64 random bits to a number in (0, 1)."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def name_number(name: str) -> int:
    """Return the number that represents a name in the key of a random number."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class RowSampler:
    """The random numbers of a simulation.

    The random numbers are the lengths of rows, the slowness of devices, the seconds of functions, and the units of
    mini-batches.
    """

    plan: Plan
    specs: Specs

    def tokens(self, column: str, iteration: int) -> list[int]:
        """Return the number of tokens of each row of a column in an iteration.

        If the user states no lengths for the column, each row has the greatest length that the column allows.
        """
        graph = self.plan.graph
        rows = graph.rows[graph.column(column).level]
        writer = graph.writer(column)
        most = holdings.written_tokens(self.plan, writer.name) if writer.verb == "generate" else bound(graph, column)
        source = self.specs.lengths.get(column)
        match source:
            case None:
                return [most] * rows
            case RecordedLengths():
                lengths = (source.length_of(iteration, row, rows) for row in range(rows))
            case Distribution():
                lengths = (
                    source.value_at(to_unit_interval(bits))
                    for bits in keys((self.specs.seed, name_number(column), iteration), range(rows))
                )
        return [min(most, max(1, round(length))) for length in lengths]

    def slowness(self, device: int) -> float:
        """Return how many times slower than planned a device computes."""
        stragglers = self.specs.stragglers
        return (
            stragglers.factor
            if stragglers.share
            and to_unit_interval(key(self.specs.seed, name_number("stragglers"), device)) < stragglers.share
            else 1.0
        )

    def seconds(self, node: str, iteration: int, rows: int) -> list[float]:
        """Return the seconds that a function takes for each row."""
        distribution = self.specs.functions.get(node)
        if distribution is None:
            return [0.0] * rows
        return [
            max(0.0, distribution.value_at(to_unit_interval(bits)))
            for bits in keys((self.specs.seed, name_number(node), iteration), range(rows))
        ]

    def mini_batches(self, node: str, iteration: int, epoch: int, units: int, size: int) -> list[list[int]]:
        """Return the units of each mini-batch of an update.

        The units of a mini-batch are in ascending order. `size` is the number of units per mini-batch.
        """
        drawn = keys((stream_key(self.specs.seed, "mini_batch", node), iteration, epoch), range(units))
        order = [unit for _, unit in sorted(zip(drawn, range(units), strict=True))]
        return [sorted(order[begin : begin + size]) for begin in range(0, units, size)]
