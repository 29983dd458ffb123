"""The function of the source's `weights`: from the states and the columns of all rows of the data to how likely each is
drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...ir.attributes import SourceAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import is_tokens
from ..data.columns import Array
from ..data.dataset import Dataset
from ..process.task import Task
from ..process.task_report import RunError
from .units import options_of
from .user_traceback import blame
from .values import InjectedArguments, NotNumbers, brief, called, pure_numbers, seen


class DrawWeights:
    """What draws prompts: from the states and the columns of all rows of the data to a weight for each."""

    def __init__(self, plan: Plan, data: Dataset) -> None:
        self.source = source = plan.graph.node("source")
        expr = SourceAttributes.of(source).weights
        assert expr is not None
        self.call, signature = called(expr, "function")
        self.options = options_of(expr)
        renamed = expr.columns()
        self.filled = InjectedArguments(signature, source, plan)
        self.data = data
        self.rows = len(data)
        self.bound = [(p, renamed.get(p, p)) for p in signature.columns]
        self.columns: dict[str, Callable[[], Any]] = {}  # of the data, by parameter: each call gets values of its own
        for parameter, name in self.bound:
            if name in source.weighs:
                text = parameter in signature.text
                tokens = data.tokens if text and is_tokens(plan.graph, name) else None
                column = data.columns[name].take(data.usable)
                element = plan.graph.column(name).element
                if column.offsets is None:
                    self.columns[parameter] = column.values.copy
                elif text or element == "text":  # what takes long to decode, and nobody can change
                    self.columns[parameter] = seen(column, element, range(self.rows), text, tokens).copy
                else:
                    self.columns[parameter] = partial(seen, column, element, range(self.rows), text, tokens)

    def __call__(self, tables: Mapping[str, Array], task: Task) -> Array:
        """The weights of an iteration, finite, none below 0 and some above it; `tables` are the states of each row."""
        states = {**task.draws, **{name: np.array(table) for name, table in tables.items()}}
        given = {p: states[name] for p, name in self.bound if name in states}
        given |= {parameter: values() for parameter, values in self.columns.items()}
        try:
            result = self.call(**given, **self.options, **self.filled(task.name, task.number, 0))
        except Exception as error:
            raise RunError(blame(self.source, error, "what `weights` reads", given.items())) from error
        try:
            found = pure_numbers(result, np.float64)
        except NotNumbers:
            found = np.zeros(0)
        what = f"`weights` of the source ({self.source.span.place})"
        if found.shape != (self.rows,):
            raise RunError(
                f"{what} returned {brief(result)}, where a number of 0 or more belongs for each of {self.rows} rows "
                "of the data"
            )
        if len(wrong := np.flatnonzero(~(np.isfinite(found) & (found >= 0)))):
            row = self.data.where(int(wrong[0]))
            more = f", and so of {len(wrong) - 1} more of {self.rows}" if len(wrong) > 1 else ""
            raise RunError(
                f"{what} returned {found[wrong[0]]:g} for {row}{more}, where a finite number of 0 or more belongs"
            )
        if not found.any():
            raise RunError(
                f"{what} returned 0 for each of {self.rows} rows of the data in iteration {task.number}: there is "
                "none to draw"
            )
        return found


def scarce(source: Node, task: Task, weights: Array, first: int) -> list[str]:
    """What to tell of an iteration whose prompts from `first` on are the first of it that only rows of weight 0 were
    left for."""
    some = np.count_nonzero(weights)
    if not first <= some < min(first + task.prompts, len(weights)):
        return []
    few = f"only {some} of {len(weights)} rows of the data have a weight above 0"
    return [
        f"`weights` of the source ({source.span.place}): {few}, so iteration {task.number} takes rows of weight 0 too"
    ]


__all__ = ["DrawWeights", "scarce"]
