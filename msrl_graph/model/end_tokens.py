"""The tokens that end a response, as a model's folder names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_end_tokens(folder: Path) -> tuple[list[int], str]:
    """Return the ids that end a response, and the tokenizer's `eos_token` ("": none).

    The ids are those that generation_config.json or else config.json names. The `eos_token` counts where these two
    files name no id or several. Raises OSError and ValueError for a file that cannot be read; a missing file names
    nothing.
    """
    stated = (_read(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
    ids: int | list[int] = next((ids for ids in stated if ids is not None), [])
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    return ids if isinstance(ids, list) else [ids], text or ""


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
