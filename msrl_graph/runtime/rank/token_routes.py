"""Routes of tokens, between columns of rows and sequences of tokens.

backends/routes.py says what a route is.

Invariant: a routing column has, at each token, the route of the position before it (analysis/sequences.py). So the
routes of a sequence's columns, one column after another, are those of the sequence's positions, shifted by one: the
first token has none, and the last position is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...backends.routes import UNKNOWN
from ..data.columns import Array, ColumnData, concatenate, offsets_from_lengths

Lengths = Mapping[str, Array]  # by token column, the number of tokens in each row


@dataclass(frozen=True)
class TokenRoutes:
    """The routes of a batch's rows.

    - `contexts`, `scored`: the token columns. A sequence has all columns of `contexts` and one of `scored`
      (micro_batches.py).
    - `known`: by token column, the routing column that the node reads. The routers choose the routes of other columns.
    """

    contexts: Lengths = field(default_factory=dict)
    scored: Lengths = field(default_factory=dict)
    known: Mapping[str, ColumnData] = field(default_factory=dict)

    def pack(self, rows: Array, tokens: int) -> torch.Tensor:
        """Return the routes of a micro-batch with `tokens` ids: [tokens, layers, k]."""
        size = next(iter(self.known.values())).values.shape[1:]
        packed = np.full((tokens, *size), UNKNOWN, np.int16)
        start = 0
        for lengths in self._sequences(rows):
            fed = _count_fed(lengths)
            for i, row in enumerate(rows):
                position = start - 1  # of the column's first route
                for name, counts in lengths.items():
                    if name in self.known:
                        routes = self.known[name][row]
                        first = max(start - position, 0)  # the sequence's first token has no route
                        packed[position + first : position + counts[i]] = routes[first:]
                    position += counts[i]
                start += fed[i]
        return torch.from_numpy(packed)

    def unpack(self, parts: Sequence[tuple[Array, Array]]) -> dict[str, ColumnData]:
        """Return the routing column of each token column.

        Each of `parts` has the rows of a micro-batch, and the routes of its ids. With several scored columns, a row has
        several routes of its context, and only the scored columns are returned.
        """
        columns: dict[str, list[ColumnData]] = {}
        for rows, routes in parts:
            start = 0
            for lengths in self._sequences(rows):
                stops = start + np.cumsum(_count_fed(lengths))
                by_row = np.split(routes[start : stops[-1]], stops[:-1] - start)
                start = int(stops[-1])
                for name, data in split_routes(by_row, lengths).items():
                    if name in self.scored or len(self.scored) == 1:
                        columns.setdefault(name, []).append(data)
        return {name: concatenate(pieces) for name, pieces in columns.items()}

    def _sequences(self, rows: Array) -> list[dict[str, Array]]:
        """Return, for each scored column, the lengths of its sequences' columns."""
        contexts = {name: counts[rows] for name, counts in self.contexts.items()}
        return [contexts | {name: counts[rows]} for name, counts in self.scored.items()] if len(rows) else []


def split_routes(routes: Sequence[Array], lengths: Lengths) -> dict[str, ColumnData]:
    """Return the routing column of each token column, from routes of sequences.

    - `routes`: for each row, the routes [tokens, layers, k] of the positions of its sequence that are computed.
    - `lengths`: the token columns, in the order of a sequence.
    """
    no_route = np.full((1, *routes[0].shape[1:]), UNKNOWN, np.int16)
    stops = np.cumsum(np.stack([*lengths.values()], 1), axis=1)
    shifted = [np.concatenate([no_route, own])[: ends[-1]] for own, ends in zip(routes, stops, strict=True)]
    by_row = [np.split(own, ends[:-1]) for own, ends in zip(shifted, stops, strict=True)]
    return {
        name: ColumnData(np.concatenate([parts[i] for parts in by_row]), offsets_from_lengths(counts))
        for i, (name, counts) in enumerate(lengths.items())
    }


def _count_fed(lengths: Lengths) -> Array:
    """Return the number of positions of each sequence that are computed.

    The last token of a response predicts nothing, so it is not computed.
    """
    *contexts, scored = lengths.values()
    fed: Array = sum(contexts, np.maximum(scored - 1, 0))
    return fed
