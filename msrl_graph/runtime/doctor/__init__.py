"""`msrl-doctor`: problems of a machine or a cluster's hosts, and the next step.

Invariant: three tasks are separate: reading the machines (machine.py, and hosts.py for a cluster), judging the
readings, and showing the findings. A rule is a pure function from the readings of a host to findings. The file of a
rule also states which readings the rule needs.
"""
