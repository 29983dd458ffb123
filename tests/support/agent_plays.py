"""Agents that are run without a rank."""

import numpy as np

from msrl_graph.runtime.agents.rank_protocol import AgentsFinished, BatchStart, SampleReplies, SampleReply
from msrl_graph.runtime.data.columns import texts
from msrl_graph.runtime.dock.messages import Batch

AGENT = """
import asyncio
import time
from urllib.request import Request, urlopen

def ask(base_url, api_key, prompt):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urlopen(Request(f"{base_url}/completions", f'{{"model": "policy", "prompt": "{prompt}"}}'.encode(), head)).close()


def solve(question, base_url, api_key):
    time.sleep(0.1 * len(question))
    ask(base_url, api_key, "one")
    ask(base_url, api_key, "two")


async def waits(question, base_url, api_key):
    await asyncio.to_thread(solve, question, base_url, api_key)
"""


NODE = """node actor.generate(out_question) -> out_response {{ agent = "{path}:{name}" }}
          node host.question(question) -> out_question {{ call = "{path}:ask2" }}
          source -> host.question -> actor.generate"""


def batch(questions):
    rows = np.arange(len(questions))
    columns = {"out_question": texts(questions)}
    contexts = [np.zeros(0, np.int32)] * len(questions)
    return BatchStart("train", 3, Batch(None, rows, columns), rows, contexts, 40)


async def played(agents, questions):
    """The places of each batch that was handed out, and what comes of it all; each draw is one token."""
    await agents.begin(batch(questions))
    found = await agents.next(SampleReplies())
    batches = []
    while not isinstance(found, AgentsFinished):
        batches.append([w.place for w in found])
        drawn = [SampleReply(w.number, np.array([7], np.int32), np.zeros(1, np.float32)) for w in found]
        found = await agents.next(SampleReplies(drawn))
    await agents.endpoint.stop()
    return batches, found
