"""Agents: user programs that send OpenAI-style requests to the policy.

The run serves the requests at an endpoint of its own.
"""
