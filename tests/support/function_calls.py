"""Function nodes that are called without a run."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from folders import ROOT

from msrl_graph import compile
from msrl_graph.analysis.rowsets import rowsets
from msrl_graph.ir.graph import Column, Dimension, Expr, Graph, Node, Worker
from msrl_graph.ir.options import Run
from msrl_graph.ir.plan import Deployment, Plan
from msrl_graph.model import models
from msrl_graph.runtime.data import columns, tokens
from msrl_graph.runtime.dock.messages import Batch, Share
from msrl_graph.runtime.dock.readers import ColumnRead, NodeReads
from msrl_graph.runtime.functions.function_node import FunctionNode
from msrl_graph.runtime.functions.workers import Workers, WorkerSpec
from msrl_graph.runtime.process.task import Task

EXAMPLE = ROOT / "examples" / "arithmetic"


class Letters:
    """A tokenizer of one id a letter, as the runtime calls it."""

    def __init__(self, folder, *settings):
        assert folder == "letters"

    def decode(self, rows):
        return ["".join(map(chr, row)) for row in rows]


COLUMNS = (
    Column("prompt", "i32", (Dimension(9, ragged=True),)),
    Column("answer", "text"),
    Column("response", "i32", (Dimension(9, ragged=True),), 1),
    Column("score", "f32", (), 1),
    Column("reward", "f32", (), 1),
    Column("kind", "text", (), 1),
    Column("advantage", "f32", (Dimension(like="response"),), 1),
    Column("difficulty", "f32", (), 0, per="prompt"),
    Column("notes", "json", (), 1),
    Column("level", "i32", (), 1),
    Column("right", "bool", (), 1),
)


RESPONSES = ["ab", "c", "", "def"]


READS = ("answer", "response", "score")


GENERATE = Node("actor.generate", "actor", "generate", ("prompt",), ("response",))


SCORE = Node("host.score", "host", "score", ("response",), ("score",))


@cache
def laptop():
    return compile(EXAMPLE / "grpo.rlg").cluster


def results(tmp_path, source, writes, *arguments, **more):
    """What a function in a file makes of four responses to two prompts."""
    function, batch, task = prepared(tmp_path, source, writes, *arguments, **more)
    return function(batch, task)


def prepared(
    tmp_path,
    source,
    writes,
    per="row",
    arguments=(),
    key="call",
    states=(),
    on_nan="stop",
    named="",
    prompts=2,
    on_failure="stop",
    given=(),
    workers=0,
    **more,
):
    """A function in a file, called by so many workers, and four responses to two prompts."""
    (tmp_path / "mine.py").write_text(source)
    keys = tuple(k for k, _ in arguments)
    node = Node(
        "host.mine", "host", "mine", READS, writes, per,
        {
            key: Expr("call", named or f"{tmp_path / 'mine.py'}:f", tuple(v for _, v in arguments), keys),
            **({} if on_failure == "stop" else {"on_failure": Expr("word", on_failure)}),
        },
        states=tuple(s.name for s in states), **more,
    )  # fmt: skip
    kinds = (Worker("actor", "policy", model="policy"), Worker("host", "function"))
    generate = replace(GENERATE, attributes={"samples": Expr("number", 4 // prompts)})
    nodes = (Node("source", "", "source", (), ("prompt", "answer")), generate, SCORE, node)
    graph = Graph("g", {}, COLUMNS, kinds, nodes, (), (prompts, 4), states=states)
    model = replace(models.load("./model", EXAMPLE), path="letters")
    plan = Plan(graph, laptop(), Deployment("d", {"policy": model}, {}, {}, {}, run=Run(seed=4, on_nan=on_nan)))
    rows = rowsets(graph)
    at = rows.nodes[node.name]
    unit = rows.units[node.name]
    reads = tuple(ColumnRead(c, rows.columns[c], "x") for c in READS)
    reader = NodeReads(node.name, reads, tuple(rows.sets), at, unit, per == "batch", (0,))
    units = np.arange(4) if per == "row" else np.arange(prompts) if per == "prompt" else np.zeros(1, int)
    sizes = np.full(len(units), 4 // len(units))
    batch = Batch(
        Share(units, sizes, np.arange(4), {}, (), 4, 4, {}, 0, True), np.arange(4),
        {
            "answer": columns.texts(["x", "x", "y", "y"]),
            "response": columns.ragged([np.array([ord(c) for c in r]) for r in RESPONSES], np.int32),
            "score": columns.ColumnData(np.array([1, 2, 3, 4], np.float32)),
            "rate": columns.ColumnData(np.array([0.25, 0.25, 0.5, 0.5])),
            **dict(given),
        },
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "Tokens", Letters)
        of = (
            Workers(workers, WorkerSpec("", plan.to_json(), {node.name: reader}, f"{tmp_path}/note"))
            if workers
            else None
        )
        function = FunctionNode(node, plan, reader, workers=of)
    return function, batch, Task("train", 7, prompts, states={"coef": 2.0})


def call(tmp_path, source, writes, per="row", arguments=(), **more):
    return {
        name: made.column for name, made in results(tmp_path, source, writes, per, arguments, **more).columns.items()
    }
