"""Chat templates that do harm: each is stopped with its file's name, and the next conversation is rendered as ever."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import chat
import psutil
import pytest

from msrl_graph.cli import run_main
from msrl_graph.runtime.data import rendering
from msrl_graph.runtime.data.rendering import MEMORY, SECONDS, BadMessages
from msrl_graph.runtime.data.tokens import Tokens

USER = {"role": "user", "content": "what is one plus two"}
ASKED = "<|start|>user\nwhat is one plus two<|stop|>\n<|start|>assistant\n"
GROWS = '{%% set ns = namespace(x="ab") %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}'
LONG = f"takes more than {SECONDS:g} s of CPU time for one conversation"
LARGE = f"needs more than {MEMORY >> 20} MiB of memory for one conversation"
HARMFUL = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LONG),
    "doubled": (GROWS % "ns.x ~ ns.x", LARGE),
    "repeated": ("{{ messages[0].content * 10 ** 10 }}", LARGE),
    "repeated as it is compiled": ('{{ "a" * 10 ** 11 }}', LARGE),
    "centred": ('{{ "a" | center(10 ** 11) }}', LARGE),
    "replaced": (GROWS % 'ns.x | replace("a", ns.x)', LARGE),
    "formatted": ('{{ "%99999999999d" % 1 }}', LARGE),
    "written": ('{{ "a" * 10 ** 7 }}', "writes 10,000,000 characters, more than "),
}


@pytest.mark.parametrize("how", HARMFUL)
def test_a_template_that_does_harm_is_stopped_and_named(tmp_path: Path, how: str) -> None:
    text, why = HARMFUL[how]
    tokens = Tokens(str(chat.model(tmp_path / "model", text, separate=how == "loops")))
    began = time.process_time()
    with pytest.raises(BadMessages) as told:
        tokens.prompt([USER])
    assert time.process_time() - began < SECONDS  # whoever asks computes nothing
    file = "chat_template.jinja" if how == "loops" else "tokenizer_config.json"
    assert str(told.value).startswith(f"the chat template of {tmp_path / 'model'}, in its {file}, {why}")
    if how in ("loops", "doubled"):
        assert Tokens(str(chat.model(tmp_path / "fine"))).prompt([USER]) == ASKED


def test_a_process_that_renders_ends_with_the_one_that_asks(tmp_path: Path) -> None:
    assert Tokens(str(chat.model(tmp_path / "model"))).prompt([USER]) == ASKED
    process = rendering._Process()
    line, program = process._connect()
    assert program.poll() is None
    line.close()
    assert program.wait(60) == 0


def test_the_process_that_renders_imports_no_torch_and_says_nothing_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(chat.model(tmp_path / "model"))
    capfd.readouterr()
    process = rendering._Process()
    assert process.ask(("template", folder, None))[0] == "fine"
    _, program = process._connect()
    assert not [m for m in psutil.Process(program.pid).memory_maps() if "torch" in m.path]
    assert capfd.readouterr() == ("", "")


def test_a_dry_run_of_a_model_whose_template_loops_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = chat.model(tmp_path / "model", HARMFUL["loops"][0], separate=True)
    Path("rows.jsonl").write_text(json.dumps({"question": [USER], "answer": "3"}) + "\n")
    Path("program.rlg").write_text("""
import grpo
cluster one { device = "cpu", devices_per_node = 1 }
deploy grpo on one {
  set prompts = 1
  set response_len = 8
  model policy = "./model"
  data source  = "rows.jsonl" { prompt = "question", answer = "answer" }
}
""")
    assert run_main(["program.rlg", "--dry-run"]) == 1
    told = capsys.readouterr().err
    row = f"line 1 of {os.path.relpath('rows.jsonl')} has messages in `question`"
    assert row in told and f"the chat template of {folder}, in its chat_template.jinja, {LONG}" in told, told
    (folder / "chat_template.jinja").write_text(chat.TEMPLATE)
    assert run_main(["program.rlg", "--dry-run"]) == 0, capsys.readouterr().err
