"""Weights with which prompts are drawn from the data (the option `weights`).

The option is stated for the algorithm's source, the node that draws rows of the data as prompts. It names a function of
the user. The arguments of the function are states, and whole columns of the data. The function returns one weight for
each row of the data: the more weight, the more likely the row is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...analysis.sequences import is_tokens
from ...ir.attributes import SourceAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..data.columns import Array
from ..data.dataset import Dataset
from ..process.task import Task
from ..process.task_report import RunError
from .units import options_of
from .user_traceback import describe_failure
from .values import (
    InjectedArguments,
    NotNumbers,
    describe_briefly,
    load_with_signature,
    pure_numbers,
    values_for_function,
)


class DrawWeights:
    """The weights of all rows of the data, computed by the user's function."""

    def __init__(self, plan: Plan, data: Dataset) -> None:
        self.source = source = plan.graph.node("source")
        expr = SourceAttributes.of(source).weights
        assert expr is not None
        self.call, signature = load_with_signature(expr, "function")
        self.options = options_of(expr)
        renamed = expr.columns()
        self.filled = InjectedArguments(signature, source, plan)
        self.data = data
        self.rows = len(data)
        self.parameters = [(argument, renamed.get(argument, argument)) for argument in signature.columns]
        self.columns: dict[str, Callable[[], Any]] = {}  # of the data, by parameter: each call gets its own copies
        for parameter, name in self.parameters:
            if name in source.weight_columns:
                text = parameter in signature.text
                tokens = data.tokens if text and is_tokens(plan.graph, name) else None
                column = data.column(name)
                element = plan.graph.column(name).element
                if column.offsets is None:
                    self.columns[parameter] = column.values.copy
                elif text or element == "text":  # slow to decode, and immutable
                    self.columns[parameter] = values_for_function(column, element, range(self.rows), text, tokens).copy
                else:
                    self.columns[parameter] = partial(
                        values_for_function, column, element, range(self.rows), text, tokens
                    )

    def __call__(self, tables: Mapping[str, Array], task: Task) -> Array:
        """Return the weight of each row of the data for one iteration.

        All weights are finite and at least 0, and some are above 0. `tables` has the states that have one value for
        each row. Raises RunError if the user's function fails, or if it returns weights that violate these conditions.
        """
        states = {**task.draws, **{name: np.array(table) for name, table in tables.items()}}
        arguments = {argument: states[name] for argument, name in self.parameters if name in states}
        arguments |= {parameter: values() for parameter, values in self.columns.items()}
        try:
            result = self.call(**arguments, **self.options, **self.filled(task.name, task.number, 0))
        except Exception as error:
            raise RunError(describe_failure(self.source, error, "the call of `weights`", arguments.items())) from error
        try:
            weights = pure_numbers(result, np.float64)
        except NotNumbers:
            weights = np.zeros(0)
        label = f"`weights` of the source ({self.source.span.place})"
        if weights.shape != (self.rows,):
            raise RunError(
                f"{label} returned {describe_briefly(result)} instead of a number of at least 0 for each of the "
                f"{self.rows} rows of the data"
            )
        if len(bad_rows := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))):
            row = self.data.locate(int(bad_rows[0]))
            more = f" (and for {len(bad_rows) - 1} more of {self.rows} rows)" if len(bad_rows) > 1 else ""
            raise RunError(
                f"{label} returned {weights[bad_rows[0]]:g} for {row}{more}, where a finite number of 0 or more belongs"
            )
        if not weights.any():
            raise RunError(
                f"{label} returned 0 for each of {self.rows} rows of the data in iteration {task.number}: no row can "
                "be drawn"
            )
        return weights


def remark_scarce_weights(source: Node, task: Task, weights: Array, first: int) -> list[str]:
    """Return a remark if this round is the first that must draw rows of weight 0.

    Let n be the number of rows of the data with a weight above 0. A round must draw rows of weight 0 if the iteration
    needs more than n prompts up to the end of this round. `first` is the number of prompts that the earlier rounds have
    drawn. The result is an empty list for any other round, and if all rows of the data have a weight above 0.
    """
    positive_count = np.count_nonzero(weights)
    if not first <= positive_count < min(first + task.prompts, len(weights)):
        return []
    message = f"only {positive_count} of {len(weights)} rows of the data have a weight above 0"
    return [
        f"`weights` of the source ({source.span.place}): {message}, so iteration {task.number} also draws rows of "
        "weight 0"
    ]


__all__ = ["DrawWeights", "remark_scarce_weights"]
