"""Rows in memory that the processes of a host share: who reads, reads what was written; it goes when all have gone."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, Verdicts, ragged, texts
from msrl_graph.runtime.dock.messages import Round, WorkShare
from msrl_graph.runtime.dock.segments import Activity, Room, Segments
from msrl_graph.runtime.dock.warehouse import Warehouse, select_rows
from msrl_graph.runtime.process.task import Task

TASK = Task("train", 3, 4)


def pieces():
    rows = np.array([5, 2, 9])
    return {
        "text": ColumnRows(rows, texts(["a", "", "bcd"])),
        "logp": ColumnRows(rows, ragged([np.array(x) for x in ([1.5], [], [2.5, 3.5])], np.float32)),
        "score": ColumnRows(rows, ColumnData(np.array([1.0, 2.0, 3.0]))),
        "f.times": Verdicts(rows, ColumnData(np.array([0, 2, 1], np.int32))),
        "ids": ColumnRows(rows, ColumnData(np.arange(12, dtype=np.int32).reshape(4, 3), np.array([0, 1, 1, 4]))),
        "none": ColumnRows(np.zeros(0, np.int64), ragged([], np.int32)),
    }


def test_what_is_written_is_read_by_ascending_row(tmp_path):
    Segments(Room(tmp_path)).write(TASK.key, "s", "node", pieces())
    read = Segments(Room(tmp_path)).read(TASK.key, "s")
    assert list(read) == list(pieces())
    for name, piece in pieces().items():
        order = np.argsort(piece.rows)
        assert type(read[name]) is type(piece) and list(read[name].rows) == list(piece.rows[order])
        for i, position in enumerate(order):
            assert np.array_equal(read[name].column[i], piece.column[position])
        assert read[name].column.values.dtype == piece.column.values.dtype
        assert not read[name].column.values.flags.writeable


def test_of_a_row_that_is_there_twice_the_later_one_is_kept(tmp_path):
    files = Segments(Room(tmp_path))
    files.write("train/0", "s", "n", {"c": ColumnRows(np.array([3, 1, 3]), ColumnData(np.array([1.0, 2.0, 4.0])))})
    read = files.read("train/0", "s")["c"]
    assert list(read.rows) == [1, 3] and list(read.column.values) == [2.0, 4.0]


def test_memory_of_a_large_file_is_used_again_once_nobody_reads_it(tmp_path):
    files = Segments(Room(tmp_path))
    other = Segments(Room(tmp_path))

    def written(task, value):
        files.write(
            task,
            "s",
            "n",
            {"c": ColumnRows(np.arange(2), ColumnData(np.full(1 << 18, value), np.array([0, 9, 1 << 18])))},
        )
        return (tmp_path / task.replace("/", ":") / "s").stat().st_ino

    first = written("train/0", 1.0)
    held = other.read("train/0", "s")["c"].column.values
    files.drop("train/0")
    second = written("train/1", 2.0)
    assert second != first and (held == 1.0).all()  # it is read still
    files.drop("train/1")
    assert written("train/2", 3.0) == second
    assert (other.read("train/2", "s")["c"].column.values == 3.0).all() and (held == 1.0).all()
    files.drop("train/2")
    files.drop("train/3")
    assert not files._spares()  # nor kept for longer than a task


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_rows_of_a_piece_are_taken_by_their_numbers(lengths, data):
    rows = np.arange(len(lengths)) * 2
    piece = ColumnRows(rows, ragged([np.full(n, i) for i, n in enumerate(lengths)], np.int32))
    asked = data.draw(st.permutations(list(rows)))[: data.draw(st.integers(0, len(rows)))]
    found = select_rows(piece, np.array(asked, int))
    assert [list(found[i]) for i in range(len(asked))] == [[r // 2] * lengths[r // 2] for r in asked]


def test_rows_that_lie_together_are_not_copied():
    piece = ColumnRows(np.arange(8), ragged([np.full(3, i) for i in range(8)], np.int32))
    assert np.shares_memory(select_rows(piece, np.arange(2, 6)).values, piece.column.values)
    assert not np.shares_memory(select_rows(piece, np.array([2, 4])).values, piece.column.values)


def test_who_takes_a_dead_ones_place_knows_as_much(tmp_path):
    first = Warehouse(0, Segments(Room(tmp_path)))
    first.open(TASK)
    for name in ("b", "a"):
        first.segments.write(TASK.key, name, "node", pieces())
        first.put(TASK.key, name)
    rounds = [Round(0, (WorkShare(np.arange(2), np.ones(2, int), np.arange(2)),), last) for last in (False, True)]
    for round in rounds:
        first.keep(TASK.key, "n", [round])
    first.segments.write(TASK.key, "c", "node", {"c": ColumnRows(np.arange(2), ColumnData(np.ones(2)))})  # not told of
    second = Warehouse(0, Segments(Room(tmp_path)))
    assert second.tasks == {TASK.key: TASK}
    known = second.known(TASK)
    assert [n.place.segment for n in known.news if n.column == "score"] == ["b", "a"]
    assert [n.place.segment for n in known.news if n.column == "c"] == ["c"]
    assert [r.last for r in known.rounds["n"]] == [False, True]
    second.drop(TASK.key)
    assert not Warehouse(0, Segments(Room(tmp_path))).tasks


def test_a_part_that_was_being_written_is_nothing(tmp_path):
    files = Segments(Room(tmp_path))
    files.write(TASK.key, "s", "n", pieces())
    (tmp_path / TASK.key.replace("/", ":") / "t.part").write_bytes(b"half")
    assert files.names(TASK.key) == ["s"]


def test_what_a_process_does_is_there_when_it_is_gone(tmp_path):
    room = Room(tmp_path)
    noon = time.monotonic()
    one = Activity(room, "rank 0")
    other = Activity(room, "functions of host 0")
    assert room.read_statuses() == {}
    one.set_activity("RUN actor.update in train/3")
    other.set_activity("a call with a name of " + "many words " * 999)
    one.set_activity("RUN")
    del one, other
    said = room.read_statuses()
    assert said["rank 0"][0] == "RUN" and noon <= said["rank 0"][1] <= time.monotonic()
    assert said["functions of host 0"][0].startswith("a call with a name of many words many")
    Activity(room, "rank 0")  # who takes its place has said nothing yet
    assert "rank 0" not in room.read_statuses()


@given(st.lists(st.tuples(st.sampled_from(["train/0", "train/1"]), st.text(max_size=2000), st.integers(0, 10**12))))
def test_what_a_process_is_done_with_is_of_one_task_and_never_costs_what_it_does(told):
    with tempfile.TemporaryDirectory() as folder:
        room = Room(Path(folder))
        activity = Activity(room, "rank 0")
        done = {}
        last = ""
        activity.set_activity("RUN actor.update")
        for key, node, rows in told:
            done = done if key == last else {}
            last = key
            done[node] = done.get(node, 0) + rows
            activity.add_done_rows(key, node, rows)
        said = room.read_statuses()["rank 0"]
        assert said.activity == "RUN actor.update" and said.pid == os.getpid()
        assert (said.key, said.done) in ((last, done), ("", {}))
        assert said.done == done or len(json.dumps(done)) > 3000


HOLDS = textwrap.dedent("""
    import sys
    from msrl_graph.runtime.dock.segments import Room
    room = Room.create(sys.argv[1], 1 << 20)
    print(room.path, flush=True)
    sys.stdin.read()
""")


@pytest.mark.parametrize("more", [0, 2])
def test_a_room_goes_with_the_last_process_that_holds_it(more):
    name = f"msrl-test-{uuid.uuid4().hex}"
    held = []
    for _ in range(1 + more):
        held.append(subprocess.Popen([sys.executable, "-c", HOLDS, name], stdin=-1, stdout=subprocess.PIPE, text=True))
        path = Path(held[-1].stdout.readline().strip())
    assert path.is_dir() and path.name == name
    for process in held:
        assert path.exists()
        process.kill()
        process.communicate()
    until = time.monotonic() + 10
    while path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not path.exists()


def test_without_place_in_memory_a_room_is_among_the_temporary_files(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = f"msrl-test-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS.replace("1 << 20", "1 << 60"), name],
        stdin=-1, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    path = Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()
    assert path == tmp_path / name
