"""Rows that Arrow parses many at a time are those that are read one by one, and so are their errors."""

import json

import chat
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_forms import FORMS
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.diagnostics import Fault
from msrl_graph.ir.data_options import DataOptions
from msrl_graph.ir.plan import DataSource
from msrl_graph.runtime.data import dataset as module
from msrl_graph.runtime.data import text_blocks
from msrl_graph.runtime.data.dataset import Dataset

NODES = """
node actor.generate(prompt) -> out
node host.reward(out, answer) -> out_r { call = exact_match(response = out) }
source -> actor.generate
actor.generate, source -> host.reward
"""
COLUMNS = {"prompt": "i32[<= 40]", "answer": "text", "out": "i32[<= 4]", "out_r": "f32"}
FIELDS = {"prompt": "question", "answer": "gold"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    chat.model(folder / "model")
    return chat.plan(folder, folder / "none.jsonl", COLUMNS, NODES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def outcome(made, path, blocks, size=1 << 20, **options):
    """What is known of the rows, or the error; and the number of rows that Arrow has parsed."""
    parsed = 0
    real = text_blocks.read_blocks

    def read(*arguments):
        nonlocal parsed
        for block in real(*arguments) or ():
            parsed += len(block.numbers) if block.columns is not None else 0
            yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH", 2)
        patch.setattr(text_blocks, "BYTES", size)
        patch.setattr(module.row_store, "VERSION", (blocks, size))
        read_blocks = (lambda *a: read(*a) if real(*a) is not None else None) if blocks else lambda *_: None
        patch.setattr(text_blocks, "read_blocks", read_blocks)
        try:
            data = Dataset(DataSource("source", str(path), FIELDS, options=DataOptions(**options)), made)
        except Fault as fault:
            return [(d.code, d.message.partition(" cannot be read")[0], d.help) for d in fault.diagnostics], parsed
        columns = {
            name: (column.values.tolist(), column.lengths.tolist(), str(column.values.dtype))
            for name, column in data.all().items()
        }
        return (columns, data.lines.tolist(), data.left_out, data.dropped, data.indices(0, 30).tolist()), parsed


LINE = {"question": "one plus two", "gold": "3", "other": [1, {"x": None}]}
LINES = [
    json.dumps(LINE),
    json.dumps({**LINE, "question": 'é 中 🎈 \u2028 " \\ / \b\f\n\r\t\0'}),
    json.dumps({**LINE, "question": "é 中 🎈"}, ensure_ascii=False),
    json.dumps({**LINE, "gold": "[1, 2]"}),
    json.dumps({**LINE, "gold": "2024-01-01"}),
    json.dumps({**LINE, "question": "x" * 90}),
    json.dumps({**LINE, "question": ""}),
    json.dumps({**LINE, "question": [{"role": "user", "content": "one"}]}),
    json.dumps({**LINE, "question": ' [{"role": "user", "content": "one"}]'}),
    json.dumps({**LINE, "question": [4, 5]}),
    json.dumps({**LINE, "gold": 3}),
    json.dumps({**LINE, "gold": 3.0}),
    json.dumps({**LINE, "gold": 2**70}),
    json.dumps({**LINE, "other": 2024}),
    '{"question": "one", "gold": "1", "gold": "2"}',
    '{"question": "one", "gold": "1", "other": NaN}',
    "  \t ",
    "",
    '  {"gold": "1", "question": "one"}  \r',
]
BAD = [
    '{"question": "one", "gold": "1"} {"question": "one", "gold": "1"}',
    json.dumps({**LINE, "gold": None}),
    '{"question": "one"}',
    '{"question": "\\ud83d", "gold": "1"}',
    '{"question": "a\tb", "gold": "1"}',
    '{"question": "one", "gold": "1"',
    '{"question": "one", "gold": true}',
    '["one", "1"]',
    "3",
    '{"question": "one", "gold": "1",}',
]


@given(st.lists(st.sampled_from(LINES), max_size=12), st.integers(1, 400), st.booleans())
@examples(60)
def test_lines_are_the_same_in_blocks(tmp_path_factory, made, lines, size, ends):
    path = tmp_path_factory.mktemp("d") / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * ends + "\n".join([*LINES[:3], *lines, *["\n"] * ends]).encode())
    assert outcome(made, path, True, size)[0] == outcome(made, path, False)[0]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("missing", ["error", "omit"])
def test_errors_are_the_same_in_blocks(tmp_path, made, bad, missing):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*LINES[:6], bad, *LINES[:3]]))
    for size in (1, 100, 1 << 20):
        assert outcome(made, path, True, size, missing=missing)[0] == outcome(made, path, False, missing=missing)[0]


ODD = [{"gold": None}, {"gold": "\ud83d"}, {"gold": 3}, {"question": [4]}, {"question": "\n[1]"}, {"question": ""}]


@pytest.mark.parametrize("odd", [{}, *ODD])
def test_rows_of_a_list_are_the_same_in_blocks(tmp_path, made, odd):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([LINE] * 5 + [LINE | odd] + [LINE] * 5 + ([[]] if odd == {"gold": 3} else [])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "ROWS", 3)
        assert outcome(made, path, True)[0] == outcome(made, path, False)[0]


def test_text_that_is_no_utf_8_is_an_error_in_blocks(tmp_path, made):
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(LINES[:3]).encode() + b'\n{"question": "\xff", "gold": "1"}\n')
    (((code, message, _),), _) = outcome(made, path, True)
    assert (code, message) == ("missing-file", f"the data file {path}")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_same_columns(tmp_path, made, form):
    rows = [{"question": f"one plus {i}", "gold": f"{i}"} for i in range(30)]
    FORMS[form](rows, tmp_path / form)
    found, parsed = outcome(made, tmp_path / form, True, 100)
    assert parsed == 30
    (tmp_path / "expected.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected, _ = outcome(made, tmp_path / "expected.jsonl", False)
    assert found[0] == expected[0] and found[2:] == expected[2:]


def test_values_that_are_no_text_are_read_one_by_one(tmp_path, made):
    path = tmp_path / "rows.parquet"
    for answers in (["1", "2", "3", "4"], [1, 2, 3, 4], [1.0, 2.0, 3.5, None], ["1", None, "3", "4"]):
        pq.write_table(pa.table({"question": ["one"] * 4, "gold": answers}), path, row_group_size=2)
        assert outcome(made, path, True)[0] == outcome(made, path, False)[0]
    words = pa.array(["a", "b", "a", "b"]).dictionary_encode()
    pq.write_table(pa.table({"question": ["one"] * 4, "gold": words}), path)
    assert outcome(made, path, True)[0] == outcome(made, path, False)[0]
