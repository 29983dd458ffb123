"""Options of data: which rows are read, and how.

Invariant: the options of data decide which rows a run uses, so a run that is resumed needs the same options.
"""

from __future__ import annotations

from dataclasses import dataclass

from .attribute_schema import DeclaredAttributes, attr
from .graph import Value
from .kinds import COUNT, COUNT_OR_0, StringKind, VariablesKind, WordsKind


@dataclass(frozen=True)
class DataOptions(DeclaredAttributes):
    """Options of `data NAME = "…" { … }`, in addition to the columns.

    If `take` is 0, all rows are taken. If `chat` is None, text is not rendered by a chat template.
    """

    split: str = attr(
        StringKind(),
        "",
        "The split to read, such as `train`, of a folder or a dataset with several splits. A file belongs to a split "
        "if the name of the split is a word in its path: `data/train-00000-of-00002.parquet`.",
        "the only one",
    )
    subset: str = attr(
        StringKind(),
        "",
        "The subset of a dataset on the Hugging Face Hub, such as `main` of `openai/gsm8k`.",
        "the only one",
    )
    skip: int = attr(COUNT_OR_0, 0, "The number of rows at the beginning that are not read.")
    take: int = attr(COUNT, 0, "The number of rows that are read, after `skip`.", "all rows")
    missing: str = attr(
        WordsKind(("error", "omit")),
        "error",
        "What is done with a row in which a field that a column reads is absent or null. `omit` leaves the row out, "
        "and the run counts such rows. `error` reports the row and the field; a column of type `json` may be null.",
    )
    system: str = attr(
        StringKind(),
        "",
        "The system message of each prompt that has none. Text becomes the message of the user that follows it.",
        "none",
    )
    chat: tuple[tuple[str, Value], ...] | None = attr(
        VariablesKind("template"),
        None,
        "Variables of the policy's chat template: `template(enable_thinking = false)`. Text becomes a message of the "
        "user, so that the template renders it.",
        "text is encoded as it is",
    )
