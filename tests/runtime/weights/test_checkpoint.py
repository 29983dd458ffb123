"""Checkpoints: any layout to any layout, nothing torn or foreign is used, and what differs is named."""

import dataclasses
import hashlib
import json
import pickle
import resource
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ranks
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from saved_checkpoints import save

from msrl_graph import compile
from msrl_graph.backends.engine_protocols import ForwardRequest, Shard, StepRequest
from msrl_graph.diagnostics import NOWHERE, Fault
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.driver.resume import find_resume_point, program
from msrl_graph.runtime.weights import checkpoint, checkpoint_parts
from msrl_graph.runtime.weights.checkpoint import (
    CheckpointSource,
    CorruptCheckpoint,
    Manifest,
    begin,
    commit,
    find_newest,
    list_checkpoints,
    verify,
    write_tensors,
)
from msrl_graph.sharding.layout import Layout, Side, elements, full_box, owns, shard

EXAMPLE = ROOT / "examples" / "arithmetic"


@pytest.fixture(scope="module")
def plan():
    return compile(EXAMPLE / "grpo.rlg")


def forge(path, **changes):
    """Writes a manifest that is right of the files as they are now, but for `changes` of the first file."""
    there = json.loads((path / "manifest.json").read_text())
    for file in there["files"]:
        content = (path / file["name"]).read_bytes()
        file |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    there["files"][0] |= changes
    text = json.dumps(there).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


def test_a_pickle_in_a_checkpoint_is_no_file_of_tensors(tmp_path, plan):
    """With digests that are right: who gives somebody a checkpoint has made all of it."""
    path = save(tmp_path, plan, 3)
    forge(path)
    assert verify(path).iteration == 3
    for name in (f.name for f in verify(path).files):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Path(tmp_path)))
        forge(path)
        with pytest.raises(CorruptCheckpoint, match=f"its file {name} holds no tensors"):
            verify(path)
        (path / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "..", ""])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, plan, name):
    """Hosts are sent files by these names."""
    path = save(tmp_path, plan, 3)
    forge(path, name=name)
    with pytest.raises(CorruptCheckpoint, match="is not the name of one of its files"):
        verify(path)


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path, plan):
    begin(tmp_path, 3)
    assert list_checkpoints(tmp_path) == [] and find_newest(tmp_path) is None
    path = save(tmp_path, plan, 3)
    assert list_checkpoints(tmp_path) == [path] and verify(path).iteration == 3
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_what_cannot_be_written_is_an_os_error(tmp_path):
    import torch

    shard = Shard("w", ((0, 1000),), torch.zeros(1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a full disk, to safetensors
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path, "weights", [("actor/weights", shard)], {})
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write_arrays(tmp_path, "states", {"solved": np.zeros(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_are_kept(tmp_path, plan):
    for i in (8, 9, 10, 11):
        save(tmp_path, plan, i, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["000010", "000011"]
    assert find_newest(tmp_path)[0].name == "000011"


def test_what_else_lies_there_is_no_checkpoint(tmp_path, plan):
    path = save(tmp_path, plan, 8)
    shutil.copytree(path, path.with_name("000008.bak"))
    (tmp_path / "checkpoints" / ".000007.partial").mkdir()  # of a run that was ended while it wrote
    assert save(tmp_path, plan, 9, keep=1).is_dir() and [p.name for p in list_checkpoints(tmp_path)] == ["000009"]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"000008.bak", "000009"}


def test_a_checkpoint_beyond_the_runs_end_is_refused(tmp_path, plan):
    path = save(tmp_path, plan, 321)
    assert refusal(plan, tmp_path) == f"the checkpoint {path} is of 321 iterations, but the run has only 320"


def test_saving_again_replaces(tmp_path, plan):
    save(tmp_path, plan, 5)
    assert verify(save(tmp_path, plan, 5)).iteration == 5


def cut(path):
    file = path / "actor-rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip(path):
    file = path / "actor-rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def say(path, old, new):
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, new))


def digested(path):
    """As `sha256sum manifest.json > manifest.sha256` would."""
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


CHANGED = (
    "its manifest.json or its manifest.sha256 was changed after it was written: one is not the SHA-256 of the other"
)
DAMAGE = {
    "cut": (cut, r"its file actor-rank-00001.safetensors has \d+ bytes of \d+"),
    "one bit": (flip, "its file actor-rank-00000.safetensors was changed after it was written: its SHA-256 differs"),
    "missing": (
        lambda p: (p / "actor-rank-00000.safetensors").unlink(),
        "its file actor-rank-00000.safetensors is missing",
    ),
    "no manifest": (
        lambda p: (p / "manifest.json").unlink(),
        "its manifest.json cannot be read: No such file or directory",
    ),
    "half a manifest": (
        lambda p: (p / "manifest.json").write_text('{"format_version": 1, "iter'),
        "its manifest.json is damaged: .*",
    ),
    "of another format": (
        lambda p: say(p, '"format_version": 2', '"format_version": 1'),
        "its manifest.json has format 1, .* reads 2",
    ),
    "iteration": (lambda p: say(p, '"iteration": 20', '"iteration": 18'), CHANGED),
    "negative": (lambda p: say(p, '"iteration": 20', '"iteration": -5'), CHANGED),
    "steps": (lambda p: say(p, '"actor.update": 20', '"actor.update": 90'), CHANGED),
    "position": (lambda p: say(p, '"position": 160', '"position": 16'), CHANGED),
    "no digest": (
        lambda p: (p / "manifest.sha256").unlink(),
        "its manifest.sha256 cannot be read: No such file or directory",
    ),
    "a digest made anew": (
        lambda p: (say(p, '"lines": 20', '"lines": 2'), digested(p)),
        "its manifest.json says lines 2, but its file actor-rank-00000.safetensors says 20",
    ),
    "steps and a digest made anew": (
        lambda p: (say(p, '"actor.update": 20', '"actor.update": 90'), digested(p)),
        "its manifest.json says steps of actor.update 90, but its file actor-rank-00000.safetensors says 20",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_torn_checkpoint_is_refused_with_what_is_wrong_and_which_older_one_is_sound(tmp_path, plan, how):
    damage, message = DAMAGE[how]
    older = save(tmp_path, plan, 10)
    path = save(tmp_path, plan, 20)
    damage(path)
    with pytest.raises(CorruptCheckpoint, match=message):
        verify(path)
    for target in (tmp_path, path):
        with pytest.raises(Fault) as fault:
            find_resume_point(plan, str(target), NOWHERE)
        (told,) = fault.value.diagnostics
        assert told.code == "bad-checkpoint" and told.message.startswith(f"the checkpoint {path} cannot be used: its ")
        assert (
            told.help
            == f"{older} is intact: --resume {older}, with --out another folder, or --overwrite to replace newer ones"
        )
    assert find_newest(tmp_path)[0] == older
    assert find_resume_point(plan, str(older), NOWHERE).manifest.iteration == 10


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"iteration": -5}, "its manifest.json cannot be right: iteration is below zero"),
        ({"lines": -1}, "its manifest.json cannot be right: lines is below zero"),
        ({"position": -2}, "its manifest.json cannot be right: position is below zero"),
        ({"steps": {"actor.update": -90}}, "its manifest.json cannot be right: steps of actor.update is below zero"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused_whoever_wrote_it(tmp_path, plan, written, told):
    path = save(tmp_path, plan, 10, written=written).rename(tmp_path / "checkpoints" / "000010")
    with pytest.raises(CorruptCheckpoint, match=f"^{told}$"):
        verify(path)


def test_a_checkpoint_under_the_name_of_another_is_refused(tmp_path, plan):
    path = save(tmp_path, plan, 10).rename(tmp_path / "checkpoints" / "000018")
    what = "its folder is called 000018, but its manifest.json says iteration 10"
    assert refusal(plan, tmp_path) == f"the checkpoint {path} cannot be used: {what}"


def test_the_only_checkpoint_of_a_run_being_damaged_is_told_with_what_keeps_more(tmp_path, plan):
    flip(path := save(tmp_path, plan, 10))
    with pytest.raises(Fault) as fault:
        find_resume_point(plan, str(path), NOWHERE)
    help = "no other checkpoint of this run is intact: start a new run; "
    help += "`run { keep = 3 }` keeps more checkpoints to go back to"
    assert fault.value.diagnostics[0].help == help


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, plan):
    run = tmp_path_factory.mktemp("pristine")
    save(run, plan, 20)
    return run, read_whole(run, plan)


FILES = (
    "manifest.json",
    "manifest.sha256",
    "actor-rank-00000.safetensors",
    "actor-rank-00001.safetensors",
    "states.safetensors",
    "metrics.safetensors",
)


def edited(path, name, how, at, byte):
    """One edit of one file."""
    file = path / name
    data = file.read_bytes()
    at %= len(data)
    if how == "flip":
        file.write_bytes(data[:at] + bytes([data[at] ^ (byte or 1)]) + data[at + 1 :])
    elif how == "another digit":
        digits = [i for i, b in enumerate(data) if b in b"0123456789"]
        at = digits[at % len(digits)] if digits else 0
        file.write_bytes(data[:at] + b"%d" % (byte % 10) + data[at + 1 :])
    elif how == "cut":
        file.write_bytes(data[:at])
    elif how == "insert":
        file.write_bytes(data[:at] + bytes([byte]) + data[at:])
    elif how == "leave out":
        file.write_bytes(data[:at] + data[at + 1 :])
    elif how == "delete":
        file.unlink()
    elif how == "rename":
        file.rename(path / f"{name}.old")
    elif how == "put another in its place":
        shutil.copy(path / FILES[at % len(FILES)], path / "copy")
        (path / "copy").replace(file)
    else:
        path.rename(path.with_name(f"{at:06d}"))


HOW = (
    "flip",
    "another digit",
    "cut",
    "insert",
    "leave out",
    "delete",
    "rename",
    "put another in its place",
    "rename the folder",
)


def read_whole(run, plan):
    """All that a run goes on with from a folder."""
    import torch

    found = find_resume_point(plan, str(run), NOWHERE)
    path = found.path
    manifest = found.manifest
    warnings = found.warnings
    tensor = CheckpointSource(path, manifest).read("actor/weights/w", ((0, 4), (0, 3)), torch.float32)
    return (
        manifest,
        checkpoint.read_metrics_copy(path, manifest),
        warnings,
        tensor.tolist(),
        {k: v.tolist() for k, v in checkpoint.read_arrays(path / "states.safetensors").items()},
    )


@examples(80)
@given(st.sampled_from(FILES), st.sampled_from(HOW), st.integers(0, 2**20), st.integers(0, 255))
def test_any_edit_of_a_checkpoint_is_told_or_changes_nothing(pristine, plan, name, how, at, byte):
    there, whole = pristine
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(there, run)
        edited(run / "checkpoints" / "000020", name, how, at, byte)
        try:
            assert read_whole(run, plan) == whole
        except Fault as fault:
            (told,) = fault.diagnostics
            assert told.code == "bad-checkpoint" and told.help
            assert ("its folder is called" if how == "rename the folder" else name) in told.message


def refusal(plan, target):
    with pytest.raises(Fault) as fault:
        find_resume_point(plan, str(target), NOWHERE)
    return fault.value.diagnostics[0].message


def test_what_is_no_checkpoint_is_refused(tmp_path, plan):
    assert refusal(plan, tmp_path / "x") == f"there is no folder {tmp_path / 'x'} to resume from"
    assert refusal(plan, tmp_path) == f"the run in {tmp_path} has saved no checkpoint"


def test_a_checkpoint_of_another_model_is_refused(tmp_path, plan):
    path = save(tmp_path, plan, 1)
    model = replace(plan.deploy.models["policy"], hidden=96, tensors=plan.deploy.models["policy"].tensors[1:])
    other = replace(plan, deploy=replace(plan.deploy, models={"policy": model}))
    hidden = plan.deploy.models["policy"].hidden
    tensors = len(plan.deploy.models["policy"].tensors)
    assert refusal(other, tmp_path) == (
        f"the checkpoint {path} is of another program: models.policy.hidden was {hidden}, is 96; "
        f"models.policy.tensors was {tensors}, is {tensors - 1}"
    )
    assert "algorithm.name was grpo, is ppo" in refusal(replace(plan, graph=replace(plan.graph, name="ppo")), tmp_path)


def test_a_program_that_changed_is_told_and_where_it_stands_is_no_change(tmp_path, plan):
    path = save(tmp_path, plan, 1)
    assert find_resume_point(plan, str(path), NOWHERE).changed == ()
    moved = compile(EXAMPLE / "one_rank.rlg")  # another layout of the same program
    assert find_resume_point(moved, str(path), NOWHERE).changed == ()
    other = compile(EXAMPLE / "grpo.rlg", sets={"kl_coef": "0.5"})
    (told,) = find_resume_point(other, str(path), NOWHERE).warnings
    assert told.code == "changed-program" and told.severity == "warning"
    assert "algorithm.params.kl_coef was 0.001, is 0.5" in told.message


def test_a_checkpoint_of_other_random_streams_is_told(tmp_path, plan, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("msrl_graph.noise.VERSION", 1)
        path = save(tmp_path, plan, 1)
    (told,) = find_resume_point(plan, str(path), NOWHERE).warnings
    assert told.code == "changed-program" and told.message.endswith("random_streams was 1, is 2")


def test_a_box_is_read_from_however_many_files(tmp_path, plan):
    import torch

    path = save(tmp_path, plan, 1)
    source = CheckpointSource(path, checkpoint.read_manifest(path))
    whole = torch.stack([torch.arange(3.0), torch.arange(3.0) + 3, torch.arange(3.0) + 1, torch.arange(3.0) + 4])
    assert torch.equal(source.read("actor/weights/w", ((0, 4), (0, 3)), torch.float32), whole)
    assert torch.equal(source.read("actor/weights/w", ((1, 3), (1, 3)), torch.float32), whole[1:3, 1:3])
    assert source.read("actor/weights/w", ((2, 2), (0, 3)), torch.float32).shape == (0, 3)
    with pytest.raises(CorruptCheckpoint, match="it holds 6 of 9 elements of actor/weights/w"):
        source.read("actor/weights/w", ((2, 5), (0, 3)), torch.float32)


def test_every_box_has_one_owner(plan):
    for layout, divided in (
        (Layout(tp=2, dp=2), False),
        (Layout(dp=4), True),
        (Layout(tp=2, dp=2, zero=3), True),
        (Layout(dp=3), False),
    ):
        side = Side(layout, divided)
        for tensor in plan.deploy.models["policy"].tensors:
            owned = [shard(tensor, side, r) for r in range(layout.devices) if owns(tensor, side, r)]
            held = {shard(tensor, side, r) for r in range(layout.devices)}
            assert sorted(b for b in owned if elements(b)) == sorted(b for b in held if elements(b))
            if len(held) == 1:
                assert owned == [full_box(tensor.shape)]


# On real ranks: some steps, a checkpoint, another layout, one more step.

BATCH = [[1, 2, 3, 4, 5, 6], [3, 1, 4, 1, 5, 9]]


def engine_on(layout, rank, dtype):
    import engines

    from msrl_graph.algorithms.optimizers import adamw
    from msrl_graph.model import models

    model = models.load("./model", EXAMPLE, dtype)
    return model, engines.trainer(model, layout, rank, engines.mesh(layout), adamw(lr=1e-3))


def step(engine, layout, rank):
    from msrl_graph.runtime.rank.micro_batches import pack

    mine = BATCH if layout.dp == 1 else [BATCH[layout.coordinates(rank).dp]]
    first, rest = (ragged([np.array(row[part]) for row in mine], np.int32) for part in (slice(1), slice(1, None)))
    packed = pack([first], [rest], np.arange(len(mine)))
    engine.train([packed], lambda made, _: -made.logp.sum() / 10, ForwardRequest())
    return engine.step(StepRequest(1e-3, 1.0))


def _train_and_save(rank, folder, layout, dtype, target):
    from msrl_graph.backends.fsdp import SPEC

    model, engine = engine_on(layout, rank, dtype)
    for _ in range(3):
        step(engine, layout, rank)
    owned = {t.name for t in model.tensors if owns(t, SPEC.side(layout), rank)}
    kinds = {"weights": engine.shards(), **engine.moments()}
    pieces = [(f"actor/{kind}", s) for kind, shards in kinds.items() for s in shards if s.name in owned]
    file = write_tensors(Path(target), f"{rank}.safetensors", pieces, {})
    (Path(target) / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(file)))
    norm = step(engine, layout, rank)
    import torch

    torch.save({s.name: (s.box, s.tensor) for s in engine.shards()} | {"norm": norm}, Path(target) / f"after-{rank}.pt")


def _go_on(rank, folder, layout, dtype, target, same):
    import torch

    _, engine = engine_on(layout, rank, dtype)
    source = CheckpointSource(Path(target), checkpoint.read_manifest(Path(target)))
    with torch.no_grad():
        for s in engine.shards():
            s.tensor.copy_(source.read(f"actor/weights/{s.name}", s.box, s.tensor.dtype))
    assert source.kinds("actor").keys() == {"weights", "exp_avg", "exp_avg_sq"} | (
        {"master"} if dtype == "bf16" else set()
    )
    moments = {
        kind: {s.name: source.read(f"actor/{kind}/{s.name}", s.box, torch.float32) for s in engine.shards()}
        for kind in source.kinds("actor").keys() - {"weights"}
    }
    engine.restore(moments, 3)
    norm = step(engine, layout, rank)
    parts = [torch.load(p) for p in sorted(Path(target).glob("after-*.pt"))]
    for s in engine.shards():
        for part in parts:
            box, value = part[s.name]
            if same and box == s.box:
                assert torch.equal(value, s.tensor), s.name
            elif box == s.box and not s.name.endswith(
                "k_proj.bias"
            ):  # its gradient is 0, so Adam makes steps of rounding
                # A step is lr long at most: what rounding does to it is far below.
                assert (value.float() - s.tensor.float()).abs().max() < (1e-6 if dtype == "f32" else 2e-2), s.name
    assert norm == pytest.approx(parts[0]["norm"], rel=0 if same else (1e-5 if dtype == "f32" else 1e-2))


LAYOUTS = {
    "dp2 zero 1": Layout(dp=2, zero=1),
    "tp2": Layout(tp=2),
    "dp2 zero 3": Layout(dp=2, zero=3),
    "dp2 zero 0": Layout(dp=2, zero=0),
}


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
        pieces = tuple(
            checkpoint.CheckpointPiece(p["name"], tuple(tuple(x) for x in p["box"])) for p in given.pop("pieces")
        )
        files.append(checkpoint.CheckpointFile(**given, pieces=pieces))
    path = commit(partial, Manifest(checkpoint.FORMAT, 3, 0, {}, program(plan), tuple(files)), 2)
    assert verify(path).iteration == 3
    ranks.run(2, _go_on, LAYOUTS[new], dtype, str(path), old == new)
    shutil.rmtree(path)


def test_a_host_says_what_is_wrong_with_its_part_and_takes_a_file_in_pieces(tmp_path, plan, monkeypatch):
    path = save(tmp_path / "run", plan, 20)
    monkeypatch.setattr(checkpoint_parts, "PIECE", 100)
    (one, two, states, _), there = checkpoint.read_manifest(path).files, tmp_path / "other"
    for file in (one, two):
        for offset in range(0, file.bytes, 100):
            if not offset or file == one:
                assert (
                    checkpoint_parts.take(
                        str(there), file.name, offset, checkpoint_parts.piece(str(path), file.name, offset)
                    )
                    == ""
                )
    assert checkpoint_parts.whole(str(there), one) == ""
    assert (
        checkpoint_parts.whole(str(there), two) == f"{two.name} came from another host and has 100 bytes of {two.bytes}"
    )
    assert checkpoint_parts.amiss(str(there), (one, two, states)) == {
        one.name: "",
        two.name: "is missing",
        states.name: "is missing",
    }
    flip(there)
    wrong = "was changed after it was written: its SHA-256 differs"
    assert checkpoint_parts.amiss(str(there), (one,)) == {one.name: wrong}


def test_a_checkpoint_whose_files_are_other_hosts_to_have_is_sound_without_them(tmp_path, plan):
    hosts = tuple(
        checkpoint.CheckpointHost(f"10.0.0.{r}", f"node{r}", (f"actor-rank-0000{r}.safetensors",)) for r in range(2)
    )
    path = save(tmp_path, plan, 20, written={"format_version": checkpoint.DISTRIBUTED, "hosts": hosts})
    (path / hosts[1].files[0]).unlink()
    assert verify(path).hosts == hosts
    flip(path)
    with pytest.raises(CorruptCheckpoint, match=r"its file actor-rank-00000.safetensors was changed"):
        verify(path)
