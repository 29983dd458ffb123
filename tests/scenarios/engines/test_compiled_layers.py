"""Compiled layers compute what eager ones do; what cannot be compiled is refused."""

from pathlib import Path
from types import MappingProxyType

import engines
import numpy as np
import pytest
import ranks
import torch
from mixture import WINDOWED
from offloaded import batches, loss, model, stepped

from msrl_graph import compile
from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.diagnostics import Fault
from msrl_graph.sharding.layout import Layout

LAYOUTS = [Layout(), pytest.param(Layout(dp=2, zero=3), marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_layers_compute_the_same(layout, tmp_path):
    ranks.run(layout.devices, _alike, str(tmp_path), layout)


@pytest.mark.slow
def test_so_do_layers_with_windows(tmp_path):
    ranks.run(1, _alike, str(tmp_path), Layout(), WINDOWED)


def _alike(rank, _, folder, layout, changes=MappingProxyType({})):
    of = model(Path(folder) / str(rank), torch.float32, **changes)
    at = engines.mesh(layout)
    found = []
    stats = torch._dynamo.utils.counters["stats"]
    for compiled in ("none", "layers"):
        engine = engines.built("fsdp", of, layout, rank, at, adamw(lr=0.0), compile=compiled)
        graphs = stats["unique_graphs"]
        logps = []

        def told(made, i, logps=logps):
            logps.append(made.logp.detach())
            return loss(made, i)

        found.append((stepped(engine, batches(layout, rank), 2, told), logps))
        assert (stats["unique_graphs"] > graphs) == (compiled == "layers")
    (norms, eager), (others, fused) = found
    for one, other in zip(eager, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    np.testing.assert_allclose(norms, others, rtol=1e-4)


TEXT = """import grpo
cluster one {{ device = "h100", nodes = 1, devices_per_node = 4 }}
deploy grpo on one {{
  set prompt_len = 128
  set response_len = 512
  model policy = "{model}"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update {{ {layout} }}
  layout actor.generate {{ tp = 2, dp = 2 }}
  engine {nodes} = fsdp {{ {stated} }}
}}
"""


def planned(model, layout, stated="compile = layers", nodes="actor.update, reference.infer", **sets):
    text = TEXT.format(model=model, layout=layout, stated=stated, nodes=nodes)
    return compile("compiled.rlg", text=text.replace("  layout actor.update {  }\n", ""), sets=sets)


@pytest.mark.parametrize(
    ("model", "layout", "nodes", "message", "help", "mended"),
    [
        (
            "qwen2.5-7b",
            "tp = 2, dp = 2",
            "actor.update",
            "the engine `fsdp` of `actor.update` cannot compile layers that tp shards",
            "leave `compile` out, or tp at 1",
            [("tp = 2, dp = 2", "recompute = full"), ("dp = 4, zero = 3", "compile = layers")],
        ),
        (
            "qwen3-30b-a3b",
            "dp = 4, zero = 3, ep = 4",
            "actor.update",
            "the engine `fsdp` of `actor.update` cannot compile the experts of `qwen3-30b-a3b`",
            "leave `compile` out",
            [("dp = 4, zero = 3, ep = 4", "recompute = full")],
        ),
        (  # which takes the layout of the update
            "qwen2.5-7b",
            "tp = 2, dp = 2",
            "reference.infer",
            "the engine `fsdp` of `reference.infer` cannot compile layers that tp shards",
            "leave `compile` out, or tp at 1",
            [("tp = 2, dp = 2", "recompute = full"), ("dp = 4", "compile = layers")],
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(model, layout, nodes, message, help, mended):
    def told(*stated):
        try:
            planned(model, *stated, nodes=nodes)
        except Fault as fault:
            return {(d.code, d.message, d.help) for d in fault.diagnostics}
        return set()

    assert ("layout-divide", message, help) in told(layout)
    for stated in mended:
        assert not any(code == "layout-divide" for code, _, _ in told(*stated))


def test_the_planner_gives_compiled_layers_no_tp():
    few = {"prompts": "2", "group": "1"}  # rows, which leave a tp or a cp of 2 to four devices
    tp, cp = (planned("qwen2.5-7b", "", f"compile = {how}", **few) for how in ("none", "layers"))
    assert tp.placement("actor.update").layout.tp > 1
    assert all(cp.placement(node).layout.tp == 1 for node in ("actor.update", "reference.infer"))


def test_a_plan_takes_compiled_layers_for_fused_ones():
    eager, fused = (planned("qwen2.5-7b", "dp = 4, zero = 3", f"compile = {how}") for how in ("none", "layers"))
    by_name = [{p.name: p.seconds for p in plan.estimate.phases} for plan in (eager, fused)]
    for node in ("actor.update", "actor.infer", "reference.infer"):
        assert by_name[1][node].value <= by_name[0][node].value
        assert "operators x launch" in by_name[0][node].basis
        assert "layers x 12 x launch" in by_name[1][node].basis
    assert by_name[0]["actor.generate"] == by_name[1]["actor.generate"]
