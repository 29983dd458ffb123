"""Router replay from end to end: routes that rounding decides are those of the generator in the trainer too."""

from dataclasses import replace

import pytest
from mixture import mixture, tied
from place import ONE_RANK, TRAINED, Place, assert_alike, weights
from routed import BY_GENERATOR, BY_INFER, TIED, declared, run

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.compiler.unsupported import find_unsupported


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
