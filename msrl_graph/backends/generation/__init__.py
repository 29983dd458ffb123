"""Generation code that does not depend on the engine that computes the logits.

- sampling.py: draws tokens.
- continuous.py: fills the places of a batch with new sequences.
- stops.py: finds the strings that end a response.
- segments.py: generates responses in parts.
"""
