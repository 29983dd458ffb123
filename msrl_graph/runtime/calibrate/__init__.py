"""Measurement of this machine's speed, in the same kinds of processes as a run."""
