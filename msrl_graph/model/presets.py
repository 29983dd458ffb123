"""Presets: models that msrl_graph knows by name, so that a plan needs no folder.

Invariant: a preset's fields equal the fields of the config.json that was published with the model's weights. The
preset's parameter count equals the published parameter count (tests/model/test_models.py). A name matches a preset if
it differs from the preset's name only in case, in the owner on the Hub, and in words that change no size (`Instruct`,
`Base`, a date). Any other name is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..diagnostics import nearest
from ..files.paths import hub_name


def _preset(
    architecture: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, **more: object
) -> dict[str, object]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **more,
    }


_TIED = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}
_QWEN3_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
PRESETS: dict[str, dict[str, object]] = {
    "qwen2.5-0.5b": _preset("Qwen2", 896, 24, 14, 2, 4864, 151936, **_TIED),
    "qwen2.5-1.5b": _preset("Qwen2", 1536, 28, 12, 2, 8960, 151936, **_TIED),
    "qwen2.5-3b": _preset("Qwen2", 2048, 36, 16, 2, 11008, 151936, **_TIED),
    "qwen2.5-7b": _preset("Qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-14b": _preset("Qwen2", 5120, 48, 40, 8, 13824, 152064),
    "qwen2.5-32b": _preset("Qwen2", 5120, 64, 40, 8, 27648, 152064),
    "qwen2.5-72b": _preset("Qwen2", 8192, 80, 64, 8, 29568, 152064),
    "qwen3-0.6b": _preset("Qwen3", 1024, 28, 16, 8, 3072, 151936, **_QWEN3, **_TIED),
    "qwen3-1.7b": _preset("Qwen3", 2048, 28, 16, 8, 6144, 151936, **_QWEN3, **_TIED),
    "qwen3-4b": _preset("Qwen3", 2560, 36, 32, 8, 9728, 151936, **_QWEN3, **_TIED),
    "qwen3-8b": _preset("Qwen3", 4096, 36, 32, 8, 12288, 151936, **_QWEN3),
    "qwen3-14b": _preset("Qwen3", 5120, 40, 40, 8, 17408, 151936, **_QWEN3),
    "qwen3-32b": _preset("Qwen3", 5120, 64, 64, 8, 25600, 151936, **_QWEN3),
    "qwen3-30b-a3b": _preset("Qwen3Moe", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **_QWEN3_EXPERTS),
    "qwen3-235b-a22b": _preset(
        "Qwen3Moe", 4096, 94, 64, 4, 12288, 151936, moe_intermediate_size=1536, **_QWEN3_EXPERTS
    ),
    "deepseek-v3-671b": _preset("DeepseekV3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK),
    "deepseek-r1-671b": _preset("DeepseekV3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK),
    "deepseek-r1-distill-qwen-1.5b": _preset("Qwen2", 1536, 28, 12, 2, 8960, 151936),
    "deepseek-r1-distill-qwen-7b": _preset("Qwen2", 3584, 28, 28, 4, 18944, 152064),
    "deepseek-r1-distill-qwen-14b": _preset("Qwen2", 5120, 48, 40, 8, 13824, 152064),
    "deepseek-r1-distill-qwen-32b": _preset("Qwen2", 5120, 64, 40, 8, 27648, 152064),
    "deepseek-r1-distill-llama-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "deepseek-r1-distill-llama-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3.1-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3.1-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3.1-405b": _preset("Llama", 16384, 126, 128, 8, 53248, 128256),
    "llama3.2-1b": _preset("Llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **_TIED),
    "llama3.2-3b": _preset("Llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, **_TIED),
    "llama3.3-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "tiny": _preset("Qwen2", 128, 4, 4, 2, 448, 512, torch_dtype="float32"),
}
# Names without a size, for series that have only one size.
_SIZES = {"deepseek-v3": "deepseek-v3-671b", "deepseek-v3.1": "deepseek-v3-671b", "deepseek-r1": "deepseek-r1-671b"}
# Words of a name that do not change the size: what the weights were trained for, and when.
_WORDS = re.compile(r"-(?:instruct|base|chat|thinking|zero|\d{4})(?=-|$)")
_SUBJECTS = re.compile(r"^(qwen2\.5|qwen3)-(?:math|coder)-")
# The presets of `Llama-3.1` and `Meta-Llama-3` begin with `llama3.1` and `llama3`.
_SERIES = re.compile(r"^(?:meta-)?(llama|qwen)-(?=\d)")
# The tokenizer of presets, by a prefix of the preset's name. All sizes of a series share one; `tiny` has none.
TOKENIZERS = {
    "qwen2.5": "Qwen2.5",
    "qwen3": "Qwen3",
    "deepseek": "DeepSeek-V3",
    "deepseek-r1-distill-qwen": "DeepSeek-R1-Distill-Qwen",
    "deepseek-r1-distill-llama": "DeepSeek-R1-Distill-Llama",
    "llama3": "Llama 3",
}


def find_preset(target: str) -> str:
    """Return the preset that matches a model's name; "" if there is none.

    The name may be the name of a preset or a name on the Hub.
    """
    name = _normalize_name(target)
    for candidate in (name, plain := _WORDS.sub("", name), _SUBJECTS.sub(r"\1-", plain)):
        if (preset := _SIZES.get(candidate, candidate)) in PRESETS:
            return preset
    return ""


def download(hub: str) -> str:
    """Return a help text that says how to download a model's folder from the Hub."""
    folder = f"./{hub.rsplit('/', 1)[-1]}"
    return f'download it, `hf download {hub} --local-dir {folder}`, and name the folder: `"{folder}"`'


def _normalize_name(target: str) -> str:
    name = (hub_name(target) or target).rsplit("/", 1)[-1].lower().replace("_", "-")
    return _SERIES.sub(r"\1", name)


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

    The text has the most similar preset, or all presets if no preset is similar.
    """
    name = _normalize_name(target)
    numbers = _find_numbers(name)
    for tolerance in (0.0, 0.1):  # 33b is close to 32b, and 8b is another model than 7b
        help = nearest(
            name, [preset for preset in PRESETS if _match_numbers(numbers, _find_numbers(preset), tolerance)]
        )
        if help.startswith("did"):
            return help
    return f"the presets, for plans, are {', '.join(_format_series())}"


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


def _format_series() -> Iterator[str]:
    """Yield one text per series of presets, such as "`qwen2.5-` 0.5b 1.5b 3b"."""
    sizes_by_series: dict[str, list[str]] = {}
    for name in PRESETS:
        series, size = re.fullmatch(r"(.*?)(?:-(\d[\w.-]*b))?", name).groups()  # type: ignore[union-attr]
        sizes_by_series.setdefault(series, []).extend([size] if size else [])
    for series, sizes in sizes_by_series.items():
        yield f"`{series}-` {' '.join(sizes)}" if len(sizes) > 1 else f"`{'-'.join([series, *sizes])}`"
