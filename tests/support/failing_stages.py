"""Programs whose environments fail."""

import numpy as np
from environment_stages import ANSWERS, GROUP, program
from stage import PROMPTS, share

from msrl_graph.runtime.data.columns import ragged, texts
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.functions.environments import EnvironmentClass
from msrl_graph.runtime.process.task import Task


def planned(path, on_failure, *changes):
    """`drop_row` breaks groups: there advantages are each row's own."""
    (path.parent / "own.py").write_text("def own(response, reward): ...")
    rows = ("call = group_norm(), per = prompt", f'call = "{path.parent}/own.py:own"')
    changes = (*changes, rows) if on_failure == "drop_row" else changes
    return program(path, *changes, more=f"timeout = 8 s, on_failure = {on_failure},")


def begun(plan):
    """The episodes of all rows, without a policy."""
    environment = EnvironmentClass(plan.graph.node("actor.generate"), plan)
    environment.start()
    columns = {"prompt": ragged(PROMPTS, np.int32), "answer": texts(ANSWERS)}
    rows = np.arange(len(PROMPTS))
    batch = Batch(share(rows, 4, 4, {}), rows, columns)
    return environment.begin(batch, np.arange(len(PROMPTS) * GROUP), Task("train", 3, 4, 2))
