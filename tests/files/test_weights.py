"""Which files of a model's folder are its weights: those that transformers loads, whatever else lies beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import published
import pytest
import torch
from folders import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.backends.hf_modules import fill
from msrl_graph.cli import compile_main, run_main
from msrl_graph.files.weights import weight_files
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import full_box

ARITHMETIC = ROOT / "examples" / "arithmetic"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example, its model alone."""
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(ARITHMETIC / name, tmp_path)
    shutil.copytree(ARITHMETIC / "model", tmp_path / "model")
    shutil.copy(ARITHMETIC / "grpo.rlg", tmp_path / "p.rlg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stale(name: str) -> Change:
    """A file of an earlier save: the same tensors with other numbers."""

    def change(model: Path) -> None:
        held = load_file(ARITHMETIC / "model" / "model.safetensors")
        save_file({key: value + 1 for key, value in held.items()}, model / name, {"format": "pt"})

    return change


def sharded(model: Path) -> None:
    """The weights in several files, as transformers writes them."""
    (model / "model.safetensors").unlink()
    whole = AutoModelForCausalLM.from_pretrained(ARITHMETIC / "model", dtype=torch.float32)
    whole.save_pretrained(model, max_shard_size="300KB")
    assert len(index(model)["weight_map"]) > len({*index(model)["weight_map"].values()}) > 2


def index(model: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((model / "model.safetensors.index.json").read_text())
    return found


def indexed(change: Callable[[dict[str, str]], object]) -> Change:
    def apply(model: Path) -> None:
        said = index(model)
        change(said["weight_map"])
        (model / "model.safetensors.index.json").write_text(json.dumps(said))

    return apply


def pickled(model: Path, files: int = 1) -> None:
    """The weights as torch saves them, without safetensors."""
    published.pickle(model, files)


RIGHT: dict[str, tuple[Change, ...]] = {
    "one file": (),
    "a copy that comes first by its name": (stale("backup.safetensors"),),
    "another library's": (stale("consolidated.safetensors"),),
    "a shard of an earlier save": (stale("model-00001-of-00001.safetensors"),),
    "shards": (sharded,),
    "shards, and those of a save that had fewer": (sharded, stale("model-00001-of-00001.safetensors")),
    "an index of an earlier save": (
        sharded,
        lambda model: shutil.copy(ARITHMETIC / "model" / "model.safetensors", model),
    ),
    "a file of torch": (pickled,),
    "shards of torch": (partial(pickled, files=3),),
    "a file of torch, and another library's": (pickled, stale("consolidated.safetensors")),
    "both formats": (
        pickled,
        lambda model: torch.save({}, model / "pytorch_model.bin"),
        lambda model: shutil.copy(ARITHMETIC / "model" / "model.safetensors", model),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_weights_are_those_that_transformers_loads(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    for change in RIGHT[case]:
        change(folder / "model")
    model = load("./model", folder)
    found = {t.name: torch.full(t.shape, torch.nan) for t in model.weights}
    fill(model, [Shard(t.name, full_box(t.shape), found[t.name]) for t in model.weights])
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], theirs[name]) for name in found) and len(found) > 20
    # What is not read is told.
    left = sorted({*(folder / "model").glob("*.safetensors")} - {*weight_files(folder / "model").read})
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
    told = capsys.readouterr().err
    assert ("warning[unused-weight]" in told) == bool(left), told
    if left:
        more = f" and {len(left) - 1} more are" if len(left) > 1 else " is"
        assert f"{left[0].relative_to(folder)}{more} not read" in told, told
        for file in left:
            file.unlink()
        assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
        assert "unused-weight" not in capsys.readouterr().err


def renamed(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")


WRONG: dict[str, tuple[tuple[Change, ...], str]] = {
    "a name that nobody looks for": (
        (renamed,),
        "holds weights.safetensors, but neither model.safetensors nor model.safetensors.index.json",
    ),
    "a shard that is not there": (
        (sharded, lambda model: next(model.glob("model-00002-*")).unlink()),
        "names model-00002-of-",
    ),
    "a tensor that is in no file": (
        (sharded, indexed(lambda names: names.pop("model.norm.weight"))),
        "hold no `model.norm.weight`",
    ),
    "a file outside the folder": (
        (sharded, indexed(lambda names: names.update({"model.norm.weight": "../weights.safetensors"}))),
        "names '../weights.safetensors', which is not a file `*.safetensors` in the same folder",
    ),
    "no index": (
        (sharded, lambda model: (model / "model.safetensors.index.json").write_text("[]")),
        "is not an index of weights",
    ),
    "a shard of torch that is not there": (
        (partial(pickled, files=2), lambda model: next(model.glob("pytorch_model-00002-*")).unlink()),
        "names pytorch_model-00002-of-",
    ),
    "a file of torch that is cut": (
        (pickled, lambda model: os.truncate(model / "pytorch_model.bin", 1000)),
        "pytorch_model.bin cannot be read: it is not a complete file of torch",
    ),
    "a file of torch with another tensor": (
        (pickled, lambda model: torch.save({}, model / "pytorch_model.bin")),
        "hold no `model.embed_tokens.weight`",
    ),
    "an empty one": ((sharded, indexed(lambda names: names.clear())), "names no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_are_not_clear_are_refused_at_their_line(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = WRONG[case]
    for change in changes:
        change(folder / "model")
    for command in (compile_main, run_main):
        assert command([str(folder / "p.rlg"), "--check" if command is compile_main else "--dry-run"]) == 1
        told = capsys.readouterr().err
        assert message in told and '= "./model"' in told and "Traceback" not in told, told


def test_the_fix_that_is_named_helps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "model"
    renamed(model)
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 1
    assert "let transformers write the folder again: `model.save_pretrained(folder)`" in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(ARITHMETIC / "model").save_pretrained(model)
    (model / "weights.safetensors").unlink()
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
