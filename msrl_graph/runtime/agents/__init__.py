"""Agents: programs of the user's that ask the policy over an endpoint of the run, as they would ask OpenAI's."""
