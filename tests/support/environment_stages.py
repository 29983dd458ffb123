"""Programs with environments, and rows that a rank draws from them."""

import numpy as np
from stage import PROMPTS, one_rank

from msrl_graph.runtime.data.columns import ragged, texts

BOUND = 24


TURNS = 3


GROUP = 2


ANSWERS = ["85", "7", "181", "4"]


TOOL = """
import time

class Tool:
    def reset(self, answer: str, rng):
        self.turn, self.answer, self.number = 0, answer, int(rng.integers(100))
        {reset}
        return f"{{self.number}}+" if len(answer) > 1 else None

    def step(self, text):
        self.turn += 1
        {step}
        over = self.turn == 2 and self.answer == "7"
        return f"={{len(text)}}{{self.number}}{{self.answer * self.turn}}+", self.turn + len(text) / 16, text, over
"""


def tool(folder, reset="pass", step="pass"):
    (folder / "tool.py").write_text(TOOL.format(reset=reset, step=step))
    return folder / "tool.py"


def program(path, *changes, more="", bound=BOUND):
    return one_rank(
        ("response  : i32[<= 5]", f"response  : i32[<= {bound}]\n mask : bool[response]\n said : text"),
        (
            "node actor.generate(prompt) -> response {",
            (
                f'node actor.generate(prompt, answer) -> response, mask, reward, said {{ environment = "{path}:Tool", '
                f"turns = {TURNS}, {more}"
            ),
        ),
        ("  node host.reward(response, answer) -> reward { call = exact_match() }\n", ""),
        ("host.reward\n  host.reward ->", "host.advantage\n  actor.generate ->"),
        ("node actor.update(prompt, response,", "node actor.update(prompt, response, mask,"),
        *changes,
    )


def drawn(stage, rows=(0, 1, 2, 3)):
    """What the generation writes of some prompts."""
    columns = {"prompt": ragged([PROMPTS[i] for i in rows], np.int32), "answer": texts([ANSWERS[i] for i in rows])}
    return stage.act("actor.generate", columns, np.array(rows))


def lists(column):
    return [column[i].tolist() for i in range(len(column))]
