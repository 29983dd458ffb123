"""vLLM as an engine.

The package has the spec (spec.py), the engine (engine.py), vLLM's scheduler and model on a rank (core.py), and the
memory that it releases while others compute (memory.py).
"""
