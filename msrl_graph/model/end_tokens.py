"""The tokens that end a response, as the files in a model's folder state them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_end_tokens(folder: Path) -> tuple[list[int], str]:
    """Return the ids of tokens that end a response, and the tokenizer's `eos_token`.

    The ids are from generation_config.json. If that file has no ids, they are from config.json. `eos_token` is from
    tokenizer_config.json, or "" if that file has no `eos_token`. A caller needs `eos_token` only if the number of ids
    is not 1. Raises OSError and ValueError for a file that cannot be read. A missing file counts as an empty file.
    """
    stated = (read_settings(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
    ids: int | list[int] = next((ids for ids in stated if ids is not None), [])
    token = read_settings(folder / "tokenizer_config.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    return ids if isinstance(ids, list) else [ids], text or ""


def read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content
