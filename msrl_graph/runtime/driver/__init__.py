"""The driver of a run: starts processes, iterations and checkpoints.

No sample passes through the driver.
"""
