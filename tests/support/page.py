"""The page's program (Qwen2.5-32B on two hosts of 8 Ascend 910C) as data, so that passes are tested without the
parser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msrl_graph.backends import ENGINES
from msrl_graph.hardware.cluster import ClusterSpec, Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.ir.graph import Column, Dimension, Edge, Expr, Graph, Node, Worker
from msrl_graph.ir.options import Run
from msrl_graph.ir.plan import DataSource, Deployment, EngineChoice, Plan
from msrl_graph.model.models import load
from msrl_graph.passes.order import passes
from msrl_graph.planner.place import PlaceNodes
from msrl_graph.sharding.layout import Layout


def number(value: float) -> Expr:
    return Expr("number", value)


def graph(prompts: int = 256, group: int = 16, prompt_len: int = 2048, response_len: int = 8192) -> Graph:
    like = (Dimension(like="response"),)
    call = {"reward": Expr("call", "math_verify"), "advantage": Expr("call", "group_norm")}
    return Graph(
        name="grpo",
        params={
            "prompts": prompts,
            "group": group,
            "prompt_len": prompt_len,
            "response_len": response_len,
            "kl_coef": 0.001,
        },
        columns=(
            Column("prompt", "i32", (Dimension(prompt_len, True),), 0),
            Column("answer", "text", (), 0),
            Column("response", "i32", (Dimension(response_len, True),), 1),
            Column("old_logp", "f32", like, 1),
            Column("ref_logp", "f32", like, 1),
            Column("reward", "f32", (), 1),
            Column("advantage", "f32", like, 1),
        ),
        workers=(
            Worker("actor", "policy", model="policy"),
            Worker("reference", "policy", True, "policy"),
            Worker("host", "function"),
        ),
        nodes=(
            Node("source", "", "source", (), ("prompt", "answer")),
            Node("actor.generate", "actor", "generate", ("prompt",), ("response",), "row", {"samples": number(group)}),
            Node("actor.infer", "actor", "infer", ("prompt", "response"), ("old_logp",)),
            Node("reference.infer", "reference", "infer", ("prompt", "response"), ("ref_logp",)),
            Node(
                "host.reward",
                "host",
                "reward",
                ("prompt", "response", "answer"),
                ("reward",),
                "row",
                {"call": call["reward"]},
            ),
            Node(
                "host.advantage",
                "host",
                "advantage",
                ("response", "reward"),
                ("advantage",),
                "prompt",
                {"call": call["advantage"]},
            ),
            Node(
                "actor.update",
                "actor",
                "update",
                ("prompt", "response", "old_logp", "ref_logp", "advantage"),
                attributes={"optimizer": Expr("call", "adamw", (number(1e-6),), ("lr",))},
            ),
        ),
        edges=(
            Edge("sample", "source", "actor.generate"),
            Edge("sample", "actor.generate", "actor.infer"),
            Edge("sample", "actor.generate", "reference.infer"),
            Edge("sample", "actor.generate", "host.reward"),
            Edge("sample", "host.reward", "host.advantage"),
            Edge("sample", "actor.infer", "actor.update"),
            Edge("sample", "reference.infer", "actor.update"),
            Edge("sample", "host.advantage", "actor.update"),
            Edge("reshard", "actor.update", "actor.generate"),
        ),
        rows=(prompts, prompts * group),
    )


CLUSTER = ClusterSpec("pod", DEVICES["ascend-910c"], 2, 8, Figure(300e6, "stated", "the file"))
DEPLOY = Deployment(
    name="grpo",
    models={"policy": load("qwen2.5-32b", Path())},
    data={"source": DataSource("source", "deepscaler.jsonl", {"prompt": "problem", "answer": "answer"})},
    layouts={"actor.update": Layout(tp=8, dp=2), "actor.generate": Layout(tp=4, dp=4)},
    engines={},
    run=Run(1000, 0),
)
# Stated, where a test counts by hand what these engines do.
LIGHT = {"actor.generate": EngineChoice("hf"), "actor.update": EngineChoice("fsdp")}
PASSES = passes(PlaceNodes(ENGINES), ENGINES)


def start(**deploy: object) -> Plan:
    return Plan(graph(), CLUSTER, replace(DEPLOY, **deploy))


def plan(start: Plan) -> Plan:
    return PASSES.apply(start)


EVALUATION = Evaluation("test", 10, ("reward",), 1, 0.0)
