"""Frozen workers whose weights follow a trained one: what may be stated, what is planned, and every value against an
independent computation."""

import numpy as np
import pytest
import ranks
import torch
from place import ONE_RANK, SMALL, metrics, ran, rows_of, weights
from safetensors.torch import load_file
from stage import EXAMPLE, Stage, one_rank
from stale_runs import APART, stale
from tiny import ROLLOUT
from tiny import staged as tiny
from transformers import AutoModelForCausalLM

from msrl_graph import Algorithm, check, compile
from msrl_graph.analysis.async_schedule import pipelined_openings
from msrl_graph.compiler.loading import load
from msrl_graph.diagnostics import Fault
from msrl_graph.emit.text import graph_text
from msrl_graph.runtime.rank.followers import AVERAGE
from msrl_graph.runtime.weights import checkpoint
from msrl_graph.simulation import simulate

FROZEN = "worker reference : policy frozen"
TEXT = (EXAMPLE / "grpo.rlg").read_text()


def following(stated):
    return (FROZEN, f"{FROZEN} {{ {stated} }}")


def planned(*changes):
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return compile(EXAMPLE / "p.rlg", text=text)


def refused(*changes):
    with pytest.raises(Fault) as fault:
        planned(*changes)
    (told,) = fault.value.diagnostics
    return told.code, told.message, told.help


MISTAKES = [
    (
        [following("follows = reference")],
        ("unknown-name", "`reference`, which `reference` follows, is not trained", "known here: `actor`"),
    ),
    (
        [following("follows = actr")],
        ("unknown-name", "`actr`, which `reference` follows, is not a worker", "did you mean `actor`?"),
    ),
    (
        [following("every = 5")],
        (
            "bad-value",
            "`reference` follows no worker, so `every` has no effect",
            "add `follows = WORKER`, or leave it out",
        ),
    ),
    (
        [following("decay = 0.5")],
        (
            "bad-value",
            "`reference` follows no worker, so `decay` has no effect",
            "add `follows = WORKER`, or leave it out",
        ),
    ),
    (
        [following("follows = actor, decay = 1")],
        (
            "bad-value",
            "`reference` with `decay = 1` never changes",
            "set `decay` below 1, or leave `follows` out",
        ),
    ),
    (
        [(FROZEN, "worker reference : policy { follows = actor }")],
        ("bad-value", "`reference` follows `actor`, so it is not trained itself", "add `frozen`"),
    ),
    (
        [following("follows = actor, model = old"), ("model policy  =", 'model old = "./model"\n  model policy  =')],
        (
            "bad-value",
            "`reference` is a policy of the model `old`, and follows `actor`, a policy of the model `policy`",
            "let both be a policy of the model `policy`",
        ),
    ),
    (
        [following("follows = actor"), ("  layout actor.update", "  apart reference, actor\n  layout actor.update")],
        (
            "bad-place",
            "`reference` follows `actor`, but they are on different devices",
            "keep them in one pool: place reference.infer, actor.update together",
        ),
    ),
    (
        [
            following("follows = actor"),
            ("  layout actor.update", "  layout reference.infer { tp = 2 }\n  layout actor.update"),
        ],
        (
            "bad-layout",
            "`reference` follows `actor`, but `reference.infer` has another layout or engine",
            "leave out the layout and engine of `reference.infer`: it takes those of `actor.update`",
        ),
    ),
]


@pytest.mark.parametrize(("changes", "told"), MISTAKES, ids=[told[1][:60] for _, told in MISTAKES])
def test_what_cannot_be_followed_is_refused(changes, told):
    if told[0] == "bad-place":
        changes = [
            *changes,
            *[("{ dp = 2, zero = 3 }", "{ dp = 1 }"), ("actor.generate { tp = 2 }", "actor.generate { dp = 1 }")],
        ]
    assert refused(*changes) == told


def test_weights_of_another_type_cannot_be_followed_and_the_help_is_a_way_out():
    bf16 = "engine actor.update = fsdp { dtype = bf16 }\n  "
    own = "engine reference.infer = fsdp { dtype = f32 }\n  "
    for engines in (bf16, f"engine actor.update = fsdp\n  {own.replace('f32', 'bf16')}"):
        other = own if "reference" not in engines else ""
        code, message, help = refused(
            following("follows = actor"), ("  layout actor.update", f"  {engines}{other}layout actor.update")
        )
        assert code == "bad-layout" and "whose weights are" in message
        fixed = engines.replace(own.replace("f32", "bf16"), "") + help
        planned(following("follows = actor"), ("  layout actor.update", f"  {fixed}\n  layout actor.update"))


def test_what_follows_cannot_generate():
    drafts = [
        ("  node host.reward", "  node reference.generate(prompt) -> draft\n  node host.reward"),
        ("    reward    : f32", "    draft : i32[<= 5]\n    reward    : f32"),
        ("  source -> actor.generate", "  source -> actor.generate, reference.generate"),
    ]
    code, message, help = refused(following("follows = actor"), *drafts)
    told = "`reference.generate`, which generates with weights that follow `actor`, can be neither planned nor run"
    assert (code, message) == ("not-yet", told)
    assert help.endswith("`reference` can infer")


def test_a_function_follows_nothing():
    code, message, _ = refused(("worker host      : function", "worker host : function { follows = actor }"))
    assert (code, message) == ("bad-value", "a function has no weights, so `follows` has no effect")


def test_a_plan_says_what_follows_and_can_be_loaded_and_simulated():
    plan = planned(following("follows = actor, every = 3, decay = 0.5"))
    assert "policy, follows actor every 3 iterations, decay 0.5" in graph_text(plan.graph)
    again = load(plan.to_json().encode(), "plan.json", run=True)
    assert again.graph.worker("reference") == plan.graph.worker("reference")
    assert again.graph.changing_workers == ("actor", "reference")
    assert simulate(plan, iterations=4).iterations[3].seconds > 0


def test_the_same_in_python():
    built = Algorithm("a", extends="grpo")
    built.worker("reference", "policy", frozen=True, follows="actor", every=3, decay=0.5)
    stated = "follows = actor, every = 3, decay = 0.5"
    text = f"import grpo\nalgorithm a extends grpo {{ worker reference : policy frozen {{ {stated} }} }}"
    workers = [check(built).worker("reference"), check("a.rlg", text=text).worker("reference")]
    assert len({(w.follows, w.every, w.decay, w.frozen) for w in workers}) == 1
    assert workers[0].following_description == "follows actor every 3 iterations, decay 0.5"


def test_seconds_and_memory_are_planned():
    bf16 = ("layout actor.update ", "engine actor.update = fsdp { dtype = bf16 }\n  layout actor.update ")
    plain = planned(bf16)
    seconds = {}
    for stated in ("follows = actor", "follows = actor, every = 10", "follows = actor, decay = 0.9"):
        plan = planned(following(stated), bf16)
        phases = [{p.name: p.seconds.value for p in x.estimate.phases} for x in (plain, plan)]
        seconds[stated] = phases[1]["actor.update"] - phases[0]["actor.update"]
        size = plan.placement("actor.update").weight_bytes
        reads = 3 if "decay" in stated else 2
        every = 10 if "every" in stated else 1
        assert seconds[stated] == pytest.approx(
            reads * size / every / plan.cluster.device.memory_bandwidth.value, rel=0.01
        )
        held = next(m.items for m in plan.memory if m.phase == "update" and m.place == "device")
        assert held.get("reference average", 0) == (2 * size if "decay" in stated else 0)


def test_no_weights_that_follow_compute_before_the_update_of_the_iteration_before():
    ahead = [*APART[2:], stale(1)]
    (frozen,) = pipelined_openings(planned(*ahead)).values()
    (after,) = pipelined_openings(planned(*ahead, following("follows = actor"))).values()
    assert frozen - after == {"reference.infer"}


# On an engine


def moved(stage, seed):
    """The actor's weights, changed as training would; a copy of them by name."""
    torch.manual_seed(seed)
    found = {}
    with torch.no_grad():
        for shard in stage.engines.trainers["actor"].shards():
            shard.tensor.add_(torch.randn(shard.tensor.shape).to(shard.tensor.dtype) * 0.01)
            found[shard.name] = shard.tensor.double().clone()
    return found


def own(stage, worker="reference"):
    with stage.engines.shards_on_device(worker) as shards:
        return {s.name: s.tensor.double().clone() for s in shards}


def staged(stated, dtype="f32", offload="none"):
    engines = f"engine actor.update = fsdp {{ dtype = {dtype} }}\n  "
    engines += f"engine reference.infer = fsdp {{ dtype = {dtype}, offload = {offload} }}\n  "
    return Stage(one_rank(following(stated), ("layout actor.update ", engines + "layout actor.update ")))


@pytest.mark.parametrize("offload", ["none", "weights"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_value_of_an_average_is_that_of_a_float64_one(alone, dtype, offload):
    """In bfloat16 steps of (1 - decay) are lost unless the average is kept in float32."""
    stage = staged("follows = actor, decay = 0.99", dtype, offload)
    expected = own(stage)
    first = own(stage)
    for number in range(30):
        for name, value in moved(stage, number).items():
            expected[name] = 0.99 * expected[name] + 0.01 * value
        stage.engines.followers["reference"].follow(number)
    found = own(stage)
    exact = {s.name: s.tensor for s in stage.engines.followers["reference"].averages}
    assert (dtype == "bf16") == bool(exact)
    for name, value in expected.items():
        kept = exact.get(name, found[name]).double()
        assert torch.allclose(kept, value, rtol=1e-5, atol=1e-6), name
        assert torch.equal(
            found[name], kept.float().to(getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[dtype])).double()
        )
    assert any((found[name] - first[name]).abs().max() > 1e-3 for name in found)


@pytest.mark.parametrize("offload", ["none", "weights"])
def test_a_reset_copies_every_so_many_iterations_and_then_both_score_alike(alone, offload):
    stage = staged("follows = actor, every = 3", offload=offload)
    columns = stage.sampled()
    stage.context.watch.comparison = None  # the rows were drawn by other weights
    expected = own(stage)
    for number in range(7):
        now = moved(stage, number)
        if number in (2, 5):
            expected = now
        stage.engines.followers["reference"].follow(number)
        assert all(torch.equal(value, expected[name]) for name, value in own(stage).items()), number
        stage.engines.begin_phase(stage.plan.graph.node("reference.infer"))
        theirs = stage.act("reference.infer", columns)["ref_logp"].values
        stage.engines.end_phase(stage.plan.graph.node("reference.infer"))
        mine = stage.act("actor.infer", columns)["old_logp"].values
        assert (np.abs(theirs - mine).max() < 1e-6) == (number in (2, 5)), number


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("offload", ["none", "weights"])
def test_a_checkpoint_holds_it_and_a_resume_goes_on_as_if_nothing_had_happened(alone, tmp_path, dtype, offload):
    stated = "follows = actor, decay = 0.9"
    stage = staged(stated, dtype, offload)
    for number in range(3):
        moved(stage, number)
        stage.engines.followers["reference"].follow(number)
    tmp_path.joinpath("c").mkdir()
    files, steps, wrong = stage.checkpoints.write(str(tmp_path / "c"), {})
    assert not wrong
    kinds = {piece.name.split("/")[1] for file in files for piece in file.pieces if piece.name.startswith("reference/")}
    assert kinds == {"weights", *([AVERAGE] if dtype == "bf16" else [])}
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 3, 0, steps, {}, tuple(files))
    again = staged(stated, dtype, offload)
    for s in again.engines.trainers["actor"].shards():  # the moments of steps that were not taken are not there
        source = checkpoint.CheckpointSource(tmp_path / "c", manifest)
        with torch.no_grad():
            s.tensor.copy_(source.read(f"actor/weights/{s.name}", s.box, s.tensor.dtype))
    again.checkpoints._resume_follower(checkpoint.CheckpointSource(tmp_path / "c", manifest), "reference")
    for which in (stage, again):
        moved(which, 9)
        which.engines.followers["reference"].follow(3)
    one = own(stage)
    other = own(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_in_which_it_did_not_follow_leaves_it_as_its_model(alone, tmp_path):
    tmp_path.joinpath("c").mkdir()
    before = Stage(one_rank())
    files, steps, _ = before.checkpoints.write(str(tmp_path / "c"), {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 3, 0, steps, {}, tuple(files))
    stage = staged("follows = actor")
    first = own(stage)
    stage.checkpoints._resume_follower(checkpoint.CheckpointSource(tmp_path / "c", manifest), "reference")
    assert all(torch.equal(value, first[name]) for name, value in own(stage).items())


def _follows(rank, folder, layout, dtype):
    """On each of two ranks: thirty steps of an average, against float64."""
    engines = f"engine actor.update = fsdp {{ dtype = {dtype} }}"
    more = f"layout actor.update, critic.update {{ {layout} }}\n  {engines}"
    stated = "worker teacher : policy frozen"
    changed = (stated, f"{stated} {{ follows = actor, decay = 0.9 }}")
    judge = str(EXAMPLE.parent / "ppo" / "reward_model")
    stage = tiny(ROLLOUT, changed, rank=rank, ranks=2, more=more, judge=judge)
    expected = own(stage, "teacher")
    for number in range(30):
        for name, value in moved(stage, number).items():
            expected[name] = 0.9 * expected[name] + 0.1 * value
        stage.engines.followers["teacher"].follow(number)
    found = own(stage, "teacher")
    exact = {s.name: s.tensor for s in stage.engines.followers["teacher"].averages}
    assert (dtype == "bf16") == bool(exact)
    for name, value in expected.items():
        assert torch.allclose(exact.get(name, found[name]).double(), value, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("tp = 2", "f32"), ("dp = 2, zero = 3", "bf16"), ("cp = 2", "f32"), ("dp = 2, zero = 1", "f32")],
)
def test_an_average_on_two_ranks_of_any_layout(layout, dtype):
    ranks.run(2, _follows, layout, dtype)


# On Ray

BOTH = [
    following("follows = actor, every = 2"),
    ("  worker host ", "  worker average : policy frozen { follows = actor, decay = 0.9 }\n  worker host "),
    ("  node host.reward", "  node average.infer(prompt, response) -> avg_logp\n  node host.reward"),
    ("    reward    : f32", "    avg_logp  : f32[response]\n    reward    : f32"),
    ("ref_logp, advantage) {", "ref_logp, avg_logp, advantage) {"),
    ("kl_coef * kl(low_var)", "kl_coef * kl(low_var) + 0.1 * kl(ref_logp = avg_logp)"),
    ("reference.infer, host.reward", "reference.infer, average.infer, host.reward"),
    ("reference.infer, host.advantage ->", "reference.infer, average.infer, host.advantage ->"),
    ("lr = 2e-4", "lr = 2e-3"),
    ("warmup = 20", "warmup = 1"),
    ("run { iterations", "run { save = 1, keep = 9, iterations"),
]


def of_checkpoint(run, iteration, worker):
    """A worker's weights in a checkpoint, by name, whole."""
    folder = run / "checkpoints" / f"{iteration:06d}"
    source = checkpoint.CheckpointSource(folder, checkpoint.read_manifest(folder))
    start = load_file(EXAMPLE / "model" / "model.safetensors")
    whole = {name: tuple((0, n) for n in value.shape) for name, value in start.items()}
    return {n: source.read(f"{worker}/weights/{n}", box, torch.float32) for n, box in whole.items()}


@torch.no_grad()
def logps(found, rows):
    """The log-probabilities that transformers gives to recorded responses, with these weights."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32)
    model.load_state_dict(found, strict=True)
    made = []
    for row in rows:
        tokens = torch.tensor([[*row["prompt"], *row["response"]]])
        logits = model(tokens).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        made.append(logits.gather(1, tokens[0, len(row["prompt"]) :, None])[:, 0].numpy())
    return np.concatenate(made)


@pytest.mark.slow
def test_a_reset_and_an_average_in_a_run_on_one_and_two_ranks_and_resumed(place):
    place.write(*BOTH, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--record", "--out", "two")
    two = place.folder / "two"
    # What they are after each iteration follows from the actor's weights alone.
    average = {n: v.double() for n, v in load_file(EXAMPLE / "model" / "model.safetensors").items()}
    reference = load_file(EXAMPLE / "model" / "model.safetensors")
    for iteration in range(1, 5):
        rows = rows_of(two, iteration - 1).to_pylist()[:8]
        for column, found in (("ref_logp", reference), ("avg_logp", {n: v.float() for n, v in average.items()})):
            told = np.concatenate([row[column] for row in rows])
            assert np.abs(logps(found, rows) - told).max() < 1e-5, (iteration, column)
        actor = of_checkpoint(two, iteration, "actor")
        average = {n: 0.9 * v + 0.1 * actor[n].double() for n, v in average.items()}
        reference = actor if iteration % 2 == 0 else reference
        assert all(torch.equal(v, reference[n]) for n, v in of_checkpoint(two, iteration, "reference").items())
        saved = of_checkpoint(two, iteration, "average")
        assert all(torch.allclose(v.double(), average[n], rtol=1e-6, atol=1e-7) for n, v in saved.items())
    assert {p.name for p in (two / "weights").iterdir()} == {"actor", "reference", "average"}
    for worker in ("reference", "average"):
        last = of_checkpoint(two, 4, worker)
        assert all((v == last[n].numpy()).all() for n, v in weights(two, f"weights/{worker}").items())
    code, _, err = place.run("--export", "two")
    assert code == 0, err
    for worker in ("actor", "reference", "average"):
        exported, saved = (weights(two, f"{where}/{worker}") for where in ("exported/000004", "weights"))
        assert all((exported[n] == saved[n]).all() for n in saved), worker
    # Resumed in the middle, to the bit.
    code, _, err = place.run(
        "p.rlg", *SMALL, "--iterations", "4", "--resume", "two/checkpoints/000001", "--out", "again"
    )
    assert code == 0, err
    for worker in ("actor", "reference", "average"):
        one, other = (weights(place.folder / out, f"weights/{worker}") for out in ("two", "again"))
        assert all((one[n] == other[n]).all() for n in one), worker
    # On one rank, up to rounding.
    place.write(*ONE_RANK, *BOTH, evaluated=False)
    ran(place, *SMALL, "--iterations", "4", "--out", "one")
    for a, b in zip(metrics(two), metrics(place.folder / "one"), strict=True):
        assert a["loss/kl"] == pytest.approx(b["loss/kl"], rel=1e-3, abs=1e-6) and a["reward"] == b["reward"]
    for worker in ("reference", "average"):
        one, other = (weights(place.folder / out, f"weights/{worker}") for out in ("two", "one"))
        assert max(abs(one[n] - other[n]).max() for n in one if not n.endswith("k_proj.bias")) < 1e-4
