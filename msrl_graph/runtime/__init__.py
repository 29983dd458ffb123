"""Execution of a plan: pools of Ray processes, transfer dock, weight resharding.

The transfer dock carries the rows of the sample edges. The allgather-swap moves the weights of a resharding edge whose
two nodes share devices.
"""
