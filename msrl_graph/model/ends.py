"""The tokens that end a response, as the files of a model's folder name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def named(read: Callable[[str], Mapping[str, Any]]) -> tuple[list[int], str]:
    """The ids that generation_config.json names, or else config.json; and the `eos_token` of the tokenizer, which
    counts where they name none or several. `read` gives what a file of the folder states, nothing where it is
    missing."""
    stated = (read(name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
    ids: int | list[int] = next((e for e in stated if e is not None), [])
    token = read("tokenizer_config.json").get("eos_token")
    return ids if isinstance(ids, list) else [ids], (token["content"] if isinstance(token, dict) else token) or ""
