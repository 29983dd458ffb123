"""Names of presets, as people write them.

Invariant: a name means a preset if it differs from the preset's name only in case and punctuation, in the owner on the
Hub, and in words that change no size (`Instruct`, `Base`, a date), or if it is one of the further names here. Any other
name is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..diagnostics import nearest
from ..files.paths import hub_name
from . import mamba_presets
from .presets import PRESETS, TOKENIZERS

# Further names of presets: without a size, of series that have only one; and of models that have the same sizes.
ALIASES = {
    "qwen3-next": "qwen3-next-80b-a3b",
    "deepseek-v3": "deepseek-v3-671b",
    "deepseek-v3.1": "deepseek-v3-671b",
    "deepseek-v3.1-terminus": "deepseek-v3-671b",
    "deepseek-prover-v2-671b": "deepseek-v3-671b",
    "deepseek-r1": "deepseek-r1-671b",
    "deepseek-math-7b": "deepseek-llm-7b",
    "deepseek-math-7b-rl": "deepseek-llm-7b",
    "deepscaler-1.5b-preview": "deepseek-r1-distill-qwen-1.5b",
    "llama3.1-nemotron-70b": "llama3.1-70b",
    "llama3.1-nemotron-nano-8b-v1": "llama3.1-8b",
    "tinyllama": "tinyllama-1.1b",
    "tinyllama-1.1b-v1.0": "tinyllama-1.1b",
    "tinyllama-v1.1": "tinyllama-1.1b",
    "qwq-32b": "qwen2.5-32b",
    "moonlight": "moonlight-16b-a3b",
    "kimi-k2": "kimi-k2-1t",
    "kimi-k2-0905": "kimi-k2-1t",
    "glm4.5": "glm4.5-355b-a32b",
    "glm4.6": "glm4.5-355b-a32b",
    "glm4.7": "glm4.5-355b-a32b",
    "glm4.5-air": "glm4.5-air-106b-a12b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-large": "mistral-large-123b",
    "mistral-small-instruct-2409": "mistral-small-22b",
    "codestral-22b-v0.1": "mistral-small-22b",
    "mistral-small-3.1-24b": "mistral-small-24b",
    "mistral-small-3.2-24b": "mistral-small-24b",
    "magistral-small": "mistral-small-24b",
    "devstral-small": "mistral-small-24b",
    "mixtral-8x7b": "mixtral-8x7b-v0.1",
    "mixtral-8x22b": "mixtral-8x22b-v0.1",
    "mixtral-8x22b-instruct-v0.1": "mixtral-8x22b-v0.3",  # with more tokens than the base model
    "minimax-m2": "minimax-m2-230b-a10b",
    "minimax-m2.1": "minimax-m2-230b-a10b",
    "minimax-m2.5": "minimax-m2-230b-a10b",
    "minimax-m2.7": "minimax-m2-230b-a10b",
    "gemma1.1-2b": "gemma-2b",
    "gemma1.1-7b": "gemma-7b",
    "olmo3.1-32b": "olmo3-32b",
    "phi4": "phi4-14b",
    "phi4-reasoning": "phi4-14b",
    "phi4-reasoning-plus": "phi4-14b",
    "phi4-mini-reasoning": "phi4-mini",
    "glm-z1-9b-0414": "glm4-9b-0414",
    "glm-z1-32b-0414": "glm4-32b-0414",
    "granite3.1-2b": "granite3.0-2b",
    "granite3.1-8b": "granite3.0-8b",
    "granite3.2-2b": "granite3.0-2b",
    "granite3.2-8b": "granite3.0-8b",
    **mamba_presets.ALIASES,
}
# Words of a name that do not change the size: what the weights were trained for, and when.
_WORDS = re.compile(r"-(?:instruct|base|chat|thinking|think|zero|it|pt|sft|dpo|\d{4})(?=-|$)")
_FORMAT = re.compile(r"-(?:hf|bf16)$")  # of the files; `glm4-9b-hf` is the preset's own name
_SUBJECTS = re.compile(r"^(qwen2\.5|qwen3)-(?:math|coder)-")
# The presets of `Llama-3.1` and `Meta-Llama-3` begin with `llama3.1` and `llama3`. `gemma-2b` is no second series.
_SERIES = re.compile(r"^(?:meta-)?(?:(llama|qwen)-(?=\d)|(gemma|glm|granite|olmo|phi)-(?=\d+(?:\.\d+)?(?:-|$)))")


def find_preset(target: str) -> str:
    """Return the preset that matches a model's name; "" if there is none.

    The name may be the name of a preset or a name on the Hub.
    """
    name = _normalize_name(target)
    plain = _WORDS.sub("", name)
    for candidate in (name, plain, _SUBJECTS.sub(r"\1-", plain), _FORMAT.sub("", plain)):
        if (preset := ALIASES.get(candidate, candidate)) in PRESETS:
            return preset
    return ""


def download(hub: str) -> str:
    """Return a help text that says how to download a model's folder from the Hub."""
    folder = f"./{hub.rsplit('/', 1)[-1]}"
    return f'download it, `hf download {hub} --local-dir {folder}`, and name the folder: `"{folder}"`'


def _normalize_name(target: str) -> str:
    name = (hub_name(target) or target).rsplit("/", 1)[-1].lower()
    name = re.sub("[_: ]", "-", name)  # `qwen3:8b` is a name of Ollama
    return _SERIES.sub(lambda match: match[1] or match[2], name)


def find_tokenizer_name(name: str) -> str | None:
    """Return the name of a preset's tokenizer.

    Returns None if `name` is not a preset's name, or if the preset has no tokenizer.
    """
    preset = find_preset(name)
    prefix = max((start for start in TOKENIZERS if preset.startswith(start)), key=len, default="")
    return TOKENIZERS.get(prefix)


def find_similar_preset(hub: str) -> str:
    """Return the preset whose name is the longest prefix of a Hub name.

    Returns "" if no preset's name is a prefix of the Hub name. The model on the Hub may have the same shape as the
    returned preset.
    """
    return max(
        (preset for preset in PRESETS if re.match(rf"{re.escape(preset)}(?:-|$)", _normalize_name(hub))),
        key=len,
        default="",
    )


def suggest_presets(target: str) -> str:
    """Return a help text for an unknown preset name.

    The text has the most similar preset. If no preset is similar, it has the presets that begin with the same word, or
    the words that presets begin with.
    """
    name = _normalize_name(target)
    numbers = _find_numbers(name)
    words: dict[str, list[str]] = {}
    for preset in PRESETS:
        words.setdefault(_find_word(preset), []).append(preset)
    same = words.get(_find_word(name), [])
    for tolerance in (0.0, 0.1):  # 33b is close to 32b, and 8b is another model than 7b
        alike = [preset for preset in same or PRESETS if _match_numbers(numbers, _find_numbers(preset), tolerance)]
        if (help := nearest(name, alike)).startswith("did"):
            return help
    if same:
        return f"the presets, for plans, are {', '.join(_format_series(same))}"
    return f"the names of the presets, for plans, begin with {', '.join(f'`{word}`' for word in words)}"


def _find_word(name: str) -> str:
    """Return the letters that a name begins with."""
    return re.match("[a-z]*", name)[0]  # type: ignore[index]


def _match_numbers(numbers: Sequence[str], preset: Sequence[str], tolerance: float) -> bool:
    """Return whether the numbers in a name equal the numbers in a preset's name.

    The last number is the model's size. The size may differ from the preset's size by the fraction `tolerance`.
    """
    pairs = [*zip(map(float, numbers), map(float, preset), strict=False)]
    exact = len(pairs) if len(numbers) < len(preset) else len(preset) - 1
    return all(number == preset_number for number, preset_number in pairs[:exact]) and all(
        abs(number - preset_number) <= tolerance * preset_number for number, preset_number in pairs[exact:]
    )


def _find_numbers(name: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", name)


def _format_series(names: Sequence[str]) -> Iterator[str]:
    """Yield one text per series of presets, such as "`qwen2.5-` 0.5b 1.5b 3b"."""
    sizes_by_series: dict[str, list[str]] = {}
    for name in names:
        series, size = re.fullmatch(r"(.*?)(?:-(\d[\w.-]*[bm]))?", name).groups()  # type: ignore[union-attr]
        sizes_by_series.setdefault(series, []).extend([size] if size else [])
    for series, sizes in sizes_by_series.items():
        yield f"`{series}-` {' '.join(sizes)}" if len(sizes) > 1 else f"`{'-'.join([series, *sizes])}`"
