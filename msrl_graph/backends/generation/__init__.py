"""Generation code that does not depend on the engine that computes the logits.

- sampling.py: draws tokens.
- continuous.py: continuous batching, in which new sequences replace ended sequences.
- stops.py: finds the strings that end a response.
- segments.py: generates each response in several parts.
"""
