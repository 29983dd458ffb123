"""The settings for sampling that a model's publisher recommends.

Invariant: a run samples with the attributes of its program, never with these settings.
"""

from __future__ import annotations

from pathlib import Path

from .end_tokens import read_settings

# The settings that change which tokens are drawn, each with the value that changes nothing.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
}


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the settings of a folder that change which tokens are drawn.

    They are in generation_config.json. Raises OSError and ValueError for a file that cannot be read. A missing file
    counts as an empty file.
    """
    stated = read_settings(folder / "generation_config.json")
    return {
        name: stated[name]
        for name, neutral in NEUTRAL.items()
        if isinstance(stated.get(name), int | float) and stated[name] != neutral
    }
