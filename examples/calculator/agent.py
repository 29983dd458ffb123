"""An agent that adds three numbers with a calculator, by pydantic-ai: of agent.rlg."""

import re

import httpx2
from calculator import added
from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(retries=0)
# One for all rows: to make one takes longer than all that it is used for.
http = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))


@agent.tool_plain
def calculator(expression: str) -> str:
    """The sum of two numbers of up to three digits, as `12+34`."""
    return added(re.sub(r"<\w+>", "", expression))


async def solve(prompt: str, answer: str, base_url: str, api_key: str, model: str) -> float:
    """1 if the agent's answer is right. One that comes to none, in three turns or in the room that there is, is not."""
    policy = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http))
    try:
        result = await agent.run(prompt, model=policy)
    except AgentRunError:
        return 0.0
    return float(result.output == answer)


def calls(text: str):
    """What is said beside calls of tools, and the calls: a sum that ends with `=` is one."""
    return ("", [("calculator", {"expression": text[:-1]})]) if text.endswith("=") else (text, [])
