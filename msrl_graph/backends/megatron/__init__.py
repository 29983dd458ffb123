"""Megatron-Core as an engine.

The package has the spec (spec.py), the engine (engine.py), a chunk of its layers (chunk.py), the changes for latent
attention (latent_attention.py), host cores in place of a CUDA device (cpu.py), and the memory account (peaks.py).
"""
