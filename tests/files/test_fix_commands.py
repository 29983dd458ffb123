"""Folders and files that others left unreadable: each help is applied, and then the program is accepted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from language import TESTS
from safetensors.torch import load_file, save_file

from msrl_graph.cli import compile_main, run_main
from msrl_graph.files import fix_commands

MODEL = TESTS.parent / "examples" / "arithmetic" / "model"
PROGRAM = """import grpo
cluster one { device = "cpu", devices_per_node = 2 }
deploy grpo on one {
  set prompt_len = 16
  set response_len = 16
  set prompts = 2
  model policy = "./model"
  data source  = "rows.jsonl"
}
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "p.rlg").write_text(PROGRAM)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    return tmp_path


def report(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a dry run prints; "" if it accepts the program."""
    status = run_main([str(folder / "p.rlg"), "--dry-run", "--diagnostics", "concise"])
    text = capsys.readouterr().err
    return text if status else ""


def apply(text: str) -> None:
    """Run the Python command of a help text."""
    command = re.findall(r"`(from .*)`", text)[0]
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


def with_module(name: str) -> str:
    return f"module.{name}"


def without_model(name: str) -> str:
    return name.removeprefix("model.")


@pytest.mark.parametrize("rename", [with_module, without_model])
def test_tensors_with_other_prefixes_are_renamed_by_the_command_of_the_help(
    folder: Path, rename: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "model" / "model.safetensors"
    before = load_file(file)
    save_file({rename(name): tensor for name, tensor in before.items()}, file)
    text = report(folder, capsys)
    assert "its tensors have other prefixes than transformers writes" in text
    apply(text)
    assert load_file(file).keys() == before.keys()
    assert report(folder, capsys) == ""


def test_weights_of_something_else_are_not_renamed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model" / "model.safetensors"
    save_file({f"vision.{name}": tensor for name, tensor in load_file(file).items()}, file)
    assert "(help: name a folder with a language model's weights)" in report(folder, capsys)


def test_transformers_writes_a_tokenizer_that_is_in_older_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary and merges of a GPT-2 tokenizer, without tokenizer.json."""
    model = folder / "model"
    (model / "tokenizer.json").unlink()
    assert "(help: copy the tokenizer.json of the model into the folder)" in report(folder, capsys)
    tokens = ["<pad>", "<eos>", *"0123456789+=", "Ġ"]
    text = ", ".join(f'"{token}": {number}' for number, token in enumerate(tokens))
    (model / "vocab.json").write_text(f"{{{text}}}", encoding="utf-8")
    (model / "merges.txt").write_text("#version: 0.2\n")
    (model / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "unk_token": "<eos>", "eos_token": "<eos>"}'
    )
    told = report(folder, capsys)
    assert "let transformers write it from vocab.json" in told
    apply(told)
    assert (model / "tokenizer.json").is_file() and report(folder, capsys) == ""


@pytest.mark.parametrize("file", ["model/model.safetensors", "model/tokenizer.json", "model/config.json", "rows.jsonl"])
def test_a_pointer_of_git_lfs_is_reported_as_one(folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / file).write_text(POINTER)
    text = report(folder, capsys)
    assert f"it is a pointer of Git LFS: fetch the file with `git -C {(folder / file).parent} lfs pull`" in text


def test_a_parquet_pointer_is_reported_by_compiling_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.parquet").write_text(POINTER)
    (folder / "p.rlg").write_text(PROGRAM.replace("rows.jsonl", "rows.parquet"))
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 1
    assert "lfs pull" in capsys.readouterr().err


def test_other_files_are_no_pointers(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"ver")
    assert (
        fix_commands.lfs(tmp_path / "short")
        == fix_commands.lfs(tmp_path / "missing")
        == fix_commands.lfs(tmp_path)
        == ""
    )
