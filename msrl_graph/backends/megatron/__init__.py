"""Megatron-Core as an engine.

- spec.py: the spec.
- engine.py: the engine.
- chunk.py: the module of some consecutive layers of a model.
- layer_config.py: Megatron's config of the layers.
- weight_names.py: this package's and Megatron's names of weights.
- stage_adapters.py: LoRA adapters in Megatron's linear layers.
- latent_attention.py: changes to Megatron's modules for latent attention.
- stage_routers.py: routes in Megatron's routers, recorded or replayed.
- cpu.py: patches that replace a CUDA device by host cores.
- peaks.py: the bytes of memory at each moment of a pass.
"""
