"""Data: each pass deals every usable row once, in an order of its own; which rows an iteration gets is known
beforehand."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.data import datafile
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.graph import Column, Dimension, Graph, Node, Worker
from msrl_graph.ir.options import Run
from msrl_graph.ir.plan import DataSource, Deployment, Plan
from msrl_graph.model import models
from msrl_graph.runtime.data.dataset import Dataset

EXAMPLE = ROOT / "examples" / "arithmetic"


def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(EXAMPLE / "model" / "tokenizer.json"))


def plan(bound=6, seed=0, vocabulary=16):
    columns = (
        Column("prompt", "i32", (Dimension(bound, ragged=True),)),
        Column("answer", "text"),
        Column("response", "i32", (Dimension(6, ragged=True),)),
    )
    source = Node("source", "", "source", (), ("prompt", "answer"))
    node = Node("actor.generate", "actor", "generate", ("prompt",), ("response",))
    graph = Graph("g", {}, columns, (Worker("actor", "policy", model="policy"),), (source, node), (), (1,))
    model = replace(models.load("./model", EXAMPLE), vocabulary=vocabulary)
    return Plan(graph, None, Deployment("d", {"policy": model}, {}, {}, {}, run=Run(seed=seed)))


def dataset(folder, rows, seed=0, bound=6):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return Dataset(
        DataSource("source", str(path), {"prompt": "question", "answer": "gold"}), plan(bound, seed), tokenizer()
    )


ROWS = [{"question": f"{i}+1=", "gold": str(i + 1), "other": None} for i in range(10)]


@given(count=st.integers(1, 25), seed=st.integers(0, 5))
@examples(30)
def test_every_pass_deals_each_row_once(tmp_path_factory, count, seed):
    data = dataset(tmp_path_factory.mktemp("d"), ROWS, seed)
    dealt = []
    while len(dealt) < 30:
        rows = data.rows(len(dealt), count)
        dealt += [rows["answer"].text(i) for i in range(count)]
    for turn in range(3):
        assert sorted(map(int, dealt[10 * turn : 10 * turn + 10])) == list(range(1, 11))
    assert dealt[:10] != dealt[10:20] or dealt[10:20] != dealt[20:30]
    # Any rows can be had at once, without those before them.
    again = data.rows(len(dealt) - count, count)
    assert [again["answer"].text(i) for i in range(count)] == dealt[-count:]


def test_columns_of_a_row_stay_together_and_ids_are_the_tokenizers(tmp_path):
    rows = dataset(tmp_path, ROWS).rows(0, 10)
    for i in range(10):
        text = tokenizer().decode(rows["prompt"][i].tolist())
        assert int(text.split("+")[0]) + 1 == int(rows["answer"].text(i))


def test_another_seed_is_another_order(tmp_path):
    orders = {tuple(dataset(tmp_path, ROWS, seed).rows(0, 10)["answer"].values) for seed in range(4)}
    assert len(orders) == 4


def test_prompts_that_are_too_long_or_empty_are_left_out_and_counted(tmp_path):
    rows = [
        {"question": "1+1=", "gold": 2},
        {"question": "111+11=", "gold": 122},
        {"question": "", "gold": 0},
        {"question": "99+99=", "gold": 198},
    ]
    data = dataset(tmp_path, rows)
    assert (len(data), data.too_long) == (2, 2)
    assert sorted(data.all()["answer"].text(i) for i in range(2)) == [
        "198",
        "2",
    ]  # a number in a text column is its text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of {path} is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[1]", "line 2 of {path} is not an object"),
        ('{"question": "1"}', "line 2 of {path} has no field `gold`, which the column `answer` reads"),
        (
            '{"question": 1, "gold": "2"}',
            "line 2 of {path} has int in `question`, where text, messages or token ids belong",
        ),
        (
            '{"question": "1", "gold": true}',
            "line 2 of {path} has bool in `gold`, where text, a number or messages belong",
        ),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(Fault) as fault:
        Dataset(DataSource("source", str(path), {"prompt": "question", "answer": "gold"}), plan(), tokenizer())
    assert fault.value.diagnostics[0].message == message.format(path=path)


def test_a_token_that_the_model_does_not_know_is_told_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps(r) for r in (ROWS[0], {"question": "=" * 9, "gold": "0"}))
        + '\n\n{"question": "1=", "gold": "1"}\n'
    )
    last = tokenizer().token_to_id("=")
    source = DataSource("source", str(path), {"prompt": "question", "answer": "gold"})
    assert len(Dataset(source, plan(vocabulary=last + 1), tokenizer())) == 2
    path.write_text(
        path.read_text().replace(json.dumps(ROWS[0]), "")
    )  # the row that is too long is left out, and never told
    with pytest.raises(Fault) as fault:
        Dataset(source, plan(vocabulary=last), tokenizer())
    (told,) = fault.value.diagnostics
    assert told.code == "bad-data"
    assert told.message == f"line 4 of {path} has the token {last} ('=') in `prompt`, outside the vocabulary of {last}"


def test_only_a_newline_ends_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1=", "gold": "a\u2028b"}\r\n', encoding="utf-8", newline="")
    data = Dataset(DataSource("source", str(path), {"prompt": "question", "answer": "gold"}), plan(), tokenizer())
    assert data.all()["answer"].text(0) == "a\u2028b"


def test_other_files(tmp_path):
    for name, code in (("rows.csv", "missing-file"), ("none.jsonl", "missing-file"), ("none.parquet", "missing-file")):
        with pytest.raises(Fault) as fault:
            Dataset(DataSource("source", str(tmp_path / name), {}), plan(), tokenizer())
        assert fault.value.diagnostics[0].code == code
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}\n')
    with pytest.raises(Fault) as fault:
        Dataset(DataSource("source", str(tmp_path / "latin.jsonl"), {}), plan(), tokenizer())
    assert fault.value.diagnostics[0].code == "missing-file" and "cannot be read" in fault.value.diagnostics[0].message


PAIRS = {"prompt": "question", "answer": "gold"}


def parquet(path, rows, **options):
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, path, **options)
    return DataSource("source", str(path), PAIRS)


def told(data):
    with pytest.raises(Fault) as fault:
        Dataset(data, plan(), tokenizer())
    (diagnostic,) = fault.value.diagnostics
    return diagnostic.code, diagnostic.message, diagnostic.help


@given(st.lists(st.text("0123456789+=", max_size=8), min_size=1, max_size=20), st.data(), st.integers(1, 7))
@examples(40)
def test_the_same_rows_are_the_same_data_in_either_file(tmp_path_factory, questions, data, part):
    folder = tmp_path_factory.mktemp("d")
    kind = data.draw(
        st.sampled_from(
            [st.text(max_size=5), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False)]
        )
    )
    rows = [{"question": q, "gold": data.draw(kind), "other": [1, 2]} for q in ["1=", *questions]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    one = Dataset(DataSource("source", str(folder / "rows.jsonl"), PAIRS), plan(), tokenizer())
    other = Dataset(parquet(folder / "rows.parquet", rows, row_group_size=part), plan(), tokenizer())
    assert (len(one), one.too_long) == (len(other), other.too_long)
    for position in (0, 4):
        mine = one.rows(position, 4)
        theirs = other.rows(position, 4)
        for name in PAIRS:
            assert mine[name].lengths.tolist() == theirs[name].lengths.tolist()
            assert mine[name].values.tobytes() == theirs[name].values.tobytes()


TOOL = {"type": "function", "function": {"name": "look_up", "arguments": {"city": "X"}}}
OTHER = {"type": "function", "function": {"name": "look_up", "arguments": {"date": "Y"}}}


def test_messages_have_the_fields_that_they_were_written_with_in_either_file(tmp_path):
    """Arrow gives the arguments of each call those of all."""
    said = [[{"role": "user", "content": "when?"}, {"role": "assistant", "tool_calls": [c]}] for c in (TOOL, OTHER)]
    rows = [{"question": q, "gold": "1"} for q in said]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = DataSource("source", str(tmp_path / "rows.jsonl"), PAIRS)
    table = parquet(tmp_path / "rows.parquet", rows)
    assert pq.read_table(table.path).to_pylist() != rows
    assert [*datafile.RowStream(table)] == [*datafile.RowStream(lines)] == [*enumerate(rows, 1)]


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet"])
def test_answers_that_are_whole_numbers_are_written_so_though_a_library_made_them_floats(tmp_path, kind):
    def answers(values):
        rows = [{"question": "1=", "gold": value} for value in values]
        path = tmp_path / kind
        if kind == "rows.parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        found = Dataset(DataSource("source", str(path), PAIRS), plan(), tokenizer()).columns["answer"]
        return [found.text(i) for i in range(len(found))]

    assert answers([3.0, 12.0, 4e20]) == ["3", "12", "4e+20"]
    assert answers([3.0, 12.5]) == ["3.0", "12.5"]
    for odd, word in ((float("nan"), "nan"), (None, "null"), (float("-inf"), "-inf")):
        with pytest.raises(Fault, match=rf"(row|line) 2 of .* has {word} in `gold`, where text, a number or messages"):
            answers([3.0, odd])


def test_what_is_wrong_with_a_parquet_file(tmp_path):
    path = tmp_path / "rows.parquet"
    row = {"question": "1+1=", "gold": "2"}
    wanted = "where text, messages or token ids belong"
    assert told(parquet(path, [row, {"question": None, "gold": "2"}])) == (
        *(
            "bad-data",
            f"row 2 of {path} has null in `question`, {wanted}",
            "to leave such rows out, write `missing = omit`",
        ),
    )
    assert told(parquet(path, [row, row, {**row, "gold": None}], row_group_size=1))[1].startswith(
        f"row 3 of {path} has null in `gold`"
    )
    chat = [{"question": [{"role": "user", "content": "1+1="}], "gold": "2"}]
    assert told(parquet(path, chat)) == (
        "bad-data",
        f"row 1 of {path} has messages in `question`, and the model folder {EXAMPLE / 'model'} has no chat "
        "template to render them: "
        "there is no chat_template.jinja, and no `chat_template` in tokenizer_config.json",
        "name the folder of a model that was trained to chat, or write the field as text",
    )
    assert (
        told(parquet(path, [{"question": b"1+1=", "gold": "2"}]))[1]
        == f"row 1 of {path} has bytes in `question`, {wanted}"
    )
    assert told(parquet(path, [{"question": "1+1=", "answer": "2", "n": 1}])) == (
        "bad-data",
        f"the data file {path} has no field `gold`, which the column `answer` reads",
        'write `{ answer = "answer" }`; its fields are `question`, `answer`, `n`',
    )
    assert (
        told(parquet(path, pa.table({"question": pa.array([], pa.string()), "gold": pa.array([], pa.string())})))[0]
        == "no-data"
    )
    twice = pa.Table.from_arrays([pa.array(["1="]), pa.array(["1"]), pa.array(["2"])], ["question", "gold", "gold"])
    assert told(parquet(path, twice))[1] == f"the data file {path} has several fields `gold`"
    path.write_text(json.dumps(row) + "\n")
    code, message, _ = told(DataSource("source", str(path), PAIRS))
    assert code == "bad-data" and message.startswith(f"the data file {path} is not a Parquet file: ")


def test_words_that_a_parquet_file_lists_once_are_text(tmp_path):
    table = pa.table({"question": pa.array(["1+1=", "2+2="]), "gold": pa.array(["even", "even"]).dictionary_encode()})
    data = Dataset(parquet(tmp_path / "rows.parquet", table), plan(), tokenizer())
    assert [data.all()["answer"].text(i) for i in range(2)] == ["even", "even"]


def test_the_examples_files_hold_every_pair_once():
    lines = [json.loads(x) for name in ("train", "test") for x in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]
    pairs = {x["prompt"] for x in lines}
    assert len(lines) == len(pairs) == 10_000
    assert all(eval(x["prompt"][:-1]) == int(x["answer"]) for x in lines)
    assert len((EXAMPLE / "test.jsonl").read_text().splitlines()) == 500
