"""Many rows are mapped from files: they are the rows that a few are in memory."""

import json
import subprocess
import sys

import chat
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.data import dataset as module
from msrl_graph.runtime.data import row_store
from msrl_graph.runtime.data.dataset import Dataset

NODES = """
node actor.generate(prompt) -> out
node host.reward(out, answer, scale, more) -> out_r { call = "f.py:f" }
source -> actor.generate
actor.generate, source -> host.reward
"""
COLUMNS = {"prompt": "i32[<= 12]", "answer": "text", "scale": "f32", "more": "json", "out": "i32[<= 4]", "out_r": "f32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    chat.model(folder / "model")
    (folder / "f.py").write_text("def f(out: str, answer: str, scale, more) -> float:\n    return 0.0\n")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msrl_graph" / "rows"


def plan(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return chat.plan(folder, path, COLUMNS, NODES)


def loaded(made, batch, monkeypatch):
    monkeypatch.setattr(module, "BATCH", batch)
    return Dataset(made.deploy.data["source"], made)


def same(one, other):
    assert one.lines.tolist() == other.lines.tolist() and one.usable.tolist() == other.usable.tolist()
    assert (one.left_out, one.dropped, one.reason) == (other.left_out, other.dropped, other.reason)
    for name, column in one.all().items():
        found = other.all()[name]
        assert column.values.tolist() == found.values.tolist() and column.values.dtype == found.values.dtype
        assert (column.offsets is None) == (found.offsets is None) and column.lengths.tolist() == found.lengths.tolist()
    assert one.indices(3, 20).tolist() == other.indices(3, 20).tolist()


def row(i, **other):
    return {"prompt": f"one plus {i}", "answer": str(i), "scale": i / 2, "more": {"i": [i]}} | other


TEXTS = st.sampled_from(
    ["one", "one plus two", "x" * 12, "x" * 13, "y" * 400, "", "é" * 6, "中" * 5, "two <|end|> plus"]
)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["7", 7, 3.0])), min_size=4, max_size=12))
@examples(25)
def test_mapped_rows_are_those_in_memory(folder, rows):
    made = plan(folder, [row(0), *(row(i, prompt=text, answer=value) for i, (text, value) in enumerate(rows))])
    with pytest.MonkeyPatch.context() as patch:
        one = loaded(made, 100, patch)
        other = loaded(made, 3, patch)
        assert not one.late and other.late == {"prompt"}
        same(one, other)


def test_token_ids_in_a_late_row_are_read_as_before(folder, monkeypatch):
    made = plan(folder, [*(row(i) for i in range(9)), row(9, prompt=[5, 6, 7]), row(10)])
    other = loaded(made, 4, monkeypatch)
    assert not other.late
    same(loaded(made, 100, monkeypatch), other)
    assert other.all()["prompt"][9].tolist() == [5, 6, 7]


def test_floats_of_all_batches_decide_how_answers_are_written(folder, monkeypatch):
    for last, text in ((5.0, "1"), (5.5, "1.0")):
        made = plan(folder, [*(row(i, answer=1.0) for i in range(9)), row(9, answer=last)])
        other = loaded(made, 4, monkeypatch)
        assert other.all()["answer"].text(0) == text
        same(loaded(made, 100, monkeypatch), other)


def test_stored_rows_are_used_again_until_the_file_changes(folder, cache, monkeypatch):
    made = plan(folder, [row(i) for i in range(9)])
    loaded(made, 4, monkeypatch)
    (stored,) = [path for path in cache.iterdir() if path.is_dir()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_store", None)  # nothing is written again
        loaded(made, 4, monkeypatch)
    again = plan(folder, [row(i, answer="x") for i in range(9)])
    assert loaded(again, 4, monkeypatch).all()["answer"].text(0) == "x"
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2 and stored.exists()


def test_a_writer_that_was_killed_leaves_no_rows(folder, cache, monkeypatch):
    made = plan(folder, [row(i) for i in range(9)])
    finish = row_store.RowWriter.finish

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(row_store.RowWriter, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        loaded(made, 4, monkeypatch)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    monkeypatch.setattr(row_store.RowWriter, "finish", finish)
    same(loaded(made, 100, monkeypatch), loaded(made, 4, monkeypatch))


def test_old_rows_are_removed_and_a_cache_that_cannot_be_written_is_told(folder, cache, monkeypatch, tmp_path):
    made = plan(folder, [row(i) for i in range(9)])
    loaded(made, 4, monkeypatch)
    monkeypatch.setattr(row_store, "KEPT", -1.0)
    loaded(plan(folder, [row(i, answer="z") for i in range(9)]), 4, monkeypatch)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Fault) as fault:
        loaded(made, 4, monkeypatch)
    assert fault.value.diagnostics[0].help.startswith("set XDG_CACHE_HOME to a folder of your own")


PROCESS = """
import sys
sys.path.insert(0, "tests/support")
from pathlib import Path
from msrl_graph.ir.plan import from_json
from msrl_graph.runtime.data import dataset as module
module.BATCH = 4
made = from_json(Path(sys.argv[1]).read_bytes())
data = module.Dataset(made.deploy.data["source"], made)
print(len(data), int(data.all()["prompt"].values.sum()))
"""


def test_processes_at_once_store_rows_once(folder, cache, tmp_path):
    made = plan(folder, [row(i) for i in range(300)])
    (tmp_path / "plan.json").write_text(made.to_json())
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "plan.json")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert len(outputs) == 1 and outputs.pop().startswith("300 ")
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_row_far_behind_is_reported_with_its_line(folder, monkeypatch):
    made = plan(folder, [*(row(i) for i in range(150)), row(150, scale="x")])
    with pytest.raises(Fault, match=r"line 151 of .* has str in `scale`, where a finite number belongs"):
        loaded(made, 4, monkeypatch)
