"""Attributes of workers with weights."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.freezing import PARTS
from .attribute_schema import DeclaredAttributes, attr
from .kinds import COUNT, NameKind, NumericKind, StringKind


@dataclass(frozen=True)
class WorkerAttributes(DeclaredAttributes):
    """Attributes of `worker NAME : KIND { … }`, for kinds of workers with weights."""

    model: str = attr(
        NameKind(),
        "",
        "The name of the worker's model. The deploy's `model` statement of this name says which weights to load.",
        "the kind's name",
    )
    follows: str = attr(
        NameKind(),
        "",
        "For a `frozen` worker: the trained worker whose weights this worker takes over after an iteration. It starts "
        "with the weights of its own model.",
        "none: the weights never change",
    )
    every: int = attr(
        COUNT, 1, "With `follows`: the number of iterations from one such change of the weights to the next."
    )
    decay: float = attr(
        NumericKind(0, 1),
        0.0,
        "With `follows`: the new weights are decay times this worker's weights plus (1 - decay) times the weights of "
        "the followed worker, an exponential moving average. With 0, the weights are copied.",
    )
    freeze: tuple[str, ...] = attr(
        StringKind(several=True, known=tuple(PARTS)),
        (),
        "Weights that the updates of this worker do not change: `embeddings`, `attention`, `mlp`, `experts`, `router`, "
        "`norms` or `head`, or patterns of their names, such as `model.layers.[0-3].*`. See "
        "[Frozen weights](workers.md#frozen-weights).",
        "none",
    )
