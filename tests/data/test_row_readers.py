"""Data files of each form: the rows are those of the file, and no value becomes another one."""

import json

import data_forms
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_forms import FORMS, lines
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.data import row_readers
from msrl_graph.data.datafile import RowStream, RowTaker, row_place
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.data_options import DataOptions
from msrl_graph.ir.graph import Column, Graph, Node
from msrl_graph.ir.plan import DataSource

FIELDS = {"question": "question", "answer": "answer"}
# Texts that readers which infer types take for dates, numbers, truth values and nulls.
TRAPS = [
    "2024-01-01",
    "2024-01-01 10:00:00",
    "007",
    "1e5",
    "NA",
    "null",
    "nan",
    "true",
    "3.0",
    "-",
    "[1, 2]",
    "a,b;c\t",
]
ROWS = [{"question": f"what? {i} é 中 🎈\u2028x", "answer": text} for i, text in enumerate(TRAPS * 3)]


def data(path, fields=FIELDS, **options):
    return DataSource("source", str(path), fields, options=DataOptions(**options))


def graph(element="text"):
    columns = (Column("question", "text"), Column("answer", element))
    return Graph("g", {}, columns, (), (Node("source", "", "source", (), ("question", "answer")),), (), (1,))


def rows(source):
    return [row for _, row in RowStream(source)]


def told(source, element="text"):
    """The message and the help of the first mistake."""
    with pytest.raises(Fault) as fault:
        taker = RowTaker(source, graph(element))
        for number, row in RowStream(source):
            taker.take(row, number)
    return fault.value.diagnostics[0].message, fault.value.diagnostics[0].help


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_rows_of_the_lines(tmp_path, form):
    FORMS[form](ROWS, tmp_path / form)
    assert rows(data(tmp_path / form)) == ROWS


NESTED = [
    {"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"style": "rule", "ground_truth": str(i)}}
    for i in range(9)
]


@pytest.mark.parametrize("form", [form for form in FORMS if "csv" not in form and "tsv" not in form])
def test_nested_fields_and_messages_are_the_same_in_each_form(tmp_path, form):
    FORMS[form](NESTED, tmp_path / form)
    found = rows(data(tmp_path / form, {"prompt": "prompt", "answer": "reward_model.ground_truth"}))
    assert found == [
        {"prompt": row["prompt"], "reward_model.ground_truth": row["reward_model"]["ground_truth"]} for row in NESTED
    ]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.text() | st.integers() | st.none() | st.booleans()), max_size=9
    ),
    st.integers(1, 40),
    st.sampled_from([None, 1, 2]),
)
@examples(60)
def test_a_list_is_read_piece_by_piece_as_json_has_it(tmp_path_factory, items, chunk, indent):
    path = tmp_path_factory.mktemp("d") / "rows.json"
    path.write_text(json.dumps(items, indent=indent) + "\n")
    file = row_readers.DataFile(path, "json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_readers, "CHUNK", chunk)
        with row_readers.open_text(file) as text:
            assert [*row_readers.json_list(text)] == [*enumerate(items, 1)]


def test_a_number_is_the_number_of_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    values = [3, 2.5, 2**70, -0.0, 1e300, True]
    path.write_text(lines([{"question": "q", "answer": value} for value in values]))
    assert [row["answer"] for row in rows(data(path))] == values and type(rows(data(path))[0]["answer"]) is int


@pytest.mark.parametrize("element", ["i32", "f32", "bool", "text"])
def test_a_cell_of_csv_is_text_or_the_number_that_it_states(tmp_path, element):
    path = tmp_path / "rows.csv"
    cell, value = {"i32": ("7", 7), "f32": (" -2.5", -2.5), "bool": ("True", True), "text": ("007", "007")}[element]
    path.write_text(f'question,answer\n"a ""b"", c\nd",{cell}\n')
    ((number, row),) = RowStream(data(path))
    found = RowTaker(data(path), graph(element)).take(row, number)
    assert found["question"] == 'a "b", c\nd'
    assert found["answer"] == value if element == "text" else found["answer"].tolist() == [value]
    assert row_place(data(path), number) == f"line 3 of {path}"


def test_values_that_the_library_datasets_stores_as_json_are_values(tmp_path):
    datasets = pytest.importorskip("datasets")
    items = [{"question": {"x": 1}, "answer": ["a", 2]}, {"question": [3], "answer": "b"}]
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(items, on_mixed_types="use_json")
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert rows(data(tmp_path / "rows.parquet")) == rows(data(tmp_path / "saved")) == items


def test_what_the_library_datasets_writes_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_list(ROWS)
    made.to_json(tmp_path / "rows.jsonl")
    made.to_csv(tmp_path / "rows.csv")
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict(train=made, test=made.select(range(2))).save_to_disk(tmp_path / "splits")
    chosen = made.shuffle(seed=0).select(range(5))
    chosen.save_to_disk(tmp_path / "chosen")
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "one"):
        assert rows(data(tmp_path / name)) == ROWS
    assert rows(data(tmp_path / "splits", split="test")) == ROWS[:2]
    assert rows(data(tmp_path / "chosen")) == chosen.to_list()


def test_dates_of_a_parquet_file_are_no_text(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["q"], "answer": pa.array([0], pa.timestamp("s"))}), path)
    assert told(data(path))[0] == f"row 1 of {path} has datetime in `answer`, where text, a number or messages belong"


def test_skip_and_take_select_rows_before_they_are_parsed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("broken\n" + lines(ROWS[:5]) + "broken\n")
    assert rows(data(path, skip=1, take=5)) == ROWS[:5]
    assert rows(data(path, skip=3, take=2)) == ROWS[2:4]
    data_forms.shards(ROWS, tmp_path / "shards" / "x")
    assert rows(data(tmp_path / "shards" / "*.jsonl", skip=2, take=30)) == ROWS[2:32]
    with pytest.raises(Fault, match="has no rows after `skip`"):
        rows(data(path, skip=7))


def test_rows_without_a_value_are_dropped_and_counted(tmp_path):
    items = [{"question": "q", "m": {"answer": "1"}}, {"question": "q", "m": None}, {"question": "q"}, {"m": {}}]
    items += [
        {"question": "q", "m": {}},
        {"question": "q", "m": {"answer": None}},
        {"question": "q", "m": {"answer": ""}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(items))
    stream = RowStream(data(path, {"question": "question", "answer": "m.answer"}, missing="omit"))
    assert [row["m.answer"] for _, row in stream] == ["1", ""]
    assert stream.dropped == {"answer": 4, "question": 1}
    place = f"line 2 of {path} has null in `m`, where an object with the field `answer` belongs"
    assert told(data(path, {"question": "question", "answer": "m.answer"})) == (
        place,
        "give each row an object in `m`, or leave such rows out: `missing = omit`",
    )
    path.write_text("question,answer\nq,1\nq,\n")
    path = path.rename(tmp_path / "rows.csv")
    message, help = told(data(path))
    assert message == f"line 3 of {path} has null in `answer`, where text, a number or messages belong"
    assert help == "to leave such rows out, write `missing = omit`"
    assert len(rows(data(path, missing="omit"))) == 1


def test_a_template_inserts_fields(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{"a": "x{y}", "b": {"c": 3.0}, "answer": 1}]))
    template = "{a} and {b.c} {{}}"
    assert rows(data(path, {"question": template, "answer": "answer"})) == [{template: "x{y} and 3 {}", "answer": 1}]
    message, _ = told(data(path, {"question": "{d}", "answer": "answer"}))
    assert message == f"line 1 of {path} has no field `d`, which the column `question` reads"
    assert told(data(path, {"question": "{b}", "answer": "answer"}))[0] == (
        f"line 1 of {path} has dict in `b`, where text or a number belongs"
    )


BROKEN = {
    "cut.json": (b'[{"question": "q", "answer": "a"},', "row 2 of {} is not JSON: Expecting value at character 1"),
    "comma.json": (b'[{"question": "q", "answer": "a"} {}]', "row 1 of {} is not followed by a comma or `]`"),
    "open.json": (b'[{"question": "q", "answer": "a"}', "row 1 of {} is the last row, and `]` is missing after it"),
    "after.json": (b'[{"question": "q", "answer": "a"}]]', "row 1 of {} is followed by text after the end of the list"),
    "texts.json": (b'["a"]', "row 1 of {} is not an object"),
    "object.json": (b'{\n"question": "q"\n}', "line 1 of {} is not JSON: Expecting property name"),
    "cells.csv": (b"question,answer\nq,a\nq\n", "line 3 of {} has 1 cells, and the first line names 2 fields"),
    "quote.csv": (b'question,answer\n"q" x,a\n', "line 2 of {} is not CSV: ',' expected after '\"'"),
    "twice.csv": (b"question,answer,answer\nq,a,a\n", "the data file {} has several fields `answer`"),
    "utf16.csv": ("question,answer\nq,a\n".encode("utf-16"), "the data file {} cannot be read: 'utf-8' codec"),
    "cut.jsonl.gz": (b"\x1f\x8b\x08\x00", "the data file {} cannot be read: Compressed file ended"),
    "no.jsonl.gz": (b"{}", "the data file {} cannot be read: Not a gzipped file"),
    "no.jsonl.xz": (b"{}", "the data file {} cannot be read: Input format not supported"),
    "no.jsonl.bz2": (b"{}", "the data file {} cannot be read: Invalid data stream"),
    "no.jsonl.zst": (b"not zstd", "the data file {} "),
    "no.parquet": (b"PAR1", "the data file {} is not a Parquet file"),
    "no.arrow": (b"ARROW", "the data file {} is not an Arrow file"),
    "half.json": (
        b'[{"question": "\\ud83d", "answer": "a"}]',
        "row 1 of {} has half a character (U+D83D) in `question`",
    ),
    "none.json": (b"[]", "the data file {} has no rows"),
    "none.csv": (b"question,answer\n", "the data file {} has no rows"),
    "blank.jsonl": (b"\n \n", "the data file {} has no rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_file(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    assert told(data(tmp_path / name))[0].startswith(message.format(tmp_path / name))
