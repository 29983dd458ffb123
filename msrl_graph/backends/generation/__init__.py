"""Generation, whichever engine computes the logits.

It draws tokens (sampling.py), refills the places of a batch (continuous.py), finds where a response stops (stops.py),
and generates responses in stretches (segments.py).
"""
