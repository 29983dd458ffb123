"""What runs a plan: pools of processes on Ray, the transfer dock under the sample edges, the allgather-swap on
resharding edges."""

from .process import parsing

parsing.one_at_a_time()  # every process of a run imports this package, before it has threads of its own
