"""Rows from the dock, prepared as a model's input and as tensors for loss terms.

Invariant: token ids and the values of columns are not changed. A *scored column* is a column for whose tokens the model
computes log-probabilities or values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...analysis.row_packing import MicroBatchLimit, group_by_prompt
from ...analysis.sequences import (
    begins_columns,
    drawn_name,
    routing_columns,
    scores_texts,
    sequences,
    temperature,
    temperature_name,
    temperature_states,
)
from ...backends.engine_protocols import MicroBatch, Outputs
from ...ir import graph as ir
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ..data import numerics
from ..data.columns import DTYPES, Array, ColumnData, offsets_from_lengths
from ..data.tokens import tokenise_columns
from ..dock.messages import Batch
from .micro_batches import pack
from .token_routes import TokenRoutes


@dataclass(frozen=True, eq=False)
class PreparedBatch(Sequence[MicroBatch]):
    """The rows of a batch as a node's model reads them, in micro-batches.

    It exists from when a rank has received a batch until the batch is computed. A micro-batch is made each time it is
    read, so that only one exists at a time.

    - `rows`: the numbers of the rows. `micro`: for each micro-batch, the positions of its rows in `rows`.
    - `columns`: by name, the columns that the node reads, except token columns and masks.
    - `lengths`: for each scored column, the number of tokens of each row.
    - `wrong`: for each row, whether it is known to be wrong, for example if it has a token that the model does not
      know.
    - `contexts`: the token columns that come first in a sequence. `scored`: by name, the scored columns.
    - `masks`: for each scored column, its mask, if it has one. Tokens whose mask is false are context only: `lengths`
      does not count them, and columns with one value per token contain only the values of the remaining tokens.
    - `begins`: for each scored column whose rows consist of several conversations, true at the first token of each
      conversation.
    - `temperatures`: for each scored column, the temperature at which its tokens were sampled.
    - `given`: the columns of other token ids whose log-probabilities are computed.
    - `routes`: the routes to replay.
    - `after`: whether a model reads a whole sequence before it computes a token's result (`pack`).
    """

    rows: Array
    columns: dict[str, ColumnData]
    lengths: dict[str, Array]
    wrong: Array
    micro: list[Array] = field(default_factory=list)
    contexts: list[ColumnData] = field(default_factory=list)
    scored: dict[str, ColumnData] = field(default_factory=dict)
    masks: dict[str, ColumnData] = field(default_factory=dict)
    begins: Mapping[str, ColumnData] = field(default_factory=dict)
    temperatures: Mapping[str, Expr] = field(default_factory=dict)
    given: Sequence[ir.Column] = ()
    after: bool = False
    routes: TokenRoutes = field(default_factory=TokenRoutes)

    def __len__(self) -> int:
        return len(self.micro)

    def __getitem__(self, index: int) -> MicroBatch:  # type: ignore[override]
        rows = self.micro[index]
        masks = [self.masks.get(name) for name in self.scored]
        begins = [self.begins.get(name) for name in self.scored]
        packed = pack(self.contexts, [*self.scored.values()], rows, masks, self.after, begins)
        if self.routes.known:
            packed["routes"] = self.routes.pack(rows, len(packed["ids"]))
        if self.given:
            packed["given"] = torch.cat([self._given_ids(column, rows) for column in self.given], 1)
        if self._temperatures_differ:
            temperatures = [
                np.repeat(self.row_temperatures(name, rows), counts[rows]) for name, counts in self.lengths.items()
            ]
            packed["temperature"] = torch.from_numpy(np.concatenate(temperatures))[:, None]
        return packed

    @property
    def order(self) -> Array:
        """The positions of the rows in the order of the micro-batches."""
        return np.concatenate(self.micro)

    @property
    def _temperatures_differ(self) -> bool:
        stated = {*self.temperatures.values()}
        return len(stated) > 1 or any(expr.kind != "number" for expr in stated)

    @property
    def pass_temperature(self) -> float:
        """The temperature of a forward pass; 1 if micro-batches have temperatures."""
        stated = [*self.temperatures.values()]
        return 1.0 if self._temperatures_differ or not stated else float(stated[0].literal())

    def row_temperatures(self, scored: str, rows: Array) -> Array:
        """Return the temperature at which each row of a scored column was sampled."""
        stated = self.temperatures[scored]
        if stated.kind == "number":
            return np.full(len(rows), stated.literal(), np.float32)
        return self.columns[temperature_name(stated)].values[rows].astype(np.float32)

    def find_scored(self, column: ir.Column) -> str:
        """Return the scored column to whose tokens the values of a column belong.

        The result may be the column itself. It is "" if the column has one value per row.
        """
        return column.name if column.name in self.scored else column.dims[0].like if column.dims else ""

    def split(self, rows: Array, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Divide the output of a forward pass into one tensor for each scored column.

        `rows` are the positions of the rows of the pass. `values` is the output of the pass. It has the values for all
        tokens of the first scored column, then for the tokens of the next one.
        """
        sizes = [int(counts[rows].sum()) for counts in self.lengths.values()]
        return dict(zip(self.lengths, torch.split(values, sizes), strict=True))

    def join_outputs(self, column: ir.Column, outputs: list[Outputs]) -> ColumnData:
        """Join the outputs of forward passes into the data of a written or scored column.

        The rows of the result are in the order of the micro-batches.
        """
        scored = self.find_scored(column)
        width = column.dims[1].size if len(column.dims) > 1 else 0
        parts = []
        for rows, output in zip(self.micro, outputs, strict=True):
            per_token = output.logp if output.values is None else output.values
            values = per_token if not width else output.ids if column.element == "i32" else output.best
            assert values is not None
            parts.append(self.split(rows, values)[scored] if scored else values)
        joined = torch.cat(parts).cpu().numpy()
        if width:
            joined = np.ascontiguousarray(
                joined[:, :width].astype(np.int32) if column.element == "i32" else joined[:, :width]
            )
        return ColumnData(joined, offsets_from_lengths(self.lengths[scored][self.order]) if scored else None)

    def join_routes(self, outputs: list[Outputs]) -> dict[str, ColumnData]:
        """Join the routes of forward passes into a column for each token column.

        The rows of the result are in the order of the micro-batches.
        """
        routes = (output.routes.numpy() for output in outputs if output.routes is not None)
        return self.routes.unpack([*zip(self.micro, routes, strict=True)])

    def _given_ids(self, column: ir.Column, rows: Array) -> torch.Tensor:
        """Return the k token ids that a column has for each scored token, as [tokens, k].

        The ids belong to the tokens of one scored column; tokens of other scored columns get zeros.
        """
        width = math.prod(dim.size for dim in column.dims[1:])
        ids = flatten_column(self.columns[column.name], rows).reshape(-1, width)
        counts = {name: int(lengths[rows].sum()) for name, lengths in self.lengths.items()}
        return torch.cat(
            [ids if name == column.dims[0].like else ids.new_zeros(count, width) for name, count in counts.items()]
        )


def prepare_batch(
    plan: Plan,
    node: Node,
    batch: Batch,
    like: dict[str, str],
    given: Sequence[ir.Column] = (),
    agree: Callable[[int], int] = int,
) -> PreparedBatch:
    """Prepare a batch for a node's model.

    `like` has an entry for each column that the program does not declare: the name of a column with the same lengths.
    `given` are the columns of token ids whose log-probabilities loss terms read.

    `agree` returns the largest of the numbers of micro-batches of the data-parallel groups that must make equally many.
    Micro-batches may be empty (analysis/row_packing.py).
    """
    graph = plan.graph
    roles = sequences(graph, node)
    declared = {column.name: column for column in graph.columns}
    like = like | {name: column.dims[0].like for name, column in declared.items() if column.dims}
    # A group without rows also has no columns.
    columns = {name: _empty(declared[name]) for name in node.reads if name in declared}
    states = (*node.states, *map(drawn_name, temperature_states(graph, node)))
    columns |= {state: ColumnData(np.zeros(0)) for state in states} | tokenise_columns(plan, node, batch.columns)
    names = [*roles.context, *roles.scored]
    tokens, unknown = numerics.clip_tokens([columns.pop(name) for name in names], plan.model(node.name).vocabulary)
    token_columns = dict(zip(names, tokens, strict=True))
    routes = TokenRoutes(
        {name: token_columns[name].lengths for name in roles.context},
        {name: token_columns[name].lengths for name in roles.scored},
        {name: columns.pop(column) for name, column in routing_columns(graph, node.reads).items()},
    )
    conversation_starts = {
        scored_name: columns.pop(name, None) for scored_name, name in begins_columns(graph, node).items()
    }
    masks: dict[str, ColumnData] = {}
    for name in [
        column
        for column in columns
        if column in declared and declared[column].element == "bool" and like.get(column) in roles.scored
    ]:
        mask = columns.pop(name)
        other = masks.get(like[name])
        masks[like[name]] = mask if other is None else replace(mask, values=mask.values & other.values)
    begins = {name: column for name, column in conversation_starts.items() if column is not None}
    lengths = _count_fed_tokens(
        [token_columns[name] for name in roles.context], {name: token_columns[name] for name in roles.scored}, begins
    )
    limit = MicroBatchLimit.of(plan, node.name)
    prompts = group_by_prompt(graph, node, batch.rows.tolist())
    micro = limit.pack(lengths, prompts, batch.share.largest_share_rows)
    if (number := agree(len(micro))) > len(micro):
        micro = limit.pack(lengths, prompts, batch.share.largest_share_rows, number)
    return PreparedBatch(
        rows=batch.rows,
        columns={name: apply_mask(column, masks.get(like.get(name, ""))) for name, column in columns.items()},
        lengths={name: apply_mask(token_columns[name], masks.get(name)).lengths for name in roles.scored},
        wrong=unknown,
        micro=[np.array(positions, np.int64) for positions in micro],
        contexts=[token_columns[name] for name in roles.context],
        scored={name: token_columns[name] for name in roles.scored},
        masks=masks,
        begins=begins,
        temperatures={name: temperature(graph, name) for name in roles.scored},
        given=given,
        after=scores_texts(graph, node),
        routes=routes,
    )


def _count_fed_tokens(
    contexts: Sequence[ColumnData], scored: Mapping[str, ColumnData], begins: Mapping[str, ColumnData]
) -> list[int]:
    """Return the number of tokens of each row's sequences (`pack`), masked or not.

    Each sequence has the context of the row.
    """
    total = np.zeros(len([*contexts, *scored.values()][0]), np.int64)
    context = np.sum([total, *(column.lengths for column in contexts)], axis=0)
    for name, column in scored.items():
        conversations = np.ones_like(total)
        if name in begins:
            row = np.repeat(np.arange(len(total)), column.lengths)
            conversations = np.bincount(row[begins[name].values], minlength=len(total)).clip(min=1)
        total += column.lengths + context * conversations
    counts: list[int] = (total if scored else context).tolist()
    return counts


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
