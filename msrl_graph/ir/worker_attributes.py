"""Attributes of workers with weights."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.freezing import PARTS
from ..model.lora import ALL_LINEAR, RANK, StatedLora
from .attribute_schema import DeclaredAttributes, attr
from .graph import Expr
from .kinds import COUNT, NameKind, NumericKind, SettingsKind, StringKind


@dataclass(frozen=True)
class LoraSettings(DeclaredAttributes):
    """The arguments of `lora(…)`."""

    rank: int | None = attr(COUNT, None, "The number of rows of A and of columns of B.", str(RANK))
    alpha: float | None = attr(
        NumericKind(0, above=True), None, "The product B A is multiplied by alpha / rank.", "twice the rank"
    )
    targets: tuple[str, ...] | None = attr(
        NameKind(several=True),
        None,
        "The projections with an adapter, by the last word of their names in the model's files, such as `q_proj`. "
        "`all_linear` is all of them: those of attention, MLPs and experts.",
        ALL_LINEAR,
    )
    dropout: float = attr(NumericKind(0, 1), 0.0, "The share of the inputs of A that an update sets to 0, at random.")


class LoraKind(SettingsKind):
    """A call `lora(…)`."""

    def value(self, expr: Expr) -> StatedLora:
        said = LoraSettings.of_stated(dict(zip(expr.keys, expr.args, strict=True)))
        return StatedLora(said.rank, said.alpha, said.targets, said.dropout)

    def settings(self, value: StatedLora) -> LoraSettings:
        return LoraSettings(value.rank, value.alpha, value.targets, value.dropout)


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
    adapter: StatedLora | None = attr(
        LoraKind("lora", LoraSettings),
        None,
        "An adapter, which the updates train instead of the model's own weights. See [Adapters](workers.md#adapters).",
        "none",
    )
