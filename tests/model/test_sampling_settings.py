"""Settings of generation_config.json that a run does not use are reported once, with what to write to have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from folders import ROOT

from msrl_graph.cli import compile_main, run_main
from msrl_graph.model.sampling_settings import read_sampling

ARITHMETIC = ROOT / "examples" / "arithmetic"
QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(ARITHMETIC / name, tmp_path)
    shutil.copytree(ARITHMETIC / "model", tmp_path / "model")
    shutil.copy(ARITHMETIC / "grpo.rlg", tmp_path / "p.rlg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recommend(folder: Path, **settings: object) -> None:
    file = folder / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_settings_that_change_nothing_are_left_out(folder: Path) -> None:
    assert read_sampling(folder / "model") == {}
    recommend(folder, temperature=1.0, top_p=1.0, top_k=None, do_sample=True, repetition_penalty=1)
    assert read_sampling(folder / "model") == {}
    recommend(folder, **QWEN)
    assert read_sampling(folder / "model") == {key: value for key, value in QWEN.items() if key != "do_sample"}


def test_unused_settings_are_told_once_and_the_help_has_them_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["p.rlg", "--check"], ["p.rlg", "--dry-run"]):
        main = compile_main if "--check" in command else run_main
        recommend(folder, repetition_penalty=None, temperature=None, top_k=None, top_p=None)
        assert main(command) == 0 and "unused-setting" not in capsys.readouterr().err
        recommend(folder, **QWEN)
        assert main(command) == 0
        told = capsys.readouterr().err
        assert told.count("hint[unused-setting]") == 1, told
        assert "`actor.generate` does not use these settings of the generation_config.json of `./model`: " in told
        # The program states its temperature.
        assert "top_p = 0.8, top_k = 20, repetition_penalty = 1.05" in told and "temperature" not in told
        assert "write `node actor.generate { top_p = 0.8, top_k = 20 }`; no program can state" in told
    text = (folder / "p.rlg").read_text()
    assert "temperature = 1.0" in text
    recommend(folder, repetition_penalty=1.0)
    (folder / "p.rlg").write_text(text.replace("temperature = 1.0", "temperature = 1.0, top_p = 0.8, top_k = 20"))
    assert compile_main(["p.rlg", "--check"]) == 0
    assert "unused-setting" not in capsys.readouterr().err
