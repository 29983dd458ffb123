"""Micro-batches: which rows of a share a rank computes at one time.

A rank computes the rows of its data-parallel group's share in micro-batches. The engine's options limit a micro-batch
by its number of rows (`micro_batch`) or by its number of tokens (`micro_batch_tokens`).

Invariant: each row is in exactly one micro-batch, and the result depends only on the arguments. A micro-batch has at
most the stated number of tokens, or it is a single row. A run, a simulation and a plan use the same functions, so they
agree on the number of micro-batches.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.graph import Graph, Node
from ..ir.plan import MICRO_BATCH, Plan
from ..ir.workload import micro_batches, round_up_batches
from ..model.mamba import Mamba2
from ..model.recurrent_mixers import GatedDeltaNet
from ..sharding.layout import Layout
from .row_assignment import split
from .sequences import bound, conversations, sequences

# The number of prompts whose rows may fill what is left of a micro-batch.
LOOKAHEAD = 16
# Of so many micro-batches, one more is worth it if prompts are split less.
SHARING = 50
# Trials of sizes to balance micro-batches.
STEPS = 8


@dataclass(frozen=True)
class MicroBatchLimit:
    """The limit on the micro-batches of an `infer` or `update` node.

    - `rows`: the most rows of a micro-batch; 0 if there is no such limit. `tokens`: the most tokens; 0 if there is no
      such limit. Without any limit, all rows are in one micro-batch.
    - `longest`: the most tokens of a row. Each conversation of a row has its own context.
    - `multiple`: a row counts as many tokens as its length rounded up to a multiple of this number. Context parallelism
      divides a row among its ranks, and recurrent layers scan whole chunks of tokens.
    - `padded`: whether rows are padded to the longest row of their micro-batch, so that each row counts as much.
    """

    layout: Layout
    rows: int = 0
    tokens: int = 0
    longest: int = 1
    multiple: int = 1
    padded: bool = False

    @classmethod
    def of(cls, plan: Plan, node: str) -> MicroBatchLimit:
        """Return the limit that a plan's options state for a node."""
        engine = plan.placement(node).engine
        layout = plan.placement(node).layout
        mixers = [kind.mixer for kind in plan.model(node).layer_kinds]
        chunk = max((mixer.chunk for mixer in mixers if isinstance(mixer, GatedDeltaNet | Mamba2)), default=1)
        rows, tokens = map(engine.read_count, MICRO_BATCH)
        ring = layout.cp > 1 and layout.cp_kind == "ring"
        return cls(layout, rows, tokens, _find_longest(plan.graph, node), max(layout.cp, chunk), ring or chunk > 1)

    @property
    def option(self) -> str:
        """The name of the engine's option that limits the micro-batch."""
        return "micro_batch_tokens" if self.tokens else "micro_batch"

    @property
    def full_rows(self) -> int:
        """The most rows of a micro-batch if all rows have the greatest length.

        The result is 1 if there is no limit.
        """
        return self.count_rows(self.longest) if self.tokens else max(1, self.rows)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a micro-batch; 0 if tokens do not limit it."""
        return max(self.tokens, self.count_tokens(self.longest)) if self.tokens else 0

    def count_tokens(self, length: float) -> int:
        """Return the number of tokens that a row of this length counts."""
        return math.ceil(length / self.multiple) * self.multiple

    def count_rows(self, length: float) -> int:
        """Return the number of rows of this length in a micro-batch that tokens limit."""
        return max(1, self.tokens // max(1, self.count_tokens(length)))

    def pack(self, lengths: Sequence[float], prompts: Sequence[int], most_rows: int, least: int = 1) -> list[list[int]]:
        """Return the positions of the rows of each micro-batch.

        `lengths` and `prompts` have the length of each row of a share, and the number of its prompt. `most_rows` is the
        number of rows of the largest share of all data-parallel groups. There are at least `least` micro-batches; some
        may be empty.

        With a limit on rows, rows of similar length are in the same micro-batch, and all groups have the same number of
        micro-batches. With a limit on tokens, there are as few micro-batches as `pack_tokens` finds, and the number may
        differ between groups.
        """
        if not self.tokens:
            order = sorted(range(len(lengths)), key=lambda row: lengths[row])
            number = micro_batches(most_rows, self.rows or max(1, most_rows), self.layout)
            return split(order, max(number, least))
        counted = [self.count_tokens(length) for length in lengths]
        pack = pack_padded if self.padded else pack_tokens
        packed = pack(counted, prompts, self.tokens, least)
        number = round_up_batches(len(packed), self.layout)
        return packed if number == len(packed) else pack(counted, prompts, self.tokens, number)


def _find_longest(graph: Graph, node: str) -> int:
    key = ("longest row", node)
    if key not in graph.worked_out:
        graph.worked_out[key] = _add_bounds(graph, node)
    longest: int = graph.worked_out[key]
    return longest


def _add_bounds(graph: Graph, node: str) -> int:
    row = sequences(graph, graph.node(node))
    most = max((conversations(graph, name) for name in row.scored), default=1)
    context = sum(bound(graph, name) for name in row.context)
    return max(1, row.count * most * context + sum(bound(graph, name) for name in row.scored))


def group_by_prompt(graph: Graph, node: Node, rows: Sequence[int]) -> list[int]:
    """Return the number of the prompt of each of the rows numbered `rows`.

    Rows with the same prompt begin with the same tokens.
    """
    level = graph.level(node)
    context = (graph.column(name).level for name in sequences(graph, node).context)
    fan = graph.fan(level, max(context, key=graph.depth, default=0))
    return [row // fan for row in rows]


def pack_tokens(lengths: Sequence[float], prompts: Sequence[int], most: int, least: int = 1) -> list[list[int]]:
    """Pack rows into micro-batches of at most `most` tokens.

    Returns the positions of the rows of each micro-batch. A row with more tokens is alone. There are no more
    micro-batches than first-fit decreasing finds for single rows, or at most 1 in SHARING more if prompts are split
    less so. There are at least `least`. Micro-batches have similar numbers of tokens.
    """
    alone = [[row] for row, length in enumerate(lengths) if length >= most]
    others = sorted((row for row, length in enumerate(lengths) if length < most), key=lambda row: -lengths[row])
    units: dict[int, list[int]] = {}
    for row in others:
        units.setdefault(prompts[row], []).append(row)
    total = sum(lengths[row] for row in others)
    fewest = max(least - len(alone), math.ceil(total / most))

    def fit_rows(size: int) -> list[list[int]]:
        return _fit_first(lengths, others, size)

    def fit_prompts(size: int) -> list[list[int]]:
        return _fill_in_turn(lengths, [*units.values()], size)

    by_rows = max(fewest, len(fit_rows(most)))
    in_turn = max(fewest, len(fit_prompts(most)))
    for number in range(fewest, min(by_rows, in_turn) + 1):
        if (packed := _spread_prompts(lengths, [*units.values()], number, most)) is not None:
            return _sort_bins(lengths, alone + packed, least)
    shares = in_turn <= by_rows + by_rows // SHARING
    number, fit = (in_turn, fit_prompts) if shares else (by_rows, fit_rows)
    low = max(math.ceil(total / max(1, number)), max((math.ceil(lengths[row]) for row in others), default=0))
    return _sort_bins(lengths, alone + _balance(fit, low, most, number), least)


def pack_padded(lengths: Sequence[float], _prompts: Sequence[int], most: int, least: int = 1) -> list[list[int]]:
    """Pack rows into micro-batches of at most `most` tokens, with padding.

    Each row counts as many tokens as the longest row of its micro-batch. A longer row is alone. Rows of similar length
    are in the same micro-batch. There are as few micro-batches as possible, but at least `least`, and the largest is as
    small as that allows.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])

    def cut(size: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for row in order:
            if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > size:
                bins.append([])
            bins[-1].append(row)
        return bins

    number = max(len(cut(most)), least)
    size = 1 + bisect_left(range(1, most + 1), -number, key=lambda size: -len(cut(size)))
    return _sort_bins(lengths, cut(size), least)


def _fit_first(lengths: Sequence[float], rows: Sequence[int], most: int) -> list[list[int]]:
    """Put each row into the first micro-batch in which it fits."""
    leaves = 1 << max(0, len(rows) - 1).bit_length()
    room: list[float] = [most] * (2 * leaves)  # a binary tree: the most room of the micro-batches below each node
    bins: list[list[int]] = [[] for _ in rows]
    for row in rows:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < lengths[row])
        bins[node - leaves].append(row)
        room[node] -= lengths[row]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [own for own in bins if own]


def _spread_prompts(
    lengths: Sequence[float], units: Sequence[list[int]], number: int, most: int
) -> list[list[int]] | None:
    """Distribute whole prompts to `number` micro-batches, each to the smallest.

    `units` are the rows of each prompt. Returns None if a prompt does not fit, or if micro-batches remain empty that
    could have rows.
    """
    if len(units) < min(number, sum(map(len, units))):
        return None
    loads = sorted((-sum(lengths[row] for row in unit), unit) for unit in units)
    bins: list[list[int]] = [[] for _ in range(number)]
    heap = [(0.0, index) for index in range(number)]
    for weight, unit in loads:
        own, index = heap[0]
        if own - weight > most:
            return None
        bins[index] += unit
        heapq.heapreplace(heap, (own - weight, index))
    return bins


def _fill_in_turn(lengths: Sequence[float], units: Sequence[list[int]], most: int) -> list[list[int]]:
    """Fill one micro-batch after the other with rows, prompt by prompt.

    `units` are the rows of each prompt, the longest first. Of the next prompts, the longest rows that fit fill what is
    left of a micro-batch. No row is longer than `most`.
    """
    left = sorted(([*unit] for unit in units), key=lambda unit: (-sum(lengths[row] for row in unit), unit))
    bins: list[list[int]] = []
    while left:
        own: list[int] = []
        room: float = most
        seen = tried = 0  # prompts, and those of them that have rows left
        while seen < len(left) and tried < LOOKAHEAD:
            unit = left[seen]
            position = 0
            while (position := bisect_left(unit, -room, position, key=lambda row: -lengths[row])) < len(unit):
                room -= lengths[unit[position]]
                own.append(unit.pop(position))
            seen += 1
            tried += bool(unit)
        left[:seen] = filter(None, left[:seen])
        bins.append(own)
    return bins


def _balance(fit: Callable[[int], list[list[int]]], low: int, most: int, number: int) -> list[list[int]]:
    """Return at most `number` micro-batches with a small greatest number of tokens.

    `fit` packs rows into micro-batches of at most so many tokens. With `most`, there are at most `number`. With fewer
    than `low`, there are more.
    """
    best = fit(most)
    low -= 1
    high = most
    for _ in range(STEPS):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if len(packed := fit(middle)) <= number:
            best = packed
            high = middle
        else:
            low = middle
    return best


def _sort_bins(lengths: Sequence[float], bins: list[list[int]], least: int) -> list[list[int]]:
    """Return the micro-batches in descending order of their tokens.

    Empty ones are added up to `least`. Ranks that wait for each other then compute similar micro-batches at the same
    time.
    """
    ordered = sorted((sorted(own) for own in bins if own), key=lambda own: (-sum(lengths[row] for row in own), own))
    return ordered + [[] for _ in range(max(1, least) - len(ordered))]
