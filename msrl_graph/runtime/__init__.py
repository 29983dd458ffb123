"""What runs a plan: pools of processes on Ray, the dock, and weight resharding.

The transfer dock is under the sample edges, the allgather-swap on resharding edges.
"""
