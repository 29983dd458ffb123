"""vLLM as an engine: the engine (engine.py), vLLM's scheduler and model in a rank (core.py), and what it gives back
while others compute (memory.py)."""
