"""Generation, whichever engine computes the logits: a token's draw (sampling.py), batches whose places are filled again
(continuous.py), where a response stops (stops.py), and responses in stretches (segments.py)."""
