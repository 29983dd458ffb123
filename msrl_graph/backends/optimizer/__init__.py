"""Optimizer steps, for any engine that trains.

They consist of gradients (gradients.py), the parts of tensors that a rank steps (shards.py), whole matrices
(muon.py), and a step of all parameters (steps.py). step_calls.py has the operator counts of a step.
"""
