"""Megatron-Core as an engine: the engine (engine.py), a chunk of its layers (chunk.py), what latent attention changes
in them (latent_attention.py), how a host's cores stand in for a device of Megatron's (cpu.py), and the account of its
memory (peaks.py)."""
