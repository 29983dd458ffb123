"""Optimizer steps, for any engine that trains.

- gradients.py: sums of gradients, over micro-batches and over ranks.
- shards.py: the tensors, or parts of tensors, that a rank updates by one update rule.
- muon.py: updates of whole matrices.
- steps.py: an optimizer step of all parameters.
- step_calls.py: the number of operators in an optimizer step.
"""
