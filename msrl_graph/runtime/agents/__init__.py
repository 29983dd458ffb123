"""Agents: the user's programs that send OpenAI-style requests to the policy.

A run starts an HTTP endpoint for these requests. The ranks of the run compute the answers.
"""
