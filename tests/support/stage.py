"""A rank without Ray and without a dock: nodes are handed their rows, and what they write is looked at."""

from pathlib import Path

import numpy as np
import torch

from msrl_graph import compile
from msrl_graph.backends import hf_modules
from msrl_graph.ir.plan import MICRO_BATCH
from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, concatenate_rows, ragged
from msrl_graph.runtime.dock.messages import Batch, Share
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import NodeBatch, RankContext
from msrl_graph.runtime.rank.rank import Rank

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
HIDDEN = ("response.logp", "response.begins")  # columns that only the dock knows
PROMPTS = [
    np.array([6, 10, 13, 7, 11, 15]),
    np.array([3, 13, 4, 15]),
    np.array([12, 13, 12, 12, 15]),
    np.array([5, 13, 5, 15]),
]


def share(rows, most, whole, elements):
    """A share of a round of `whole` rows, each a unit; the largest share has `most`."""
    return Share(rows, np.ones(len(rows), int), rows, {}, (), most, whole, elements, 0, True)


def limit_micro_batch(plan, node, size, option="micro_batch"):
    """Limit a node's micro-batches as its engine's `option` does; 0: all rows at once."""
    options = plan.placement(node).engine.options
    for name in MICRO_BATCH:
        options.pop(name, None)
    options[option] = size


def one_rank(*changes):
    """The example's plan on one rank, 4 prompts with 2 responses, its text changed."""
    text = (EXAMPLE / "grpo.rlg").read_text()
    for old, new in [
        ("devices_per_node = 2", "devices_per_node = 1"),
        ("{ dp = 2, zero = 3 }", "{ dp = 1 }"),
        ("{ tp = 2 }", "{ dp = 1 }"),
        ("mini_batch = 256", "mini_batch = 4"),
        *changes,
    ]:
        assert old in text, old
        text = text.replace(old, new)
    return compile(EXAMPLE / "grpo.rlg", text=text, sets={"prompts": "4", "group": "2"})


class Stage(Rank):
    """Needs a process group."""

    def __init__(self, plan, rank=0):
        super().__init__(RankContext(plan, rank))
        self.told = Report("rank")
        self.build()
        for name, generator in self.engines.generators.items():
            hf_modules.fill(plan.model(name), generator.allocate())
            self.generator = generator

    @property
    def plan(self):
        return self.context.plan

    def act(self, name, columns, rows=None, task="train"):
        """What a node writes, handed these columns."""
        node = self.plan.graph.node(name)
        columns = {c: columns[c] for c in (*node.reads, *node.states, *HIDDEN) if c in columns}
        size = len(next(iter(columns.values())))
        rows = np.arange(size) if rows is None else rows
        elements = {c: len(column.values) for c, column in columns.items()}
        batch = Batch(share(rows, size, size, elements), rows, columns)
        written: dict[str, list[ColumnRows]] = {}
        work = NodeBatch(node, Task(task, 3, 4, {"actor.generate": 2}), batch, self.told)
        for part in self.roles[node.verb].compute(work):
            for c, made in part.items():
                written.setdefault(c, []).append(made)
        pieces = {c: concatenate_rows(made) for c, made in written.items()}
        return {c: made.column.take(np.argsort(made.rows)) for c, made in pieces.items()}

    def sampled(self):
        """Four prompts' eight responses, with all that an update reads."""
        prompts = ragged(PROMPTS, np.int32)
        columns = {
            "prompt": prompts.take(np.repeat(np.arange(4), 2)),
            **self.act("actor.generate", {"prompt": prompts}),
        }
        advantage = np.where(np.arange(8) % 2, -1.0, 1.0).repeat(columns["response"].lengths).astype(np.float32)
        return columns | {"advantage": ColumnData(advantage, columns["response"].offsets)}

    def whole(self):
        """Update weights and Adam's state, copied."""
        parts = self.engines.trainers["actor"]._optimizer.parts
        state = [v.clone() for part in parts for s in part.state.values() for v in s.values()]
        return [s.tensor.clone() for s in self.engines.trainers["actor"].shards()], state


def same(one, other):
    """Bit for bit."""
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(one, other, strict=True))
