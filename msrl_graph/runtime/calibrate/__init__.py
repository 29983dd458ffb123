"""Measurement of this machine's speed, in processes like those of a run."""
