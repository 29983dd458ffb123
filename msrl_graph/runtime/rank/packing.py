"""Rows from the dock, prepared as a model's input and as tensors for loss terms.

Invariant: token ids and the values of columns are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...analysis.sequences import begins_columns, drawn_name, sequences, temperature_states
from ...backends.engine_protocols import Outputs
from ...ir import graph as ir
from ...ir.graph import Graph, Node
from ..data import numerics
from ..data.columns import DTYPES, Array, ColumnData, offsets_from_lengths
from ..dock.messages import Batch


@dataclass(frozen=True)
class PreparedBatch:
    """The rows of a batch as a model reads them.

    - `contexts`: the token columns that come first in a sequence. `scored`: by name, the columns for whose tokens the
      model computes log-probabilities or values. `columns`: by name, the other columns that the node reads.
    - `masks`: for each scored column, its mask, if it has one. Tokens whose mask is false are context only: `lengths`
      does not count them, and columns with one value per token contain only the values of the remaining tokens.
    - `lengths`: for each scored column, the number of tokens of each row.
    - `has_unknown_tokens`: for each row, whether the row has a token that the model does not know.
    - `begins`: for each scored column whose rows consist of several conversations, true at the first token of each
      conversation.
    """

    contexts: list[ColumnData]
    scored: dict[str, ColumnData]
    masks: dict[str, ColumnData]
    columns: dict[str, ColumnData]
    lengths: dict[str, Array]
    has_unknown_tokens: Array
    begins: Mapping[str, ColumnData] = field(default_factory=dict)

    @property
    def size(self) -> Array:
        """The number of context tokens and scored tokens of each row, masked or not."""
        total: Array = np.sum([column.lengths for column in (*self.contexts, *self.scored.values())], axis=0)
        return total

    def split(self, rows: Array, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Divide the output of a forward pass into one tensor for each scored column.

        A scored column is a column for whose tokens the model computes outputs. `rows` are the positions of the rows of
        the pass. `values` is the output of the pass. It has the values for all tokens of the first scored column, then
        for the tokens of the next one.
        """
        return dict(
            zip(
                self.lengths,
                torch.split(values, [int(counts[rows].sum()) for counts in self.lengths.values()]),
                strict=True,
            )
        )


def prepare_batch(graph: Graph, node: Node, batch: Batch, vocabulary: int, like: dict[str, str]) -> PreparedBatch:
    """Prepare a batch for a node's model, whose vocabulary has `vocabulary` tokens.

    `like` has an entry for each column that the program does not declare: the name of a column with the same lengths.
    """
    roles = sequences(graph, node)
    declared = {column.name: column for column in graph.columns}
    like = like | {name: column.dims[0].like for name, column in declared.items() if column.dims}
    # A group without rows also has no columns.
    columns = {name: _empty(declared[name]) for name in node.reads if name in declared}
    states = (*node.states, *map(drawn_name, temperature_states(graph, node)))
    columns |= {state: ColumnData(np.zeros(0)) for state in states} | batch.columns
    names = [*roles.context, *roles.scored]
    tokens, strange = numerics.clip_tokens([columns.pop(name) for name in names], vocabulary)
    token_columns = dict(zip(names, tokens, strict=True))
    conversation_starts = {
        scored_name: columns.pop(name, None) for scored_name, name in begins_columns(graph, node).items()
    }
    # A group without rows has no such columns.
    begins = {scored_name: column for scored_name, column in conversation_starts.items() if column is not None}
    masks: dict[str, ColumnData] = {}
    for name in [
        column
        for column in columns
        if column in declared and declared[column].element == "bool" and like.get(column) in roles.scored
    ]:
        mask = columns.pop(name)
        other = masks.get(like[name])
        masks[like[name]] = mask if other is None else replace(mask, values=mask.values & other.values)
    columns = {name: apply_mask(column, masks.get(like.get(name, ""))) for name, column in columns.items()}
    lengths = {name: apply_mask(token_columns[name], masks.get(name)).lengths for name in roles.scored}
    contexts = [token_columns[name] for name in roles.context]
    scored = {name: token_columns[name] for name in roles.scored}
    return PreparedBatch(contexts, scored, masks, columns, lengths, strange, begins)


def _empty(column: ir.Column) -> ColumnData:
    values: Array = np.zeros((0, *(dim.size for dim in column.dims[1:])), DTYPES[column.element])
    return ColumnData(
        values, offsets_from_lengths(np.zeros(0, np.int64)) if column.dims or column.element == "text" else None
    )


def apply_mask(column: ColumnData, mask: ColumnData | None) -> ColumnData:
    """Return those elements of a column for which the mask is true."""
    if mask is None:
        return column
    row = np.repeat(np.arange(len(column)), column.lengths)
    return ColumnData(
        column.values[mask.values], offsets_from_lengths(np.bincount(row[mask.values], minlength=len(column)))
    )


def flatten_column(column: ColumnData, rows: Array, lengths: Array | None = None) -> torch.Tensor:
    """Return the values of a column at the row positions `rows`, as one tensor.

    Floats are converted to float32, and token ids to int64. A ragged column has one value (or one vector of values) per
    token. A scalar column has one value per row; if `lengths` is given, each value is repeated `lengths[i]` times, once
    for each token of row i.
    """
    selected = column.take(rows)
    values = selected.values if selected.offsets is not None or lengths is None else np.repeat(selected.values, lengths)
    return torch.from_numpy(values.astype(np.int64 if values.dtype.kind == "i" else np.float32, copy=False))


def count_distinct(rows: Sequence[Array], groups: Array) -> tuple[int, int]:
    """Return the number of distinct prefixes of rows, and the number of distinct rows.

    `groups` has the group of each row, for example the number of the prompt. Rows are compared only within their group,
    and the numbers of all groups are added. If rows share the computation of common prefixes, the number of distinct
    prefixes is the number of tokens to compute.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max(initial=0)) + 1), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    base = int(tokens.max(initial=0)) + 1
    live = np.arange(len(rows))
    parent = np.unique(groups, return_inverse=True)[1]
    beginnings = ended = 0
    for column in range(tokens.shape[1]):
        ending = lengths[live] == column
        ended += len(np.unique(parent[ending]))
        live = live[~ending]
        parent = parent[~ending]
        if len(np.unique(parent)) == len(live):  # the remaining rows are all different
            return beginnings + int((lengths[live] - column).sum()), ended + len(live)
        _, parent = np.unique(parent * base + tokens[live, column], return_inverse=True)
        beginnings += int(parent.max(initial=-1)) + 1
    return beginnings, ended


def scored_column(column: ir.Column, seen: PreparedBatch) -> str:
    """Return the scored column to whose tokens the values of a column belong.

    A scored column is a column for whose tokens the model computes log-probabilities or values. The result may be the
    column itself. It is "" if the column has one value per row.
    """
    return column.name if column.name in seen.scored else column.dims[0].like if column.dims else ""


def join_outputs(column: ir.Column, seen: PreparedBatch, micro: list[Array], outputs: list[Outputs]) -> ColumnData:
    """Join the outputs of forward passes into the data of a written or scored column.

    The rows of the result are in the order of the micro-batches.
    """
    scored = scored_column(column, seen)
    width = column.dims[1].size if len(column.dims) > 1 else 0
    parts = []
    for rows, output in zip(micro, outputs, strict=True):
        per_token = output.logp if output.values is None else output.values
        values = per_token if not width else output.ids if column.element == "i32" else output.best
        assert values is not None
        parts.append(seen.split(rows, values)[scored] if scored else values)
    joined = torch.cat(parts).cpu().numpy()
    if width:
        joined = np.ascontiguousarray(
            joined[:, :width].astype(np.int32) if column.element == "i32" else joined[:, :width]
        )
    return ColumnData(joined, offsets_from_lengths(seen.lengths[scored][np.concatenate(micro)]) if scored else None)


def select_ids(column: ir.Column, seen: PreparedBatch, rows: Array) -> torch.Tensor:
    """Return the k token ids that a column has for each scored token, as [tokens, k].

    The ids belong to the tokens of one scored column; tokens of other scored columns get zeros.
    """
    ids = flatten_column(seen.columns[column.name], rows).reshape(-1, math.prod(dim.size for dim in column.dims[1:]))
    counts = {name: int(lengths[rows].sum()) for name, lengths in seen.lengths.items()}
    return torch.cat(
        [ids if name == column.dims[0].like else ids.new_zeros(count, ids.shape[1]) for name, count in counts.items()]
    )
