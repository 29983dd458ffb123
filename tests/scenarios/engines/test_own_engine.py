"""An engine of one's own is a file and a line: it is planned for, ranks use it, what it does not honour is refused."""

from dataclasses import replace

import numpy as np
import own_engine
import pytest
import ranks
import torch
from stage import PROMPTS, Stage, one_rank
from torch import distributed as dist

from msrl_graph import compile
from msrl_graph.backends import ENGINES, fsdp, hf
from msrl_graph.backends.engine_protocols import Sampling, StepRequest, fill_fields
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.hardware.device_kinds import DEVICE_KINDS, HOST
from msrl_graph.ir.attributes import GenerateAttributes, UpdateAttributes
from msrl_graph.ir.plan import from_json
from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import RankContext
from msrl_graph.runtime.rank.engines import Engines
from msrl_graph.runtime.rank.rank import InstructionRunner

GENERATES = ("  run {", "  engine actor.generate = likeliest\n  run {")
TRAINS = ("  run {", "  engine actor.update = pairs { micro_batch = 3 }\n  run {")
TOLD = ("loss", "grad_norm", "updates", "entropy")
SLOW = ("adamw(lr = 2e-4, betas = [0.9, 0.99], weight_decay = 0, warmup = 20)", "adamw(lr = 1e-2)")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    own_engine.register(monkeypatch)


def test_what_an_engine_does_not_honour_is_refused_where_it_stands():
    plan = one_rank(GENERATES, ("temperature = 1.0 }", "temperature = 1.0, top_k = 3 }"))
    (told,) = find_unsupported(plan)
    assert told.code == "not-yet" and (told.span.line, told.help) == (23, "`engine actor.generate = hf` supports it")
    assert told.message.startswith(
        "`top_k` of `actor.generate` with the engine `likeliest` can be planned, but not run"
    )
    assert any("`top_k` with the engine `likeliest`" in note.text for note in plan.notes)
    assert find_unsupported(one_rank(GENERATES)) == []


@pytest.mark.parametrize("engine", ["likeliest", "everything"])
def test_what_few_engines_support_is_refused_for_all_others(monkeypatch, engine):
    """Also for one that lists nothing, which supports all else."""
    listless = replace(own_engine.GENERATOR.capabilities, supported_attributes=None)
    monkeypatch.setitem(ENGINES, "everything", replace(own_engine.GENERATOR, name="everything", capabilities=listless))
    states = ("temperature = 1.0 }", "temperature = 1.0, min_p = 0.1 }")
    (told,) = find_unsupported(one_rank(("  run {", f"  engine actor.generate = {engine}\n  run {{"), states))
    assert told.code == "not-yet" and (told.span.line, told.help) == (23, "`engine actor.generate = hf` supports it")
    assert told.message.startswith(
        f"`min_p` of `actor.generate` with the engine `{engine}` can be planned, but not run"
    )
    assert find_unsupported(one_rank(states)) == []
    for able in ("hf", "vllm"):
        assert find_unsupported(one_rank(("  run {", f"  engine actor.generate = {able}\n  run {{"), states)) == []


def test_what_a_node_says_is_in_the_request_by_its_name_alone():
    plan = one_rank(("temperature = 1.0 }", 'temperature = 1.0, top_k = 3, top_p = 0.5, min_p = 0.1, stop = ["="] }'))
    generation, update = (plan.graph.node(name) for name in ("actor.generate", "actor.update"))
    said = fill_fields(Sampling, GenerateAttributes.of(generation), max_tokens=7, temperature=0.5)
    assert said == Sampling(2, 7, 0.5, 0.5, 3, stop=("=",), min_p=0.1), "and what is given replaces what it says"
    assert fill_fields(StepRequest, UpdateAttributes.of(update), lr=0.1, optimizer=None) == StepRequest(0.1, 1.0)


def test_one_that_no_program_names_is_in_no_plan():
    """It would look quick: nobody has said what it calls, and how often."""
    plan = compile("grpo", model="tiny")
    assert {p.engine.name for p in plan.placements} == {"hf", "fsdp", "python"}


@pytest.mark.usefixtures("alone")
def test_a_generator_gets_new_weights_and_is_told_of_them():
    stage = Stage(one_rank(GENERATES, SLOW))
    generator = stage.engines.generators["actor.generate"]
    assert type(generator) is own_engine.Likeliest and generator.fills == 0
    assert generator.said is GenerateAttributes.of(stage.plan.graph.node("actor.generate")), (
        "what its node says is for it to read"
    )
    generator.filled()
    columns = stage.sampled()
    response = columns["response"]
    drawn = columns["response.logp"]
    assert [list(response[i]) for i in (0, 1)] == [list(response[0])] * 2, "samples of one prompt are alike"
    assert response[0][0] == generator.next[PROMPTS[0][-1]] and drawn[0][0] == generator.logp[PROMPTS[0][-1]]
    before = [s.tensor.clone() for s in generator.held]
    stage.act("actor.update", columns | {"old_logp": drawn, "ref_logp": drawn})
    InstructionRunner(stage, Task("train", 3, 4, 2), Report("")).reshard((), "actor.update", "actor.generate")
    assert generator.fills == 2
    stage.engines.swaps["actor"].wait()
    after = {s.name: s.tensor for s in stage.engines.trainers["actor"].shards()}
    assert all(torch.equal(s.tensor, after[s.name]) for s in generator.held)
    assert not all(map(torch.equal, before, (s.tensor for s in generator.held)))


@pytest.mark.usefixtures("alone")
def test_weights_of_a_trainer_that_tells_no_likeliest_tokens_are_proven_and_not_probed():
    stage = Stage(one_rank(TRAINS, SLOW))
    InstructionRunner(stage, Task("train", 3, 4, 2), report := Report("")).reshard((), "actor.update", "actor.generate")
    (proof,) = stage.engines.proofs.values()
    assert report.seconds["proof"] > 0 and not proof.unprobed and len(proof.digests) == 51
    stage.engines.swaps["actor"].wait()
    stage.engines.trainers["actor"].held[5].tensor.add_(1)  # as if it were no longer what was sent
    sent = proof.delivery.sent_digests(stage.engines.trainers["actor"].shards())
    assert proof.delivery.find_differences(proof.digests, sent) == [stage.engines.trainers["actor"].held[5].name]


def columns():
    draw = np.random.default_rng(0)
    prompts = ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2))
    responses = ragged([draw.integers(3, 13, n) for n in (1, 4, 2, 3, 5, 1, 2, 3)], np.int32)
    numbers = {name: draw.normal(size=len(responses.values)).astype(np.float32) for name in ("advantage", "a", "b")}
    logps = {
        "old_logp": -np.abs(numbers["a"]),
        "ref_logp": -np.abs(numbers["b"]),
        "advantage": numbers["advantage"],
        "response.logp": -np.abs(numbers["a"]),
    }
    return {"prompt": prompts, "response": responses} | {k: ColumnData(v, responses.offsets) for k, v in logps.items()}


def learn(rank, folder, plan, out):
    """An infer and two updates; what the rank wrote, told and holds."""
    own_engine.register()
    stage = Stage(from_json(plan), rank)
    logp = stage.act("actor.infer", columns(), task="held_out")  # nobody drew these responses
    for _ in range(2):
        stage.act("actor.update", columns())
    told = {name: total for name, total in stage.told.sums.items() if name in TOLD}
    held = {s.name: s.tensor for s in stage.engines.trainers["actor"].shards() if s.tensor.numel()}
    said = UpdateAttributes.of(stage.plan.graph.node("actor.update"))
    assert len(stage.engines.trainers["actor"].told) == 4 and all(
        t == said for t in stage.engines.trainers["actor"].told
    )
    torch.save((logp, told, held, stage.engines.trainers["actor"].calls), f"{out}/{dist.get_world_size()}-{rank}")


def test_a_pipeline_gives_what_one_stage_gives(tmp_path):
    """The order of forward and backward is the engine's: here all micro-batches forward, then the last one backward."""
    two = (
        ("devices_per_node = 1", "devices_per_node = 2"),
        ("layout actor.update   { dp = 1 }", "layout actor.update { pp = 2 }"),
        ("layout actor.generate { dp = 1 }", "layout actor.generate { dp = 2 }"),
    )
    for world, changes in ((1, ()), (2, two)):
        plan = one_rank(TRAINS, SLOW, *changes)
        assert find_unsupported(plan) == []
        ranks.run(world, learn, plan.to_json(), str(tmp_path))
    (alone, first, last) = (torch.load(tmp_path / name, weights_only=False) for name in ("1-0", "2-0", "2-1"))
    assert first[2].keys() & last[2].keys() == set() and first[2].keys() | last[2].keys() == alone[2].keys()
    for name, weight in (first[2] | last[2]).items():
        assert torch.allclose(weight, alone[2][name], rtol=0, atol=1e-6), name
    assert first[0] == {} and np.allclose(last[0]["old_logp"].values, alone[0]["old_logp"].values, atol=1e-6)
    assert alone[3] == last[3] == [2, 1, 0] * 2 and first[3] == []
    assert first[1] == {} and last[1].keys() == alone[1].keys() == {*TOLD}
    for name, (total, weight) in alone[1].items():
        assert last[1][name] == (pytest.approx(total, rel=1e-5), weight), name


@pytest.mark.parametrize(
    ("beside", "order"),
    [(True, ["generator", "trainer", "reshard"]), (False, ["trainer", "reshard", "generator", "release"])],
)
def test_where_no_group_is_made_beside_a_sleeping_engine_it_is_built_when_all_are(alone, monkeypatch, beside, order):
    """Trainers and resharding make process groups."""
    told = []
    monkeypatch.setitem(DEVICE_KINDS, HOST.name, replace(HOST, groups_beside_sleep=beside))

    def building(what, made):
        return lambda *given, **named: (told.append(what), made(*given, **named))[1]

    monkeypatch.setattr(hf.HfEngine, "__init__", building("generator", hf.HfEngine.__init__))
    monkeypatch.setattr(fsdp.FsdpEngine, "__init__", building("trainer", fsdp.FsdpEngine.__init__))
    monkeypatch.setattr(Engines, "_build_reshard", building("reshard", Engines._build_reshard))
    monkeypatch.setattr(hf.HfEngine, "release", building("release", hf.HfEngine.release))
    Engines(RankContext(one_rank(), 0)).build()
    assert [*dict.fromkeys(told)] == order
