"""Megatron-Core as an engine.

- spec.py: the spec.
- engine.py: the engine.
- chunk.py: a chunk of a model's layers.
- latent_attention.py: the changes for latent attention.
- cpu.py: patches that replace a CUDA device by host cores.
- peaks.py: the memory account.
"""
