"""Features of models: what an engine must implement to compute a model.

A family (families/) says which features a model has, and an engine's spec says which features the engine can run. So
an engine never names a family.

Invariant: the compiler knows the sizes of a model whose features are in FEATURES, so it can plan the model for any
engine of this package. A run also needs engines that have the features (compiler/unsupported.py). The keys are the
names in specs and plans, the values are the words in messages.
"""

from __future__ import annotations

FEATURES = {
    "qkv_bias": "biases of queries, keys and values",
    "output_bias": "a bias of the attention's output",
    "mlp_bias": "biases in MLPs",
    "head_norms": "norms of the heads of queries and keys",
    "joint_norms": "norms of all queries' and of all keys' heads together",
    "sliding_window": "sliding windows of attention",
    "no_rope": "layers without rotary positions",
    "latent_attention": "latent attention",
    "latent_bias": "biases in latent attention",
    "output_gate": "attention with output gates",
    "gated_delta_net": "layers of gated delta nets",
    "softmax_router": "experts with a softmax router",
    "grouped_sigmoid_router": "experts with a sigmoid router that chooses groups",
    "sigmoid_router": "experts with a sigmoid router without groups",
    "clamped_experts": "experts with biases and a clamped activation",
    "shared_experts": "shared experts",
    "gated_shared_experts": "shared experts with a gate",
    "ungated_mlp": "MLPs without gates",
    "linear_mlp": "MLPs with the names `input_linear` and `output_linear` in files",
    "mamba2": "Mamba-2 layers",
    "single_layers": "layers of only a mixer or only an MLP",
    "mixed_layers": "layers of several kinds in turn",  # other than some without experts before the others
    "post_norms": "norms of outputs instead of inputs",
    "sandwich_norms": "norms of outputs in addition to inputs",
    "embedding_scale": "an embedding whose rows are scaled",
    "attention_scale": "attention scores with a scale of their own",
    "residual_scale": "outputs that are scaled before they are added to the residual",
    "logits_scale": "logits that are scaled",
    "attention_cap": "capped attention scores",
    "attention_sinks": "attention with sinks",
    "logits_cap": "capped logits",
    "offset_norms": "norms whose weights are offsets from 1",
    "tied_head": "a head that shares the embedding's weights",
    "lora": "LoRA adapters",
    "lora_dropout": "dropout in LoRA adapters",
    "rope_by_window": "rotary positions that differ between layers with and without windows",
    "rope_partial": "rotary positions of a part of each head",
    "rope_interleaved": "rotary positions of adjacent elements of a head",
    "rope_longrope": "rotary positions of the type `longrope`",
    "rope_linear": "rotary positions of the type `linear`",
    "rope_dynamic": "rotary positions of the type `dynamic`",
    "rope_yarn": "rotary positions of the type `yarn`",
    "rope_llama3": "rotary positions of the type `llama3`",
}
# What dense Llama and Qwen2 models have: the default of an engine's spec.
PLAIN = frozenset(("qkv_bias", "tied_head", "rope_linear", "rope_dynamic", "rope_yarn", "rope_llama3"))
# What some engine of this package can run, and each can plan.
SUPPORTED = frozenset(FEATURES)
