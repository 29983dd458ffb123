"""Functions that pass text from one model to another.

They turn what a policy wrote into a `text` column, which each model reads with its own tokenizer.
"""

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
    """The text of a token column, without special tokens.

    It is for a `text` column that a model with another tokenizer reads. The end token is special, so it is left
    out. A character whose last token is missing, because the response was cut, is U+FFFD.
    """
    return response


@function()
def own_text(response: NDArray[np.int32], mask: NDArray[np.bool_], tokenizer: Any) -> str:
    """The text that a policy wrote in a response, without special tokens.

    `mask` leaves out the text of its environment.
    """
    written: str = tokenizer.decode(response[mask], skip_special_tokens=True)
    return written


@function()
def add_message(
    prompt: str, response: str, *, role: Literal["assistant", "user", "system", "tool"] = "assistant"
) -> str:
    """A continued conversation: the messages of `prompt` and then the response.

    The new message has the role `role`. It is for a `text` column: a model that reads it renders the messages by
    its own chat template. A prompt that is not a JSON list of messages becomes the user's message. The prompt is
    declared as `text` too, because in tokens the template has already made it one text.
    """
    return json.dumps(
        [*(messages(prompt) or [{"role": "user", "content": prompt}]), {"role": role, "content": response}],
        ensure_ascii=False,
    )
