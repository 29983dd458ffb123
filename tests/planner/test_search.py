"""The search against every combination there is, on small instances; what the file states stays; the same bytes each
time."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import page
import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.backends import ENGINES, can_build
from msrl_graph.backends.divisibility import find_misfits
from msrl_graph.backends.spec import EngineSpec
from msrl_graph.checks import layout as layout_check
from msrl_graph.checks import memory as memory_check
from msrl_graph.checks import staleness as staleness_check
from msrl_graph.checks.stage import PlanContext
from msrl_graph.compiler.pipeline import PASSES, search_unstated
from msrl_graph.emit.search_report import why_text
from msrl_graph.hardware.cluster import ClusterSpec, Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.graph import Column, Dimension, Edge, Expr, Graph, Node, Worker
from msrl_graph.ir.plan import EngineChoice, Plan, Pool
from msrl_graph.model.architecture import Model
from msrl_graph.model.models import load
from msrl_graph.planner.owners import engines as open_engines
from msrl_graph.planner.owners import owners
from msrl_graph.planner.pools import Division, divisions
from msrl_graph.planner.search import Search
from msrl_graph.planner.simplicity import Simplicity, measure_plan
from msrl_graph.sharding.layout import Layout

PAGE = TESTS / "programs" / "grpo_page.rlg"


def passed(plan: Plan, **options: float) -> Plan:
    """A plan through all passes, whatever the checks say."""
    for step in PASSES:
        plan = (replace(step, **options) if isinstance(step, Search) else step).apply(plan)
    return plan


def fits(plan: Plan) -> bool:
    return not [
        d for d in layout_check.check(plan, PlanContext(ENGINES)) if d.severity == "error"
    ] and not memory_check.check(plan, PlanContext(ENGINES))


# Against enumeration


def instance(seed: int, folder: Path) -> Plan:
    """A small program with a random model on a random cluster, its memory tight or loose."""
    draw = random.Random(seed)
    moe = draw.random() < 0.35
    heads = draw.choice([2, 4])
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen2ForCausalLM"],
        "hidden_size": heads * draw.choice([32, 64]),
        "num_hidden_layers": draw.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2]),
        "head_dim": 32,
        "intermediate_size": draw.choice([128, 192, 512]),
        "vocab_size": draw.choice([256, 1000, 4096]),
        "tie_word_embeddings": draw.random() < 0.3,
        **({"num_experts": draw.choice([4, 6]), "num_experts_per_tok": 2, "moe_intermediate_size": 64} if moe else {}),
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    model = load("./model", folder)
    hosts, each = draw.choice([(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)])
    graph = page.graph(
        draw.choice([4, 6, 8, 12]), draw.choice([1, 2, 4]), draw.choice([64, 256]), draw.choice([64, 1024])
    )
    kind = DEVICES[draw.choice(["h100", "ascend-910c", "cpu"])]
    memory = model.parameters * draw.choice([8, 14, 20, 60, 400]) + draw.choice([0, 2_000_000, 50_000_000])
    kind = replace(
        kind,
        memory=Figure(memory * (each if kind.backend == "cpu" else 1), "stated"),
        host_memory=Figure(memory * each * 4, "stated"),
    )
    if draw.random() < 0.5:  # resharding over a network that is slow beside the rest
        kind = replace(kind, fabric=None)
    cluster = ClusterSpec("some", kind, hosts, each, Figure(draw.choice([1e6, 1e8, 1e10]), "stated"))
    engines = {"actor.update": EngineChoice("fsdp", {"recompute": "none"})} if not moe and draw.random() < 0.2 else {}
    deploy = replace(page.DEPLOY, models={"policy": model}, layouts={}, engines=engines)
    if draw.random() < 0.3 and cluster.devices > 1:
        deploy = replace(
            deploy, pools=(Pool(("actor.generate",)), Pool(("actor.infer", "actor.update", "reference.infer")))
        )
    if draw.random() < 0.5 and cluster.devices == 2:
        graph = with_critic(graph)
        deploy = replace(deploy, models={"policy": model, "critic": load("tiny", folder)})
    if draw.random() < 0.4 and not deploy.pools:  # then the engine may be all that is open
        layout = Layout(dp=cluster.devices, zero=draw.choice([1, 1, 3]) if cluster.devices > 1 else 1)
        stated = draw.choice([("actor.update",), ("actor.generate",), ("actor.update", "actor.generate")])
        zero = {"actor.update": layout, "actor.generate": replace(layout, zero=1)}
        deploy = replace(deploy, layouts={n: zero[n] for n in stated})
    # Where it can be made use of: else the checks refuse it.
    if draw.random() < 0.8 and cluster.devices > 1 and (deploy.pools or not deploy.layouts):
        stale = {"staleness": Expr("number", draw.choice([1, 2]))}
        edges = (replace(e, attributes=stale) if e.kind == "reshard" else e for e in graph.edges)
        graph = replace(graph, edges=tuple(edges))
    return Plan(graph, cluster, deploy)


def with_critic(graph: Graph) -> Graph:
    """With a second update, of another model."""
    nodes = (
        *graph.nodes[:-1],
        Node("critic.infer", "critic", "infer", ("prompt", "response"), ("value",)),
        graph.nodes[-1],
        replace(
            graph.nodes[-1], name="critic.update", worker="critic", reads=("prompt", "response", "value", "advantage")
        ),
    )
    steps = ("actor.generate", "critic.infer"), ("critic.infer", "critic.update"), ("host.advantage", "critic.update")
    return replace(
        graph,
        nodes=nodes,
        edges=(*graph.edges, *(Edge("sample", src, dst) for src, dst in steps)),
        columns=(*graph.columns, Column("value", "f32", (Dimension(like="response"),), 1)),
        workers=(*graph.workers, Worker("critic", "policy", model="critic")),
    )


def meshes(model: Model, spec: EngineSpec, devices: int, host: int, zero: tuple[int, ...]) -> Iterator[Layout]:
    """Every mesh of so many devices that an engine can divide a model in, tensor parallelism within a host; of those
    that differ in etp alone the least, and no more than runs where the engine does."""
    sizes = range(1, devices + 1)
    seen = set()
    for tp, pp, dp, ep, etp, z in itertools.product(sizes, sizes, sizes, sizes, sizes, zero):
        layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, zero=z)
        axes = {a for a in ("tp", "pp", "dp", "ep", "etp") if getattr(layout, a) > 1}
        if (
            tp * pp * dp == devices
            and (dp > 1 or z == zero[0])  # of one copy all stages are the same
            and axes <= set(spec.capabilities.axes)
            and tp <= host
            and not any(find_misfits(model, spec, layout))
            and (spec.sharding.spread.can_run(layout, model) or not can_build(spec.name))
            and (tp, pp, dp, ep, z) not in seen
        ):
            seen.add((tp, pp, dp, ep, z))
            yield layout


def every(plan: Plan) -> Iterator[tuple[Division, Plan]]:
    """Every plan that could be stated where the file states nothing, with its division into pools."""
    host = plan.cluster.devices_per_node
    for division in divisions(plan):
        nodes = [n.name for n in plan.graph.nodes if n.verb in ("update", "generate")]
        home = division.pool_of("actor.update")
        if "reference.infer" not in home.nodes:
            nodes.append("reference.infer")
        choices = []
        for node in nodes:
            pool = division.pool_of(node)
            verb = node.split(".")[1]
            model = plan.model(node)
            stated = plan.deploy.engines.get(node)
            layout = plan.deploy.layouts.get(node)
            found = []
            owner = next(o for o in owners(plan, division) if o.node == node)
            for spec in open_engines(plan, owner, ENGINES):
                zero = tuple(z for z in (1, 3) if z in spec.capabilities.zero) if verb != "generate" else (1,)
                some = (
                    [spec.sharding.spread.settle_etp(layout, model)]
                    if layout is not None
                    else meshes(model, spec, pool.devices, host, zero)
                )
                found += [(x, stated or EngineChoice(spec.name)) for x in some]
            choices.append(found)
        for chosen in itertools.product(*choices):
            layouts = {n: layout for n, (layout, _) in zip(nodes, chosen, strict=True)}
            engines = {n: engine for n, (_, engine) in zip(nodes, chosen, strict=True)}
            deploy = replace(
                plan.deploy, pools=division.pools, layouts=layouts, engines={**plan.deploy.engines, **engines}
            )
            yield division, replace(plan, deploy=deploy)


def against_every(seed: int, folder: Path) -> int:
    plan = instance(seed, folder)
    seconds: list[float] = []
    simplicities: list[Simplicity] = []
    for division, stated in every(plan):
        done = passed(stated)
        assert done.search is None and done.estimate is not None
        if fits(done):
            seconds.append(done.estimate.iteration_seconds.value)
            counted = replace(done, deploy=plan.deploy)  # of what the file states nothing counts
            simplicities.append(measure_plan(counted, owners(plan, division), ENGINES))
    found = passed(plan)
    assert found.estimate is not None
    if found.search is None:
        return 0  # one device: there is one layout, and nothing to choose
    # What fits no other way in a pool may tie hosts together, or devices by context parallelism.
    tied = any(p.layout.cp > 1 or p.layout.tp > plan.cluster.devices_per_node for p in found.placements)
    assert bool(seconds) or tied if fits(found) else not seconds, seed
    if seconds:
        value = found.estimate.iteration_seconds.value
        record = found.search
        best = record.fastest_seconds
        assert record.seconds == value and record.bound <= min(seconds) * (1 + 1e-9)
        assert best <= min(seconds) * (1 + (1e-9 if record.is_proven else 0.01)), (seed, best, min(seconds))
        near = [(s, x) for s, x in zip(seconds, simplicities, strict=True) if s <= best * 1.1 * (1 - 1e-9)]
        assert value <= best * 1.1 and record.is_simplest
        if not tied:
            (division,) = (d for d in divisions(plan) if d.pools == found.pools)
            assert measure_plan(found, owners(plan, division), ENGINES) <= min(x for _, x in near), seed
            # Of a frozen node's layouts the search knows those alone that no other one beats in everything.
            apart = any(o.node == "reference.infer" for d in divisions(plan) for o in owners(plan, d))
            assert not record.optimal or len(near) == 1 or apart
    return found.search.is_proven


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_faster_than_the_fastest_or_simpler_than_the_chosen(seed: int, tmp_path: Path) -> None:
    against_every(seed, tmp_path)


@pytest.mark.slow
def test_many_against_every(tmp_path: Path) -> None:
    proven = 0
    for seed in range(4, 30):
        (folder := tmp_path / str(seed)).mkdir()
        proven += against_every(seed, folder)
    assert proven >= 15  # the others have nothing that fits


# What the file states, and what is told


def test_what_the_file_states_stays() -> None:
    """Of what is stated nothing is chosen anew, whatever would be quicker."""
    layouts = {"actor.update": Layout(tp=2, dp=8, zero=3)}
    engines = {
        "actor.generate": EngineChoice("hf", {"micro_batch": 4}),
        "actor.update": EngineChoice("fsdp", {"recompute": "full"}),
    }
    found = passed(page.start(layouts=layouts, engines=engines))
    update = found.placement("actor.update")
    generate = found.placement("actor.generate")
    assert update.layout == layouts["actor.update"] and update.engine.options["recompute"] == "full"
    assert (generate.engine.name, generate.engine.options["micro_batch"]) == ("hf", 4)
    assert found.search is not None and set(found.search.best.layouts) == {"actor.generate", "actor.update"}
    assert [p.name for p in found.pools] == ["devices"], "a stated layout of all devices leaves nothing to part"
    (reshard,) = passed(page.start(layouts={}, reshard=replace(page.DEPLOY.reshard, order="staged"))).reshards
    assert reshard.order == "staged"


def test_places_and_what_stays_together_are_kept() -> None:
    def pools(**deploy: object) -> list[tuple[str, ...]]:
        plan = replace(page.start(layouts={}, **deploy), cluster=replace(page.CLUSTER, nodes=1, devices_per_node=4))
        plan = replace(plan, deploy=replace(plan.deploy, models={"policy": load("qwen2.5-7b", Path())}))
        return [(p.name, *p.nodes) for p in passed(plan).pools]

    parted = Pool(("actor.generate",), 3, 1), Pool(("actor.infer", "reference.infer", "actor.update"), 0, 3)
    assert pools(pools=parted) == [("devices 0..2", *parted[1].nodes), ("device 3", "actor.generate")]
    every = tuple(n.name for n in page.graph().nodes if n.verb in ("generate", "infer", "update"))
    for division in divisions(replace(page.start(layouts={}, together=(every,)))):
        assert [set(p.nodes) for p in division.pools] == [set(every)]
    for division in divisions(replace(page.start(layouts={}, together=(("actor.generate", "reference.infer"),)))):
        assert division.pool_of("actor.generate") == division.pool_of("reference.infer")


def test_a_file_that_states_all_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrl_graph.planner.search._Run", None)
    text = PAGE.read_text(encoding="utf-8")
    assert compile(PAGE, text=text.replace("  run {", "  engine actor.update = fsdp\n  run {")).search is None


def open_page() -> str:
    return "\n".join(line for line in PAGE.read_text(encoding="utf-8").split("\n") if "layout " not in line)


def test_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "open.rlg").write_text(open_page(), encoding="utf-8")
    command = [sys.executable, "-m", "msrl_graph.cli", str(tmp_path / "open.rlg"), "--format", "json"]
    runs = [
        subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=True).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and b'"reason": "generation without pipeline stages"' in runs[0]


def test_a_model_without_experts_is_divided_over_tp_where_its_engine_runs() -> None:
    """What an engine runs of experts says nothing of a model that has none."""
    program = """import grpo
cluster pod { device = "h100", nodes = 2, devices_per_node = 8 }
deploy grpo on pod {
  model policy = "qwen2.5-32b"
  data source = "train.jsonl" { prompt = "problem" }
}
"""
    with warnings.catch_warnings(action="ignore"):
        found = compile("p.rlg", text=program).placement("actor.generate")
    assert (found.engine.name, found.layout.tp > 1) == ("vllm", True)


def test_why(golden: Callable[[str, str], None]) -> None:
    golden("grpo_open.why.txt", why_text(compile(PAGE, text=open_page())))
    stated = compile(PAGE)
    told = why_text(stated, search_unstated(stated))
    assert "the file states every layout" in told and "less than the" in told


def test_runners_up_lose_by_what_their_phases_take_longer() -> None:
    found = compile(PAGE, text=open_page()).search
    assert found is not None and len(found.runners) >= 5
    assert len({(r.pools, *r.layouts.items()) for r in (found.best, *found.runners)}) == len(found.runners) + 1
    for runner in found.runners:
        if runner.exact:  # all states share all devices: one after another
            hidden = runner.loses.get("swap in (H2D)", 0.0)
            assert sum(runner.loses.values()) - hidden == pytest.approx(runner.seconds - found.seconds, abs=0.3)


def test_a_budget_ends_it_with_a_gap() -> None:
    plan = replace(page.start(layouts={}), cluster=replace(page.CLUSTER, nodes=6))
    found = passed(plan, budget=0.0)
    assert found.search is not None and found.search.ended == "the budget of 0 s" and not found.search.is_proven
    assert found.search.bound <= found.search.seconds and not found.search.optimal and 0 < found.search.gap <= 1
    assert fits(found) and "no other is better by more than" in found.placement("actor.update").reason


def test_what_nothing_fits_is_told(tmp_path: Path) -> None:
    plan = passed(replace(page.start(layouts={}), cluster=replace(page.CLUSTER, nodes=1, devices_per_node=1)))
    assert plan.search is not None and not plan.search.seconds and plan.search.ended == "nothing fits"
    assert memory_check.check(plan, PlanContext(ENGINES)) and "nothing that fits was found" in why_text(plan)


def test_staleness_where_nothing_is_parted_is_compared_with_the_same_in_step() -> None:
    """Here all states together are the quickest, with it and without. The other way round:
    tests/ir/test_async_schedule.py."""
    graph = page.graph()
    edges = tuple(
        replace(e, attributes={"staleness": Expr("number", 1)}) if e.kind == "reshard" else e for e in graph.edges
    )
    start = replace(page.start(layouts={}), cluster=replace(page.CLUSTER, nodes=2))
    found = passed(replace(start, graph=replace(graph, edges=edges)))
    plain = passed(start)
    record = found.search
    assert record is not None and record.rival is not None and plain.search is not None
    assert found.estimate is not None and found.estimate.staleness is not None and not record.rival.ahead
    assert record.seconds <= record.rival.seconds == plain.search.seconds
    assert found.placements == plain.placements
    assert not staleness_check.check(found, PlanContext(ENGINES))
    (note,) = (n.text for n in found.notes if n.about == "staleness")
    assert note.startswith("with all pools in step, the best plan found") and "weights are 1 version old" in note


def parted(program: str, device: str, hosts: int, parting: str) -> Plan:
    """A program of tests/programs with staleness, on a cluster of hosts with 8 devices, its pools stated so or not at
    all."""
    text = (PAGE.parent / f"{program}.rlg").read_text(encoding="utf-8").split("cluster ")[0]
    text = re.sub(r"actor.update => actor.generate( \{.*\})?", "actor.update => actor.generate { staleness = 1 }", text)
    models = ["policy", *(["value", "reward_model"] if program == "ppo" else [])]
    deploy = [*(f'model {m} = "llama3-8b"' for m in models), parting, "run { iterations = 1 }"]
    data = 'data source = "rows.jsonl" { prompt = "p"' + (" }" if program == "ppo" else ', answer = "a" }')
    cluster = f'cluster pod {{ device = "{device}", nodes = {hosts}, devices_per_node = 8 }}'
    name = "ppo" if program == "ppo" else "async_grpo"
    body = "\n  ".join(filter(None, [data, *deploy]))
    return compile(f"{program}.rlg", text=f"{text}\n{cluster}\ndeploy {name} on pod {{\n  {body}\n}}\n")


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize(
    ("program", "partings"),
    [
        ("async", ["actor.generate, actor.update", "actor.generate, reference.infer, actor.update"]),
        pytest.param("ppo", ["actor.generate, actor.update", "critic.update, actor.update"], marks=pytest.mark.slow),
    ],
)
def test_stale_and_unstated_is_as_quick_as_any_parting_that_is_stated(program: str, partings: list[str]) -> None:
    open_ = parted(program, "h100", 4, "").search
    assert open_ is not None and open_.evaluated < 60 and not any(r.wrong for r in open_.runners)
    assert open_.is_proven == (program == "async") and open_.fastest_seconds <= 1.003 * open_.bound
    for parting in partings:
        stated = parted(program, "h100", 4, f"apart {parting}").search
        assert stated is not None and open_.fastest_seconds <= stated.fastest_seconds * (1 + 1e-9), parting


def test_a_budget_lets_a_search_go_on_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msrl_graph.planner.search.EFFORT", 1.0)
    plan = replace(page.start(layouts={}), cluster=replace(page.CLUSTER, nodes=3))
    short = passed(plan).search
    long = passed(plan, budget=300.0).search
    assert short is not None and short.ended == "the search's limit" and not short.is_proven
    assert long is not None and not long.ended and long.is_proven
