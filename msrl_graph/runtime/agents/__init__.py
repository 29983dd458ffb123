"""Agents: the user's programs that send OpenAI-style requests to the policy.

The ranks of a run answer these requests through an HTTP endpoint that the run starts.
"""
