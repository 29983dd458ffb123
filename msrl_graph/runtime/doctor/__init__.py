"""`msrl-doctor`: finds problems of a machine or cluster, and says how to fix them.

Invariant: three steps are separate: reading facts from the machines (machine.py, and hosts.py for a cluster), judging
these readings by rules, and showing the findings. A rule is a pure function from the readings of a host to findings.
The file of a rule also states which readings the rule needs.
"""
