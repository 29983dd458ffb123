"""Presets: models that msrl_graph knows by name, so that a plan needs no folder.

Invariant: a preset's fields equal the fields of the config.json that was published with the model's weights. The
preset's parameter count equals the published parameter count (tests/model/test_presets.py).
"""

from __future__ import annotations

from . import mamba_presets


def _preset(
    architecture: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, **more: object
) -> dict[str, object]:
    dense = {"intermediate_size": intermediate} if intermediate else {}  # a mixture may have no MLP without experts
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **dense,
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
_MOONLIGHT = _DEEPSEEK | {
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
}
_KIMI_K2 = _DEEPSEEK | {
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
_GLM_EXPERTS = {
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_GLM_LARGE = _GLM_EXPERTS | {
    "use_qk_norm": True,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}
_GLM_AIR = _GLM_EXPERTS | {
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
_SMALL_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
_GRANITE = _SMALL_GRANITE | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
_SMALL_GRANITE |= {"logits_scaling": 8.0}
_LLAMA2 = {"torch_dtype": "float16"}
_QWEN3_CODER = _QWEN3_EXPERTS | {"num_experts": 160, "moe_intermediate_size": 2560}
_MISTRAL = {"head_dim": 128, "sliding_window": None}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MINIMAX = {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_PHI4_MINI = {"partial_rotary_factor": 0.75, "sliding_window": 262144}
_GLM = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
_GEMMA = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", **_TIED}
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, **_TIED}
_GEMMA2_LARGE = {"head_dim": 128, "query_pre_attn_scalar": 144}
# Of models that also read images, the parts for text.
_GEMMA3 = {"head_dim": 256, "query_pre_attn_scalar": 256, **_TIED}
_GEMMA3_LARGE = {"head_dim": 128, "query_pre_attn_scalar": 168}
_GEMMA3_LONG = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
# Gated delta nets and attention in turn. Of Qwen3.5, the parts for text.
_DELTA: dict[str, object] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}


def _state_experts(number: int, active: int, width: int, value_heads: int) -> dict[str, object]:
    experts = {"num_experts": number, "num_experts_per_tok": active, "moe_intermediate_size": width}
    return _DELTA | experts | {"shared_expert_intermediate_size": width, "linear_num_value_heads": value_heads}


PRESETS: dict[str, dict[str, object]] = {
    "qwen2-0.5b": _preset("Qwen2", 896, 24, 14, 2, 4864, 151936, **_TIED),
    "qwen2-1.5b": _preset("Qwen2", 1536, 28, 12, 2, 8960, 151936, **_TIED),
    "qwen2-7b": _preset("Qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2-72b": _preset("Qwen2", 8192, 80, 64, 8, 29568, 152064),
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
    "qwen3-coder-480b-a35b": _preset("Qwen3Moe", 6144, 62, 96, 8, 8192, 151936, **_QWEN3_CODER),
    "qwen3-next-80b-a3b": _preset("Qwen3Next", 2048, 48, 16, 2, 5120, 151936, **_state_experts(512, 10, 512, 32)),
    "qwen3.5-0.8b": _preset("Qwen3_5", 1024, 24, 8, 2, 3584, 248320, linear_num_value_heads=16, **_DELTA, **_TIED),
    "qwen3.5-4b": _preset("Qwen3_5", 2560, 32, 16, 4, 9216, 248320, linear_num_value_heads=32, **_DELTA, **_TIED),
    "qwen3.5-9b": _preset("Qwen3_5", 4096, 32, 16, 4, 12288, 248320, linear_num_value_heads=32, **_DELTA),
    "qwen3.5-27b": _preset("Qwen3_5", 5120, 64, 24, 4, 17408, 248320, linear_num_value_heads=48, **_DELTA),
    "qwen3.5-35b-a3b": _preset("Qwen3_5Moe", 2048, 40, 16, 2, 0, 248320, **_state_experts(256, 8, 512, 32)),
    "qwen3.5-122b-a10b": _preset("Qwen3_5Moe", 3072, 48, 32, 2, 0, 248320, **_state_experts(256, 8, 1024, 64)),
    "qwen3.5-397b-a17b": _preset("Qwen3_5Moe", 4096, 60, 32, 2, 0, 248320, **_state_experts(512, 10, 1024, 64)),
    "deepseek-v3-671b": _preset("DeepseekV3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK),
    "deepseek-r1-671b": _preset("DeepseekV3", 7168, 61, 128, 128, 18432, 129280, **_DEEPSEEK),
    "moonlight-16b-a3b": _preset("DeepseekV3", 2048, 27, 16, 16, 11264, 163840, **_MOONLIGHT),
    "kimi-k2-1t": _preset("DeepseekV3", 7168, 61, 64, 64, 18432, 163840, **_KIMI_K2),
    "deepseek-r1-distill-qwen-1.5b": _preset("Qwen2", 1536, 28, 12, 2, 8960, 151936),
    "deepseek-r1-distill-qwen-7b": _preset("Qwen2", 3584, 28, 28, 4, 18944, 152064),
    "deepseek-r1-distill-qwen-14b": _preset("Qwen2", 5120, 48, 40, 8, 13824, 152064),
    "deepseek-r1-distill-qwen-32b": _preset("Qwen2", 5120, 64, 40, 8, 27648, 152064),
    "deepseek-r1-distill-llama-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "deepseek-r1-distill-llama-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "deepseek-r1-0528-qwen3-8b": _preset("Qwen3", 4096, 36, 32, 8, 12288, 151936, **_QWEN3),
    "deepseek-llm-7b": _preset("Llama", 4096, 30, 32, 32, 11008, 102400),
    "deepseek-coder-6.7b": _preset("Llama", 4096, 32, 32, 32, 11008, 32256),
    "llama2-7b": _preset("Llama", 4096, 32, 32, 32, 11008, 32000, **_LLAMA2),
    "llama2-13b": _preset("Llama", 5120, 40, 40, 40, 13824, 32000, **_LLAMA2),
    "llama2-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 32000, **_LLAMA2),
    "llama3-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3.1-8b": _preset("Llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3.1-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "llama3.1-405b": _preset("Llama", 16384, 126, 128, 8, 53248, 128256),
    "llama3.2-1b": _preset("Llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **_TIED),
    "llama3.2-3b": _preset("Llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, **_TIED),
    "llama3.3-70b": _preset("Llama", 8192, 80, 64, 8, 28672, 128256),
    "tinyllama-1.1b": _preset("Llama", 2048, 22, 32, 4, 5632, 32000),
    "smollm2-135m": _preset("Llama", 576, 30, 9, 3, 1536, 49152, **_TIED),
    "smollm2-360m": _preset("Llama", 960, 32, 15, 5, 2560, 49152, **_TIED),
    "smollm2-1.7b": _preset("Llama", 2048, 24, 32, 32, 8192, 49152, **_TIED),
    "mistral-7b-v0.1": _preset("Mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096),
    "mistral-7b-v0.2": _preset("Mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=None),
    "mistral-7b-v0.3": _preset("Mistral", 4096, 32, 32, 8, 14336, 32768, sliding_window=None),
    "ministral-8b": _preset("Mistral", 4096, 36, 32, 8, 12288, 131072, head_dim=128, sliding_window=32768),
    "mistral-nemo-12b": _preset("Mistral", 5120, 40, 32, 8, 14336, 131072, **_MISTRAL),
    "mistral-small-22b": _preset("Mistral", 6144, 56, 48, 8, 16384, 32768, **_MISTRAL),
    "mistral-small-24b": _preset("Mistral", 5120, 40, 32, 8, 32768, 131072, **_MISTRAL),
    "mistral-large-123b": _preset("Mistral", 12288, 88, 96, 8, 28672, 32768, **_MISTRAL),
    "mixtral-8x7b-v0.1": _preset("Mixtral", 4096, 32, 32, 8, 14336, 32000, **_MIXTRAL),
    "mixtral-8x22b-v0.1": _preset("Mixtral", 6144, 56, 48, 8, 16384, 32000, **_MIXTRAL),
    "mixtral-8x22b-v0.3": _preset("Mixtral", 6144, 56, 48, 8, 16384, 32768, **_MIXTRAL),
    "minimax-m2-230b-a10b": _preset("MiniMaxM2", 3072, 62, 48, 8, 1536, 200064, **_MINIMAX),
    "gpt-oss-20b": _preset("GptOss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, **_GPT_OSS),
    "gpt-oss-120b": _preset("GptOss", 2880, 36, 64, 8, 2880, 201088, num_local_experts=128, **_GPT_OSS),
    "olmo2-1b": _preset("Olmo2", 2048, 16, 16, 16, 8192, 100352),
    "olmo2-7b": _preset("Olmo2", 4096, 32, 32, 32, 11008, 100352),
    "olmo2-13b": _preset("Olmo2", 5120, 40, 40, 40, 13824, 100352),
    "olmo2-32b": _preset("Olmo2", 5120, 64, 40, 8, 27648, 100352),
    "smollm3-3b": _preset("SmolLM3", 2048, 36, 16, 4, 11008, 128256),
    "granite3.0-2b": _preset("Granite", 2048, 40, 32, 8, 8192, 49155, **_SMALL_GRANITE, **_TIED),
    "granite3.0-8b": _preset("Granite", 4096, 40, 32, 8, 12800, 49155, **_GRANITE, **_TIED),
    "granite3.3-2b": _preset("Granite", 2048, 40, 32, 8, 8192, 49159, **_SMALL_GRANITE, **_TIED),
    "granite3.3-8b": _preset("Granite", 4096, 40, 32, 8, 12800, 49159, **_GRANITE, **_TIED),
    "seed-oss-36b": _preset("SeedOss", 5120, 64, 80, 8, 27648, 155136, head_dim=128),
    "phi3-mini-4k": _preset("Phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=2047),
    "phi3-mini-128k": _preset("Phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=262144),
    "phi3-medium-4k": _preset("Phi3", 5120, 40, 40, 10, 17920, 32064, sliding_window=2047),
    "phi3-medium-128k": _preset("Phi3", 5120, 40, 40, 10, 17920, 32064, sliding_window=131072),
    "phi3.5-mini": _preset("Phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=262144),
    "phi4-14b": _preset("Phi3", 5120, 40, 40, 10, 17920, 100352),
    "phi4-mini": _preset("Phi3", 3072, 32, 24, 8, 8192, 200064, **_PHI4_MINI, **_TIED),
    "glm4-9b-hf": _preset("Glm", 4096, 40, 32, 2, 13696, 151552, **_GLM),
    "glm4-9b-0414": _preset("Glm4", 4096, 40, 32, 2, 13696, 151552, **_GLM),
    "glm4-32b-0414": _preset("Glm4", 6144, 61, 48, 2, 23040, 151552, **_GLM | {"attention_bias": False}),
    "glm4.5-355b-a32b": _preset("Glm4Moe", 5120, 92, 96, 8, 12288, 151552, **_GLM_LARGE),
    "glm4.5-air-106b-a12b": _preset("Glm4Moe", 4096, 46, 96, 8, 10944, 151552, **_GLM_AIR),
    "olmo3-7b": _preset("Olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096),
    "olmo3-32b": _preset("Olmo3", 5120, 64, 40, 8, 27648, 100278, sliding_window=4096),
    "gemma-2b": _preset("Gemma", 2048, 18, 8, 1, 16384, 256000, **_GEMMA),
    "gemma-7b": _preset("Gemma", 3072, 28, 16, 16, 24576, 256000, **_GEMMA),
    "gemma2-2b": _preset("Gemma2", 2304, 26, 8, 4, 9216, 256000, **_GEMMA2),
    "gemma2-9b": _preset("Gemma2", 3584, 42, 16, 8, 14336, 256000, **_GEMMA2),
    "gemma2-27b": _preset("Gemma2", 4608, 46, 32, 16, 36864, 256000, **_GEMMA2 | _GEMMA2_LARGE),
    "gemma3-270m": _preset("Gemma3", 640, 18, 4, 1, 2048, 262144, **_GEMMA3, sliding_window=512),
    "gemma3-1b": _preset("Gemma3", 1152, 26, 4, 1, 6912, 262144, **_GEMMA3, sliding_window=512),
    "gemma3-4b": _preset("Gemma3", 2560, 34, 8, 4, 10240, 262208, **_GEMMA3, **_GEMMA3_LONG),
    "gemma3-12b": _preset("Gemma3", 3840, 48, 16, 8, 15360, 262208, **_GEMMA3, **_GEMMA3_LONG),
    "gemma3-27b": _preset("Gemma3", 5376, 62, 32, 16, 21504, 262208, **_GEMMA3 | _GEMMA3_LARGE, **_GEMMA3_LONG),
    **mamba_presets.PRESETS,
    "tiny": _preset("Qwen2", 128, 4, 4, 2, 448, 512, torch_dtype="float32"),
}
# The tokenizer of presets, by a prefix of the preset's name. All sizes of a series share one; `tiny` has none.
TOKENIZERS = {
    "qwen2": "Qwen2",
    "qwen2.5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3.5": "Qwen3.5",
    "deepseek": "DeepSeek-V3",
    "moonlight": "Moonlight",
    "kimi-k2": "Kimi K2",
    "deepseek-r1-distill-qwen": "DeepSeek-R1-Distill-Qwen",
    "deepseek-r1-distill-llama": "DeepSeek-R1-Distill-Llama",
    "deepseek-r1-0528-qwen3": "DeepSeek-R1-0528-Qwen3",
    "deepseek-llm": "DeepSeek LLM",
    "deepseek-coder": "DeepSeek Coder",
    "llama2": "Llama 2",
    "llama3": "Llama 3",
    "tinyllama": "Llama 2",
    "smollm2": "SmolLM2",
    "mistral-7b-v0.1": "Mistral v1",
    "mistral-7b-v0.2": "Mistral v1",
    "mistral-7b-v0.3": "Mistral v3",
    "mistral-small-22b": "Mistral v3",
    "mistral-large": "Mistral v3",
    "mistral-nemo": "Mistral Tekken v3",
    "ministral": "Mistral Tekken v3",
    "mistral-small-24b": "Mistral Tekken v7",
    "mixtral": "Mistral v1",
    "mixtral-8x22b-v0.3": "Mistral v3",
    "minimax-m2": "MiniMax-M2",
    "gpt-oss": "gpt-oss",
    "olmo2": "OLMo 2",
    "smollm3": "SmolLM3",
    "granite3": "Granite 3",
    "seed-oss": "Seed-OSS",
    "gemma": "Gemma",
    "gemma3": "Gemma 3",
    "olmo3": "OLMo 3",
    "phi3": "Phi-3",
    "phi4-14b": "Phi-4",
    "phi4-mini": "Phi-4-mini",
    "glm4": "GLM-4",
    "glm4.5": "GLM-4.5",
    **mamba_presets.TOKENIZERS,
}
