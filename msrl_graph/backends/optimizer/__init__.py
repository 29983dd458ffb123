"""Optimizer steps, for any engine that trains.

- gradients.py: the gradients of a step.
- shards.py: the parts of tensors that a rank updates.
- muon.py: updates of whole matrices.
- steps.py: a step of all parameters.
- step_calls.py: the operator counts of a step.
"""
