"""The driver of a run: starts processes and iterations, and saves checkpoints.

No row passes through the driver.
"""
