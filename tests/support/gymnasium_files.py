"""Files with gymnasium environments, and their episodes."""

import numpy as np
from environment_stages import GROUP
from failing_stages import begun
from stage import PROMPTS, one_rank

OURS = """
import asyncio

class Game{base}:
    {async_}def reset(self, *, seed=None, options=None):
        {super}
        self.seed, self.options, self.left = seed, options, 2
        return f"{{options['answer']}}{{len(options['prompt'])}}", {{}}

    {async_}def step(self, action):
        {step}
        self.left -= 1
        ended = self.left == 0
        won, lost = ended and action == "1", ended and action != "1"
        return f"={{action}}", len(action) / 4, won, lost, {{"said": str(self.seed)}}

    def close(self):
        {close}
"""


def file(folder, base="", async_="", super="pass", step="pass", close="pass"):
    head = "import gymnasium\n" if "gymnasium" in base else ""
    (folder / "game.py").write_text(
        head + OURS.format(base=base, async_="async " * bool(async_), super=super, step=step, close=close)
    )
    return folder / "game.py"


def planned(path, reward="f32", more=""):
    (path.parent / "own.py").write_text("def own(response): ...")
    return one_rank(
        ("response  : i32[<= 5]", "response  : i32[<= 24]\n mask : bool[response]\n said : text"),
        ("reward    : f32\n", f"reward    : {reward}\n"),
        ("  evaluate held_out { every = 40, report = reward", "  # evaluate { report = reward"),
        (
            "node actor.generate(prompt) -> response {",
            "node actor.generate(prompt, answer) -> response, mask, said, reward {"
            f'environment = "{path}:Game", {more}',
        ),
        ("  node host.reward(response, answer) -> reward { call = exact_match() }\n", ""),
        ("host.reward\n  host.reward ->", "host.advantage\n  actor.generate ->"),
        ("host.advantage(response, reward)", "host.advantage(response)"),
        ("call = group_norm(), per = prompt", f'call = "{path.parent}/own.py:own"'),
        ("node actor.update(prompt, response,", "node actor.update(prompt, response, mask,"),
    )


def played(plan):
    """Two turns: what was said in each, and the columns."""
    episodes = begun(plan)
    rows = np.arange(len(PROMPTS) * GROUP)
    first = episodes.reset()
    one, two = (episodes.step(rows, ["1" if i % 2 else "12"[:turn] for i in rows], turn) for turn in (1, 2))
    stay = episodes.end({"response": np.full(len(rows), 8)})
    return [first, one, two], episodes.columns(), stay, episodes
