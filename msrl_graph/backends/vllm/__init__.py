"""vLLM as an engine.

- spec.py: the spec.
- engine.py: the engine.
- core.py: vLLM's scheduler and model on a rank.
- route_capture.py: the routes of generated tokens, captured in vLLM's routers.
- memory.py: the memory that the engine releases while other nodes compute.
"""
