"""What runs a plan: pools of processes on Ray, the transfer dock under the sample edges, the allgather-swap on
resharding edges."""
