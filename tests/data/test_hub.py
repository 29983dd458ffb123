"""Data on the Hugging Face Hub: the files of a subset and a split, as they are, and no code."""

import json
import os
import subprocess
import sys

import hub_server
import pytest
from folders import ROOT

pytest.importorskip("datasets")

# In a process of its own, since the library reads its address when it is imported.
PROGRAM = """
import json, sys
from dataclasses import replace
from msrl_graph.data import hub
from msrl_graph.data.datafile import RowStream
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.data_options import DataOptions
from msrl_graph.ir.plan import DataSource

fields = {"prompt": "question", "answer": "answer"}
data = DataSource("source", "hf://datasets/" + sys.argv[1], fields, options=DataOptions(**json.loads(sys.argv[2])))
try:
    data = replace(data, path=hub.pin(data))
    assert hub.pin(data) == data.path
    data = replace(data, files=hub.fetch(data))
    print(json.dumps([data.path, [row for _, row in RowStream(data)]]))
except Fault as fault:
    print(json.dumps([fault.diagnostics[0].message, fault.diagnostics[0].help]))
"""


def read(folder, name="my/toy", script=False, endpoint="", **options):
    (folder / "work").mkdir(exist_ok=True)
    variables = {
        **os.environ,
        "HF_ENDPOINT": endpoint or hub_server.serve(script),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", PROGRAM, name, json.dumps(options)]
    done = subprocess.run(command, env=variables, cwd=folder / "work", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_rows_of_a_split_are_those_of_its_files(tmp_path):
    path, rows = read(tmp_path, subset="main", split="train")
    assert path == f"hf://datasets/my/toy@{hub_server.COMMIT}" and rows == hub_server.ROWS
    assert type(rows[0]["answer"]) is int  # the library's own reader infers a date, and 3.0
    assert read(tmp_path, subset="other")[1] == [{"question": "a", "answer": "b"}]


def test_what_is_not_there_is_told_with_what_is(tmp_path):
    message, help = read(tmp_path, subset="main")
    assert message.endswith("has several splits: its splits are `train`, `test`")
    assert help == 'name one: `{ split = "test" }`'
    message, help = read(tmp_path, subset="main", split="dev")
    assert message.endswith("has no split `dev`") and help == "its splits are `train`, `test`"
    message, _ = read(tmp_path, split="train")
    assert "['main', 'other']" in message
    message, help = read(tmp_path, name="my/none", split="train")
    assert message.startswith("there is no file or folder `my/none`, and it cannot be read from the Hugging Face Hub: ")
    assert help.startswith("check the path; ")
    message, _ = read(tmp_path, split="train", endpoint="http://127.0.0.1:9")
    assert message.startswith("there is no file or folder `my/toy`, and it cannot be read from the Hugging Face Hub: ")


def test_code_of_a_dataset_is_not_run(tmp_path):
    message, _ = read(tmp_path, script=True, split="train")
    assert message.endswith("Dataset scripts are no longer supported, but found toy.py")
    assert not (tmp_path / "work" / "ran").exists()
