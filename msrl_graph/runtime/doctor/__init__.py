"""What is wrong with a machine, or with the hosts of a cluster, and the next step: `msrl-doctor`.

Invariant: reading (machine.py, and hosts.py of a cluster), judging and showing are apart. A rule is a pure function
from what was read of a host to findings; what it wants to have read stands in its file.
"""
