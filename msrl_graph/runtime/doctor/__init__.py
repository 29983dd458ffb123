"""`msrl-doctor`: problems of a machine or a cluster's hosts, and the next step.

Invariant: reading (machine.py, and hosts.py for a cluster), judging and showing are separate. A rule is a pure
function from the readings of a host to findings; its file also states what has to be read.
"""
