"""Router replay from end to end: routes that rounding decides are those of the generator in the trainer too."""

import re
from dataclasses import replace

import pytest
from folders import ROOT
from mixture import mixture, tied
from place import ONE_RANK, TRAINED, Place, assert_alike, weights
from routed import BY_GENERATOR, BY_INFER, TIED, declared, run

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.cost import holdings


@pytest.mark.slow
def test_drift_is_rounding_with_replay_and_large_without(tmp_path):
    plain, _ = run(tmp_path / "plain", tied, TIED)
    replayed, _ = run(tmp_path / "replayed", tied, TIED, declared(2, 3), *BY_GENERATOR)
    without, with_replay = ([line["logp_drift"] for line in lines] for lines in (plain, replayed))
    assert min(without) > 3e-5 and max(with_replay) < 3e-6, (without, with_replay)


@pytest.mark.slow
def test_replaying_the_trainers_own_routes_changes_no_bit_of_the_weights(tmp_path):
    """R2, with one step for each iteration: the routes of a pass with the same weights."""
    _, plain = run(tmp_path / "plain", mixture, *ONE_RANK)
    _, replayed = run(tmp_path / "replayed", mixture, *ONE_RANK, declared(2, 2), *BY_INFER)
    mine, theirs = weights(plain), weights(replayed)
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)


@pytest.mark.slow
@pytest.mark.long
def test_a_sharded_and_streamed_run_replays_as_one_rank_does(tmp_path):
    """R3, with several mini-batches, experts on other ranks, and rows that arrive in parts."""
    streamed = (
        "actor.generate -> actor.infer, reference.infer, host.reward",
        "actor.generate -> actor.infer { stream = 4 }\n  actor.generate -> reference.infer, host.reward",
    )
    sharded = (
        ("dp = 2, zero = 3", "tp = 2, ep = 2"),
        ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }"),
    )
    routed = (declared(2, 2), *BY_GENERATOR, *TRAINED[:1])
    _, alone = run(tmp_path / "alone", mixture, *routed, *ONE_RANK)
    _, found = run(tmp_path / "sharded", mixture, *routed, *sharded, streamed)
    assert_alike(alone, found)


def test_an_engine_without_routes_is_refused(monkeypatch, tmp_path):
    place = Place(tmp_path)
    (tmp_path / "model").unlink()
    mixture(tmp_path / "model")
    place.write(declared(2, 2), *BY_GENERATOR, evaluated=False)
    plan = compile(tmp_path / "p.rlg")
    assert find_unsupported(plan) == []
    spec = ENGINES["fsdp"]
    monkeypatch.setitem(ENGINES, "fsdp", replace(spec, capabilities=replace(spec.capabilities, routes=False)))
    infer, update = find_unsupported(plan)
    assert infer.message.startswith("routes (`routing`) of `actor.infer` with the engine `fsdp` can be planned")
    assert update.help == "`engine actor.update = megatron` supports it"


def test_the_program_of_the_guide_is_planned_with_the_bytes_of_its_routes(tmp_path):
    guide = (ROOT / "docs" / "guides" / "router_replay.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```rlg\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "p.rlg").write_text(program)
    plan = compile(tmp_path / "p.rlg")
    graph = plan.graph
    per_token = 2 * 48 * 8
    assert f"{per_token} bytes for a token of Qwen3-30B-A3B" in guide
    assert graph.row_bytes("routing") == per_token * graph.bound("response")
    assert graph.row_bytes("prompt_routing") == per_token * graph.bound("prompt")
    read = sum(graph.column_bytes[name] for name in ("prompt", "response", "routing", "prompt_routing"))
    assert next(item.bytes for item in plan.traffic if item.dst == "actor.infer") == read
    work = holdings.work(plan, ENGINES, "actor.update")
    engine = ENGINES[plan.placement("actor.update").engine.name]
    with_routes, without = (
        max(items["rows"] for items in engine.memory.peaks("update", sized).values() if "rows" in items)
        for sized in (work, replace(work, replays_routes=False))
    )
    assert with_routes - without >= per_token * work.fed_tokens // work.layout.cp
