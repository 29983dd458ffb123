"""Presets of models with Mamba-2 layers, and of dense models of the same series.

The invariant of presets.py holds for them, too.
"""

from __future__ import annotations

from typing import Any

# Patterns of layers: Mamba-2 (M), attention (*), MLPs (-), experts (E).
_PATTERNS = {
    "8b": "M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
    "47b": "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*" + 2 * "-M-M-M-M-M*" + "-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
    "56b": "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
    "9b": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "12b": "M-M-M-M*" + 5 * "-M-M-M-M*" + "-M-M-M-M-",
    "30b": "MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME",
}
_NEMOTRON = {"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "head_dim": 128}
_NEMOTRON_LARGE = _NEMOTRON | {"mamba_num_heads": 256, "ssm_state_size": 256}
_NEMOTRON_NANO = _NEMOTRON | {"mamba_num_heads": 128, "mamba_head_dim": 80}
_NEMOTRON_EXPERTS = _NEMOTRON | {
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "tie_word_embeddings": True,
}
_GRANITE_MAMBA = _GRANITE | {"position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_state": 128}
_GRANITE_TINY = _GRANITE_MAMBA | {"num_local_experts": 64, "num_experts_per_tok": 6, "attention_multiplier": 0.0078125}
_GRANITE_SMALL = _GRANITE_TINY | {"num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128}
_TYPES = [*5 * ["mamba"], "attention", *3 * [*9 * ["mamba"], "attention"], *4 * ["mamba"]]
_TYPES_350M = [*10 * ["mamba"], "attention", "mamba", "mamba", "attention", *3 * ["mamba"], "attention"]
_TYPES_350M += [*9 * ["mamba"], "attention", *4 * ["mamba"]]


def _nemotron(pattern: str, hidden: int, heads: int, intermediate: int, more: dict[str, Any]) -> dict[str, object]:
    return {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": 131072,
        "hybrid_override_pattern": _PATTERNS[pattern],
        "num_hidden_layers": len(_PATTERNS[pattern]),
        "torch_dtype": "bfloat16",
        **more,
    }


def _granite(
    hidden: int,
    types: list[str],
    heads: tuple[int, int],
    intermediate: int,
    logits_scale: float,
    base: dict[str, Any],
    **more: object,
) -> dict[str, object]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": len(types),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": intermediate,
        "shared_intermediate_size": intermediate,
        "vocab_size": 100352,
        "layer_types": types,
        "logits_scaling": logits_scale,
        "torch_dtype": "bfloat16",
        **base,
        **more,
    }


def _dense(layers: int) -> list[str]:
    return layers * ["attention"]


_ROPE = _GRANITE | {"position_embedding_type": "rope"}
_SHORT = {"residual_multiplier": 0.246, "mamba_d_head": 32}
PRESETS: dict[str, dict[str, object]] = {
    "nemotron-h-8b": _nemotron("8b", 4096, 32, 21504, _NEMOTRON | {"mamba_num_heads": 128}),
    "nemotron-h-47b": _nemotron("47b", 8192, 64, 30720, _NEMOTRON_LARGE),
    "nemotron-h-56b": _nemotron("56b", 8192, 64, 32768, _NEMOTRON_LARGE),
    "nemotron-nano-9b-v2": _nemotron("9b", 4480, 40, 15680, _NEMOTRON_NANO),
    "nemotron-nano-12b-v2": _nemotron("12b", 5120, 40, 20480, _NEMOTRON_NANO),
    "nemotron-3-nano-30b-a3b": _nemotron("30b", 2688, 32, 1856, _NEMOTRON_EXPERTS),
    "granite4.0-350m": _granite(1024, _dense(28), (16, 4), 2048, 4.0, _ROPE, residual_multiplier=0.263),
    "granite4.0-1b": _granite(2048, _dense(40), (16, 4), 4096, 8.0, _ROPE, attention_multiplier=0.0078125),
    "granite4.0-micro": _granite(2560, _dense(40), (40, 8), 8192, 10.0, _ROPE),
    "granite4.0-h-350m": _granite(768, _TYPES_350M, (12, 4), 2048, 3.0, _GRANITE_MAMBA, **_SHORT),
    "granite4.0-h-1b": _granite(1536, _TYPES, (12, 4), 4096, 6.0, _GRANITE_MAMBA, attention_multiplier=0.0078125),
    "granite4.0-h-micro": _granite(2048, _TYPES, (32, 8), 8192, 8.0, _GRANITE_MAMBA, mamba_n_heads=64),
    "granite4.0-h-tiny": _granite(1536, _TYPES, (12, 4), 512, 6.0, _GRANITE_TINY, shared_intermediate_size=1024),
    "granite4.0-h-small": _granite(4096, _TYPES, (32, 8), 768, 16.0, _GRANITE_SMALL, shared_intermediate_size=1536),
}
# Further names of these presets, as people write them.
ALIASES = {
    "nemotron-h-8b-8k": "nemotron-h-8b",
    "nemotron-h-8b-reasoning-128k": "nemotron-h-8b",
    "nemotron-h-47b-8k": "nemotron-h-47b",
    "nemotron-h-47b-reasoning-128k": "nemotron-h-47b",
    "nemotron-h-56b-8k": "nemotron-h-56b",
    "nvidia-nemotron-nano-9b-v2": "nemotron-nano-9b-v2",
    "nvidia-nemotron-nano-12b-v2": "nemotron-nano-12b-v2",
    "nvidia-nemotron-3-nano-30b-a3b": "nemotron-3-nano-30b-a3b",
    "nvidia-nemotron-3-nano-30b-a3b-bf16": "nemotron-3-nano-30b-a3b",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
}
TOKENIZERS = {
    "nemotron-h": "Nemotron-H",
    "nemotron-nano": "Nemotron Nano 2",
    "nemotron-3": "Nemotron 3",
    "granite4": "Granite 4",
}
