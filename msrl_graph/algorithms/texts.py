"""Functions that pass text from one model to another.

The functions convert the response of a policy to a `text` column. Each model that reads the column uses its own
tokenizer.

Invariant: text that is decoded from tokens contains no special tokens.
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
    """The text of a response, decoded from tokens, without special tokens.

    Use this function to write a `text` column that a model with another tokenizer reads. The end token is a special
    token, so the text does not contain it. If a response was cut in the middle of a character, this character becomes
    U+FFFD.
    """
    return response


@function()
def own_text(response: NDArray[np.int32], mask: NDArray[np.bool_], tokenizer: Any) -> str:
    """The text that a policy wrote in a response, without special tokens.

    `mask` is true for the tokens that the policy wrote. Text that an environment wrote is left out.
    """
    written: str = tokenizer.decode(response[mask], skip_special_tokens=True)
    return written


@function()
def add_message(
    prompt: str, response: str, *, role: Literal["assistant", "user", "system", "tool"] = "assistant"
) -> str:
    """A conversation: the messages of `prompt`, and the response as one more message.

    The new message has the role `role`. The result is for a `text` column: a model that reads the column renders the
    messages with its own chat template. If `prompt` is not a JSON list of messages, it becomes one message of the
    user. Declare the prompt's column as `text` too: in a column of tokens, the chat template has already joined the
    messages into one text.
    """
    return json.dumps(
        [*(messages(prompt) or [{"role": "user", "content": prompt}]), {"role": role, "content": response}],
        ensure_ascii=False,
    )
