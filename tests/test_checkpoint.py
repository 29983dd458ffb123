"""Checkpoints: any layout to any layout, nothing torn or foreign is used, and what differs is named."""

import dataclasses
import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ranks

from msrl_graph import compile
from msrl_graph.diagnostics import NOWHERE, Fault
from msrl_graph.engine import Asked, Packed, Shard
from msrl_graph.layout import Layout, Side, elements, full, owns, shard
from msrl_graph.runtime import checkpoint
from msrl_graph.runtime.checkpoint import Manifest, Source, Unsound, begin, commit, found, newest, program, resumed, sound, write

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def plan():
    return compile(EXAMPLE / "grpo.rlg")


def save(run, plan, iteration, keep=9):
    """A checkpoint of one small tensor in two files."""
    import torch

    partial = begin(run, iteration)
    shards = [Shard("w", ((2 * r, 2 * r + 2), (0, 3)), torch.arange(6.0).view(2, 3) + r) for r in range(2)]
    files = [write(partial, f"actor-rank-{r:05d}.safetensors", [("actor/weights", s)]) for r, s in enumerate(shards)]
    return commit(
        partial, Manifest(checkpoint.FORMAT, iteration, iteration, {"actor.update": iteration}, program(plan), tuple(files)), keep
    )


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path, plan):
    begin(tmp_path, 3)
    assert found(tmp_path) == [] and newest(tmp_path) is None
    path = save(tmp_path, plan, 3)
    assert found(tmp_path) == [path] and sound(path).iteration == 3
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_what_cannot_be_written_is_an_os_error(tmp_path):
    import torch

    shard = Shard("w", ((0, 1000),), torch.zeros(1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a full disk, to safetensors
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, "weights", [("actor/weights", shard)])
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write_arrays(tmp_path, "states", {"solved": np.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_are_kept(tmp_path, plan):
    for i in (8, 9, 10, 11):
        save(tmp_path, plan, i, keep=2)
    assert [p.name for p in found(tmp_path)] == ["000010", "000011"]
    assert newest(tmp_path)[0].name == "000011"


def test_what_else_lies_there_is_no_checkpoint(tmp_path, plan):
    path = save(tmp_path, plan, 8)
    shutil.copytree(path, path.with_name("000008.bak"))
    (tmp_path / "checkpoints" / ".000007.partial").mkdir()  # of a run that was ended while it wrote
    assert save(tmp_path, plan, 9, keep=1).is_dir() and [p.name for p in found(tmp_path)] == ["000009"]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"000008.bak", "000009"}


def test_a_checkpoint_beyond_the_runs_end_is_refused(tmp_path, plan):
    path = save(tmp_path, plan, 321)
    assert refusal(plan, tmp_path) == f"the checkpoint {path} is of 321 iterations, the run is to have 320"


def test_saving_again_replaces(tmp_path, plan):
    save(tmp_path, plan, 5)
    assert sound(save(tmp_path, plan, 5)).iteration == 5


def cut(path):
    file = path / "actor-rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip(path):
    file = path / "actor-rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "cut": (cut, r"its file actor-rank-00001.safetensors has \d+ bytes of \d+"),
    "one bit": (flip, "its file actor-rank-00000.safetensors was changed after it was written: its SHA-256 differs"),
    "missing": (lambda p: (p / "actor-rank-00000.safetensors").unlink(), "its file actor-rank-00000.safetensors is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "its manifest.json cannot be read: No such file or directory"),
    "half a manifest": (lambda p: (p / "manifest.json").write_text('{"format_version": 1, "iter'), "its manifest.json is damaged: .*"),
    "of another format": (
        lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text().replace('"format_version": 1', '"format_version": 7')),
        "its format is 7, this version reads 1",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_torn_checkpoint_is_refused_with_what_is_wrong_and_which_older_one_is_sound(tmp_path, plan, how):
    damage, message = DAMAGE[how]
    older, path = save(tmp_path, plan, 10), save(tmp_path, plan, 20)
    damage(path)
    with pytest.raises(Unsound, match=message):
        sound(path)
    for target in (tmp_path, path):
        with pytest.raises(Fault) as fault:
            resumed(plan, str(target), NOWHERE)
        (told,) = fault.value.diagnostics
        assert told.code == "bad-checkpoint" and told.message.startswith(f"the checkpoint {path} cannot be used: its ")
        assert told.help == f"{older} is sound: --resume {older}, and another folder with --out"
    assert newest(tmp_path)[0] == older
    assert resumed(plan, str(older), NOWHERE)[1].iteration == 10


def refusal(plan, target):
    with pytest.raises(Fault) as fault:
        resumed(plan, str(target), NOWHERE)
    return fault.value.diagnostics[0].message


def test_what_is_no_checkpoint_is_refused(tmp_path, plan):
    assert refusal(plan, tmp_path / "x") == f"there is no folder {tmp_path / 'x'} to resume from"
    assert refusal(plan, tmp_path) == f"the run in {tmp_path} has saved no checkpoint"


def test_a_checkpoint_of_another_model_is_refused(tmp_path, plan):
    path = save(tmp_path, plan, 1)
    model = replace(plan.deploy.models["policy"], hidden=96, tensors=plan.deploy.models["policy"].tensors[1:])
    other = replace(plan, deploy=replace(plan.deploy, models={"policy": model}))
    hidden, tensors = plan.deploy.models["policy"].hidden, len(plan.deploy.models["policy"].tensors)
    assert refusal(other, tmp_path) == (
        f"the checkpoint {path} is of another program: models.policy.hidden was {hidden}, is 96; "
        f"models.policy.tensors was {tensors}, is {tensors - 1}"
    )
    assert "algorithm.name was grpo, is ppo" in refusal(replace(plan, graph=replace(plan.graph, name="ppo")), tmp_path)


def test_a_program_that_changed_is_told_and_where_it_stands_is_no_change(tmp_path, plan):
    path = save(tmp_path, plan, 1)
    assert resumed(plan, str(path), NOWHERE)[2] == []
    moved = compile(EXAMPLE / "one_rank.rlg")  # another layout of the same program
    assert resumed(moved, str(path), NOWHERE)[2] == []
    other = compile(EXAMPLE / "grpo.rlg", sets={"kl_coef": "0.5"})
    (told,) = resumed(other, str(path), NOWHERE)[2]
    assert told.code == "changed-program" and told.severity == "warning"
    assert "algorithm.params.kl_coef was 0.001, is 0.5" in told.message


def test_a_box_is_read_from_however_many_files(tmp_path, plan):
    import torch

    source = Source(save(tmp_path, plan, 1))
    whole = torch.stack([torch.arange(3.0), torch.arange(3.0) + 3, torch.arange(3.0) + 1, torch.arange(3.0) + 4])
    assert torch.equal(source.read("actor/weights/w", ((0, 4), (0, 3)), torch.float32), whole)
    assert torch.equal(source.read("actor/weights/w", ((1, 3), (1, 3)), torch.float32), whole[1:3, 1:3])
    assert source.read("actor/weights/w", ((2, 2), (0, 3)), torch.float32).shape == (0, 3)
    with pytest.raises(Unsound, match="it holds 6 of 9 elements of actor/weights/w"):
        source.read("actor/weights/w", ((2, 5), (0, 3)), torch.float32)


def test_every_box_has_one_owner(plan):
    for layout, divided in ((Layout(tp=2, dp=2), False), (Layout(dp=4), True), (Layout(tp=2, dp=2, zero=3), True), (Layout(dp=3), False)):
        side = Side(layout, divided)
        for tensor in plan.deploy.models["policy"].tensors:
            owned = [shard(tensor, side, r) for r in range(layout.devices) if owns(tensor, side, r)]
            held = {shard(tensor, side, r) for r in range(layout.devices)}
            assert sorted(b for b in owned if elements(b)) == sorted(b for b in held if elements(b))
            if len(held) == 1:
                assert owned == [full(tensor.shape)]


# On real ranks: some steps, a checkpoint, another layout, one more step.

BATCH = [[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 9]]


def engine_on(layout, rank, dtype):
    from torch.distributed.device_mesh import DeviceMesh

    from msrl_graph import models
    from msrl_graph.backends.fsdp import Engine

    model = models.load("./model", EXAMPLE, dtype)
    mesh = DeviceMesh("cpu", [[layout.rank(tp, dp) for tp in range(layout.tp)] for dp in range(layout.dp)], mesh_dim_names=("dp", "tp"))
    return model, Engine(model, layout, rank, mesh, False, {})


def step(engine, layout, rank):
    import torch

    mine = BATCH if layout.dp == 1 else [BATCH[layout.coordinates(rank).dp]]
    ids = torch.tensor(mine)
    rows, width = ids.shape
    row, position = torch.arange(rows).repeat_interleave(width - 1), torch.arange(width - 1).repeat(rows)
    logp = engine.forward(Packed(ids[:, :-1], row, position, ids[:, 1:].reshape(-1)), Asked()).logp
    engine.backward(-logp.sum() / 10)
    return engine.step(1e-3, 1.0)


def _train_and_save(rank, folder, layout, dtype, target):
    from msrl_graph.backends.fsdp import SPEC

    model, engine = engine_on(layout, rank, dtype)
    for _ in range(3):
        step(engine, layout, rank)
    owned = {t.name for t in model.tensors if owns(t, SPEC.side(layout), rank)}
    kinds = {"weights": engine.shards(), **engine.moments()}
    pieces = [(f"actor/{kind}", s) for kind, shards in kinds.items() for s in shards if s.name in owned]
    file = write(Path(target), f"{rank}.safetensors", pieces)
    (Path(target) / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(file)))
    norm = step(engine, layout, rank)
    import torch

    torch.save({s.name: (s.box, s.tensor) for s in engine.shards()} | {"norm": norm}, Path(target) / f"after-{rank}.pt")


def _go_on(rank, folder, layout, dtype, target, same):
    import torch

    _, engine = engine_on(layout, rank, dtype)
    source = Source(Path(target))
    with torch.no_grad():
        for s in engine.shards():
            s.tensor.copy_(source.read(f"actor/weights/{s.name}", s.box, s.tensor.dtype))
    assert source.kinds("actor") == {"weights", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bf16" else set())
    moments = {
        kind: {s.name: source.read(f"actor/{kind}/{s.name}", s.box, torch.float32) for s in engine.shards()}
        for kind in source.kinds("actor") - {"weights"}
    }
    engine.restore(moments, 3)
    norm = step(engine, layout, rank)
    parts = [torch.load(p) for p in sorted(Path(target).glob("after-*.pt"))]
    for s in engine.shards():
        for part in parts:
            box, value = part[s.name]
            if same and box == s.box:
                assert torch.equal(value, s.tensor), s.name
            elif box == s.box and not s.name.endswith("k_proj.bias"):  # its gradient is 0, so Adam makes steps of rounding
                # A step is lr long at most: what rounding does to it is far below.
                assert (value.float() - s.tensor.float()).abs().max() < (1e-6 if dtype == "f32" else 2e-2), s.name
    assert norm == pytest.approx(parts[0]["norm"], rel=0 if same else (1e-5 if dtype == "f32" else 1e-2))


LAYOUTS = {"dp2 zero 1": Layout(dp=2, zero=1), "tp2": Layout(tp=2), "dp2 zero 3": Layout(dp=2, zero=3), "dp2 zero 0": Layout(dp=2, zero=0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "dtype"),
    [
        ("dp2 zero 1", "dp2 zero 1", "f32"),
        ("dp2 zero 1", "tp2", "f32"),
        ("tp2", "dp2 zero 3", "f32"),
        ("dp2 zero 3", "dp2 zero 0", "f32"),
        ("dp2 zero 1", "dp2 zero 3", "bf16"),
    ],
)
def test_optimizer_and_weights_go_on_on_any_layout(tmp_path, plan, old, new, dtype):
    partial = begin(tmp_path, 3)
    ranks.run(2, _train_and_save, LAYOUTS[old], dtype, str(partial))
    files = []
    for r in range(2):
        given = json.loads((partial / f"{r}.json").read_text())
        pieces = tuple(checkpoint.Piece(p["name"], tuple(tuple(x) for x in p["box"])) for p in given.pop("pieces"))
        files.append(checkpoint.File(**given, pieces=pieces))
    path = commit(partial, Manifest(checkpoint.FORMAT, 3, 0, {}, program(plan), tuple(files)), 2)
    assert sound(path).iteration == 3
    ranks.run(2, _go_on, LAYOUTS[new], dtype, str(path), old == new)
    shutil.rmtree(path)
