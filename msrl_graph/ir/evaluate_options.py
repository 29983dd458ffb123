"""Options of the statement `evaluate` of a deploy, with their defaults.

Invariant: as in options.py, code reads the typed values of options.
"""

from __future__ import annotations

from dataclasses import dataclass

from .attribute_schema import DeclaredAttributes, attr
from .evaluation import Draw
from .kinds import COUNT, CountsKind, DrawsKind, NameKind, NumericKind, StringKind, WordsKind


@dataclass(frozen=True)
class EvaluateOptions(DeclaredAttributes):
    """Options of `evaluate NAME { … }`.

    If `data` is "", the data has the name of the evaluation. If `every` is 0, the evaluation runs only before and after
    training. If `samples` is 0 or `temperature` is None, the value is the same as in training.
    """

    data: str = attr(
        NameKind(),
        "",
        "The data to evaluate on. Several evaluations, each with a name of its own, may use the same data.",
        "the data with the evaluation's name",
    )
    report: tuple[str, ...] = attr(
        NameKind(several=True),
        (),
        "Columns whose means are reported: `f32` columns with one number per row, written by a function, an "
        "environment or a reward model.",
        must="reward",
    )
    every: int = attr(COUNT, 0, "The evaluation also runs after every `every` iterations.", "only before and after")
    samples: int = attr(
        COUNT,
        0,
        "Responses per prompt, for all generations that read only columns of the source. A generation that reads the "
        "text of another generation samples as in training, unless `draws` has settings for it.",
        "as in training",
    )
    temperature: float | None = attr(
        NumericKind(0),
        None,
        "The temperature of the generations to which `samples` applies; 0 takes the likeliest token.",
        "as in training",
    )
    draws: tuple[Draw, ...] = attr(
        DrawsKind(),
        (),
        "Sampling settings of single generations, such as `[draw(critic.generate, samples = 2, temperature = 0)]`. A "
        "setting that is left out does not change.",
        "none",
    )
    at: tuple[int, ...] = attr(
        CountsKind(),
        (),
        "The k of `pass@k` and `best@k`, and with `vote` of `maj@k`, for each reported column "
        "([metrics](../metrics.md#an-evaluation)); at most the number of responses per prompt.",
        "none",
    )
    passing: float = attr(NumericKind(), 1.0, "For `pass@k`: a response passes if the reported column is this or more.")
    vote: str = attr(
        NameKind(),
        "",
        "The column with the answer of each response: text or a number. `maj@k` uses the most frequent answer.",
        "none",
    )
    by: str = attr(
        NameKind(),
        "",
        "A column of the source, such as `data_source`. Each figure is also reported separately for the rows of each "
        "value of this column, for at most 100 values.",
        "none",
    )
    label: str = attr(
        StringKind(),
        "",
        "The title of the first reported column in the curve and in the last lines that a run prints.",
        "`COLUMN on NAME`",
    )
    best: str = attr(
        StringKind(),
        "",
        'A figure of this evaluation, such as `"reward"` or `"reward/pass@8"`: the checkpoint with the best value is '
        "[written and kept](../../guides/evaluating.md#the-best-checkpoint).",
        "none",
    )
    goal: str = attr(WordsKind(("maximize", "minimize")), "maximize", "Whether a better `best` is larger or smaller.")
    patience: int = attr(
        COUNT,
        0,
        "Training ends after this number of evaluations in a row in which the figure `best` did not improve.",
        "never",
    )
