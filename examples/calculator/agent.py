"""The agent of agent.rlg: adds three numbers with a calculator, with pydantic-ai."""

import re

import httpx2
from calculator import add
from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(retries=0)
# One client for all rows: creating it takes longer than all its requests.
http = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))


@agent.tool_plain
def calculator(expression: str) -> str:
    """The sum of two numbers of up to three digits, as `12+34`."""
    return add(re.sub(r"<\w+>", "", expression))


async def solve(prompt: str, answer: str, base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the agent's answer is right.

    An agent that has no answer within three turns or the context length gets 0.
    """
    policy = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http))
    try:
        result = await agent.run(prompt, model=policy)
    except AgentRunError:
        return 0.0
    return float(result.output == answer)


def calls(text: str):
    """Return the text without tool calls, and the calls (sums that end with `=`)."""
    return ("", [("calculator", {"expression": text[:-1]})]) if text.endswith("=") else (text, [])
