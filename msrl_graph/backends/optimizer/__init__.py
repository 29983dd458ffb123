"""An optimizer's step, for whichever engine trains: gradients (gradients.py), the parts of tensors that a rank steps
(shards.py), whole matrices (muon.py), and a step of all of them (steps.py)."""
