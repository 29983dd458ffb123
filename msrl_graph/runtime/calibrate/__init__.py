"""Measurement of this machine's speed, in processes like the processes of a run."""
