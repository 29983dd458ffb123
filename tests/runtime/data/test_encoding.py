"""Row files and notes of the dock: what was written is read, and no damaged byte is more than an error of the run."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.runtime.data import encoding
from msrl_graph.runtime.data.columns import Array, ColumnData, ColumnRows, Verdicts, texts
from msrl_graph.runtime.dock.messages import Round, WorkShare
from msrl_graph.runtime.dock.segments import Room, Segments
from msrl_graph.runtime.process.task import CutPrompt, Task, WeightFetch
from msrl_graph.runtime.process.task_report import RunError

RESPONSES = ((np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.zeros(3, np.int32), True),)
TASK = Task(
    "train",
    3,
    4,
    {"g": 2},
    9,
    {"a": 0.5},
    {"e": WeightFetch(1, 2)},
    ("e",),
    (CutPrompt(3, RESPONSES, 2, 1, 5),),
    "rest",
)
ROUND = Round(1, (WorkShare(np.arange(2), np.ones(2, int), np.arange(2)),), True)


def same(one, other):
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(same(getattr(one, f), getattr(other, f)) for f in vars(one))
    return one == other


@pytest.mark.parametrize(
    ("value", "kind"), [(TASK, Task), (("n", [ROUND, ROUND]), tuple[str, list[Round]])], ids=["task", "rounds"]
)
def test_a_note_is_read_as_it_was_written(value, kind):
    assert same(value, encoding.decode(encoding.encode(value), kind))


ARRAYS = (
    np.arange(2000),
    np.zeros((3, 0), np.float32),
    np.arange(6000, dtype=np.int16).reshape(2, 3, -1)[:, ::2],
    ROUND,
)
KIND = tuple[Array, Array, Array, Round]


def test_large_arrays_are_next_to_a_message_and_not_copied():
    buffers = []
    data = encoding.encode(ARRAYS, buffers)
    assert [view.nbytes for view in buffers] == [16_000, 8_000] and len(data) < 1000
    assert np.shares_memory(np.frombuffer(buffers[0], np.int64), ARRAYS[0])
    found = encoding.decode(data, KIND, buffers)
    assert same(ARRAYS, found) and np.shares_memory(found[0], ARRAYS[0])


def test_a_message_without_its_buffers_is_an_error():
    buffers = []
    data = encoding.encode(ARRAYS, buffers)
    for false in ([], buffers[:1], [b"", buffers[1]], [buffers[0][:-1], buffers[1]]):
        with pytest.raises(encoding.DecodeError):
            encoding.decode(data, KIND, false)
    assert same(ARRAYS, encoding.decode(data, KIND, buffers))
    with pytest.raises(encoding.DecodeError):  # those of an earlier message are gone
        encoding.decode(data, KIND)


@pytest.mark.parametrize("kind", [ColumnRows, Verdicts])
def test_verdicts_stay_verdicts(kind):
    sent = {"c": kind(np.arange(3), ColumnData(np.arange(3, dtype=np.int32)))}
    (found,) = encoding.decode(encoding.encode(sent), dict[str, ColumnRows | Verdicts]).values()
    assert type(found) is kind and same(found.rows, sent["c"].rows) and same(found.column, sent["c"].column)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["a"]), np.zeros(1, "i4,f4"), np.zeros(1, "M8[s]")])
def test_arrays_of_other_than_numbers_are_not_encoded(array):
    with pytest.raises((NotImplementedError, TypeError)):
        encoding.encode(array)


@pytest.mark.parametrize(
    ("dtype", "shape", "offset"),
    [("O", (1,), 0), ("i4,O", (1,), 0), ("x", (1,), 0), ("<i4", (-1,), 0), ("<f8", (2, -2), 0), ("<i4", (17,), 0),
     ("<i4", (1 << 62, 4), 0), ("<i4", (1,), -4), ("<i4", (1,), 64), ("<f8", (1,), 1 << 70)],
)  # fmt: skip
def test_an_array_that_does_not_fit_is_refused(dtype, shape, offset):
    with pytest.raises(encoding.DecodeError):
        encoding.view(bytes(64), dtype, shape, offset)


def test_each_byte_of_a_note_may_be_damaged():
    data = encoding.encode(TASK)
    for i in range(len(data)):
        for other in (0, 0xFF, data[i] ^ 1):
            with suppress(encoding.DecodeError):
                encoding.decode(data[:i] + bytes([other]) + data[i + 1 :], Task)
    for i in range(len(data)):
        with pytest.raises(encoding.DecodeError):
            encoding.decode(data[:i], Task)


def written(folder):
    files = Segments(Room(folder))
    rows = np.arange(3)
    pieces = {"text": ColumnRows(rows, texts(["a", "", "bcd"])), "times": Verdicts(rows, ColumnData(np.arange(3)))}
    files.write("train/0", "s", "node", pieces)
    return folder / "train:0" / "s"


def test_each_byte_of_a_head_may_be_damaged(tmp_path):
    path = written(tmp_path)
    whole = path.read_bytes()
    head = 8 + struct.unpack_from("<Q", whole)[0]
    for i in range(head):
        for other in {0, 0xFF, whole[i] ^ 1} - {whole[i]}:
            path.write_bytes(whole[:i] + bytes([other]) + whole[i + 1 :])
            try:
                Segments(Room(tmp_path)).read("train/0", "s")
            except RunError as error:
                assert str(path) in str(error)
    for size in (0, 5, 8, head - 1, head, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match="is damaged"):
            Segments(Room(tmp_path)).read("train/0", "s")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_data(data):
    for kind in (Task, tuple[str, list[Round]]):
        with suppress(encoding.DecodeError):
            encoding.decode(data, kind)
