"""Text that goes from one model to another: what a policy wrote, for a `text` column that each model reads by its own
tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from ..data.chat import messages
from .registry import function

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@function()
def text(response: str) -> str:
    """The text of a column of tokens, without special tokens: for a `text` column that a model with another tokenizer
    reads.

    The end token is special, so it stays behind. A character of which the last token is missing, since the response was
    cut, is U+FFFD.
    """
    return response


@function()
def own_text(response: NDArray[np.int32], mask: NDArray[np.bool_], tokenizer: Any) -> str:
    """The text of what a policy wrote in a response, without special tokens and what its environment wrote, which
    `mask` leaves out."""
    written: str = tokenizer.decode(response[mask], skip_special_tokens=True)
    return written


@function()
def add_message(
    prompt: str, response: str, *, role: Literal["assistant", "user", "system", "tool"] = "assistant"
) -> str:
    """A conversation that goes on: the messages of `prompt`, and the response as one more, spoken by `role`.

    For a `text` column: a model that reads it renders the messages by its own chat template. A prompt that is no JSON
    of messages is what the user says. The prompt is declared as `text` too: of tokens the template has made one text.
    """
    return json.dumps(
        [*(messages(prompt) or [{"role": "user", "content": prompt}]), {"role": role, "content": response}],
        ensure_ascii=False,
    )
