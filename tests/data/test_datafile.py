"""Data files as compiling reads them: as a run does, from their head alone, and what is told as help helps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folders import ROOT

from msrl_graph import Fault, algorithms, compile
from msrl_graph.cli import compile_main, run_main
from msrl_graph.data import datafile
from msrl_graph.diagnostics import Diagnostic
from msrl_graph.ir.plan import DataSource
from msrl_graph.runtime.data.dataset_preview import DatasetPreview

PROGRAM = """import grpo
cluster one {{ device = "cpu" }}
deploy grpo on one {{
  set prompts      = 4
  set prompt_len   = 8
  set response_len = 8
  model policy = "tiny"
  data source  = "{file}"{fields}
}}
"""
ROW = {"question": "1+1=", "answers": "2", "level": 1}
KINDS = ("rows.jsonl", "rows.parquet")


def written(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def program(folder: Path, file: str = "rows.jsonl", fields: str = "") -> Path:
    (folder / "p.rlg").write_text(PROGRAM.format(file=file, fields=fields and f" {{ {fields} }}"), encoding="utf-8")
    return folder / "p.rlg"


def told(path: Path) -> tuple[Diagnostic, ...]:
    with pytest.raises(Fault) as caught:
        compile(path)
    return caught.value.diagnostics


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_not_there_is_told_where_it_is_named_and_as_a_run_does(tmp_path: Path, kind: str) -> None:
    written(tmp_path / kind, [ROW] * 4)
    path = program(tmp_path, kind, 'prompt = "problem"')
    found = told(path)
    assert [d.code for d in found] == ["bad-data"] * 2
    text = path.read_text(encoding="utf-8").split("\n")
    places = [text[d.span.line - 1][d.span.column - 1 :] for d in found]
    assert places[0].startswith('"problem"') and places[1].startswith(f'"{kind}"')
    data = DataSource(
        "source",
        str(tmp_path / kind),
        {"prompt": "problem", "answer": "answer"},
        found[1].span,
        {"prompt": found[0].span},
    )
    with pytest.raises(Fault) as caught:
        list(datafile.RowStream(data))
    assert caught.value.diagnostics == found


@pytest.mark.parametrize("kind", KINDS)
def test_help_is_applied(tmp_path: Path, kind: str) -> None:
    written(tmp_path / kind, [ROW] * 4)
    (answer,) = told(program(tmp_path, kind, 'prompt = "question"'))
    assert answer.help.startswith('write `{ answer = "answers" }`; its fields are `question`, ')
    (answer,) = told(
        program(tmp_path, kind, 'prompt = "question", answer = "solution"')
    )  # nearer to `question`, which is taken
    assert answer.help.startswith("did you mean `answers`? its fields are ")
    (prompt,) = told(program(tmp_path, kind, 'prompt = "qestion", answer = "answers"'))
    assert prompt.help.startswith("did you mean `question`? ")
    compile(program(tmp_path, kind, 'prompt = "question", answer = "answers"'))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_is_told_and_holds_nobody(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / kind)
    release = Timer(10, lambda: os.close(os.open(tmp_path / kind, os.O_WRONLY | os.O_NONBLOCK)))
    release.start()  # whoever waits for the pipe, and fails this test, finds it empty then
    with pytest.raises(Fault, match="cannot be read: it is not a regular file"):
        next(iter(datafile.RowStream(DataSource("source", str(tmp_path / kind), {}))))
    release.cancel()


def test_many_fields_are_not_all_named(tmp_path: Path) -> None:
    written(tmp_path / "rows.jsonl", [{f"f{i}": i for i in range(40)}])
    assert told(program(tmp_path))[0].help.endswith("`f11` and 28 more")


WRONG = ['{"prompt": "1"\n', "[1]\n", '{"prompt": ' + "[" * 100_000 + "\n", '{"prompt": ' + "9" * 5000 + "}\n"]


@pytest.mark.parametrize("line", WRONG, ids=["cut", "list", "deep", "digits"])
def test_an_early_row_is_told_by_compiling_and_a_later_one_by_a_run(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    for before, status in ((3, 1), (datafile.LOOKED, 0)):
        written(tmp_path / "rows.jsonl", [row] * before + [line])
        capsys.readouterr()
        assert compile_main([str(program(tmp_path)), "--check"]) == status
        assert (f"error[bad-data]: line {before + 1} of " in capsys.readouterr().err) == (status == 1)
        assert run_main([str(program(tmp_path)), "--dry-run"]) == 1
        assert f"error[bad-data]: line {before + 1} of " in capsys.readouterr().err


def data(path: Path) -> DataSource:
    return DataSource("source", str(path), {"prompt": "prompt"})


def count(path: Path, most: int) -> int:
    graph = compile("p.rlg", text=PROGRAM.format(file="p.jsonl", fields="")).graph
    return datafile.head(data(path), most, graph)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_as_far_as_they_are_asked_for(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / kind, [{"prompt": "1"}] * 250)
    assert [count(path, most) for most in (1, 100, 249, 250, 251, 10_000)] == [1, 100, 249, 250, 250, 250]


def test_blank_lines_are_no_rows_and_lines_end_as_editors_write_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n\r\n  \n{"prompt": "c"}'.encode())
    assert count(path, 9) == 2
    assert list(datafile.RowStream(data(path))) == [(1, {"prompt": "a\u2028b"}), (4, {"prompt": "c"})]


@pytest.mark.parametrize("size", [10, 300])
def test_no_more_than_the_head_is_read(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "rows.jsonl", [{"prompt": "x" * size}] * 20)
    monkeypatch.setattr(datafile, "CHARACTERS", 200)
    with path.open("a", encoding="utf-8") as file:
        file.write("no JSON")
    assert count(path, 1000) == 1000  # how many there are is not known
    with pytest.raises(Fault, match=r"line 21 of .* is not JSON"):
        list(datafile.RowStream(data(path)))


def test_a_file_that_ends_with_the_head_is_known_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "rows.jsonl", [{"prompt": "x"}] * 3)
    for more, rows in ((1, 3), (0, 9), (-1, 9)):
        monkeypatch.setattr(datafile, "CHARACTERS", path.stat().st_size + more)
        assert count(path, 9) == rows


def test_few_rows_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 3)
    folder = ROOT / "examples" / "arithmetic" / "model"
    path = program(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"tiny"', f'"{folder}"'), encoding="utf-8")
    assert compile_main([str(path), "--check"]) == 0
    assert "rows.jsonl has 3 rows, and an iteration begins with 4 prompts" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text(compile(path).to_json(), encoding="utf-8")
    for name in ("p.rlg", "plan.json"):
        assert run_main([str(tmp_path / name), "--dry-run"]) == 0
        assert capsys.readouterr().err.count("warning[few-rows]") == 1


def test_few_rows_of_many_that_are_not_looked_at(tmp_path: Path) -> None:
    looked = DatasetPreview(rows=3000, examined=1000, left_out=10)
    found = [[d.message for d in looked.warnings(data(tmp_path / "d.jsonl"), prompts)] for prompts in (2990, 2991)]
    assert found == [
        [],
        [f"{tmp_path}/d.jsonl has at most 2,990 usable rows, and an iteration begins with 2,991 prompts"],
    ]


@pytest.mark.parametrize(("content", "code"), [(b'{"prompt": "\xff"}\n', "missing-file"), (b"\n", "no-data")])
def test_a_file_without_rows_can_be_planned_with(
    tmp_path: Path, content: bytes, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert compile_main([str(program(tmp_path)), "--check"]) == 0
    assert f"warning[{code}]: the data file " in capsys.readouterr().err
    assert run_main([str(program(tmp_path)), "--dry-run", "--diagnostics", "concise"]) == 1
    assert [f"[{code}]" in line for line in capsys.readouterr().err.splitlines() if "rows.jsonl" in line] == [True]


def test_a_folder_without_rows_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows").mkdir()
    assert compile_main([str(program(tmp_path, "rows")), "--check"]) == 0
    assert "warning[missing-file]: there is no data file " in capsys.readouterr().err


STRUCT = {"style": "rule", "ground_truth": "2"}  # as verl's files have it


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("value", "has"), [(STRUCT, "dict"), ([1], "list"), (None, "null")])
def test_a_value_of_another_type_is_reported_by_compiling_as_by_a_run(
    tmp_path: Path, kind: str, value: Any, has: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+1=", "answer": STRUCT if value == STRUCT else [1]} for _ in range(4)]
    written(tmp_path / kind, [*rows[:1], {"prompt": "1+1=", "answer": value}, *rows[1:]])
    reports = []
    for main, option in ((compile_main, "--check"), (run_main, "--dry-run")):
        assert main([str(program(tmp_path, kind)), option, "--diagnostics", "concise"]) == 1
        reports.append([line for line in capsys.readouterr().err.splitlines() if "bad-data" in line])
    assert reports[0] == reports[1] and len(reports[0]) == 1
    first = {"null": "list"}.get(has, has)
    assert f"has {first} in `answer`, where text, a number or messages belong" in reports[0][0]


LIGHT = """
import sys
from msrl_graph.cli import compile_main
assert compile_main([sys.argv[1], "--check"]) == 0
print([m for m in ("numpy", "pyarrow", "torch") if m in sys.modules])
"""


def test_looking_into_a_file_imports_nothing_heavy(tmp_path: Path) -> None:
    written(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 4)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(program(tmp_path))], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


VERL = {
    "prompt": "1+1=",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2", "weights": [1, 2]},
    "extra_info": {"index": 7, "source": {"name": "gsm8k", "tags": ["a"]}},
}  # the fields that verl's files have


@pytest.mark.parametrize("kind", KINDS)
def test_a_dotted_field_reads_a_part_of_an_object(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path / kind, [VERL, {**VERL, "prompt": "2+2=", "reward_model": {"ground_truth": "4"}}])
    fields = {"prompt": "prompt", "answer": "reward_model.ground_truth", "of": "extra_info.source.name"}
    fields |= {"both": "extra_info.source", "whole": "extra_info"}
    info = VERL["extra_info"]
    rows = [(v["prompt"], a, "gsm8k", info["source"], info) for v, a in ((VERL, "2"), ({"prompt": "2+2="}, "4"))]
    found = list(datafile.RowStream(DataSource("source", str(path), fields)))
    assert found == [(i, dict(zip(fields.values(), row, strict=True))) for i, row in enumerate(rows, 1)]
    compile(program(tmp_path, kind, 'answer = "reward_model.ground_truth"'))


@pytest.mark.parametrize("kind", KINDS)
def test_the_very_name_comes_before_a_part(tmp_path: Path, kind: str) -> None:
    row = {"a": {"b": "part", "c.d": "dotted"}, "a.b": "whole", "e.f": {"g": "inside"}}
    path = written(tmp_path / kind, [row])
    fields = {"x": "a.b", "y": "a.c.d", "z": "e.f.g", "w": "a"}
    ((_, found),) = datafile.RowStream(DataSource("source", str(path), fields))
    assert found == {"a.b": "whole", "a.c.d": "dotted", "e.f.g": "inside", "a": row["a"]}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_in_an_object_have_the_fields_that_they_were_written_with(tmp_path: Path, kind: str) -> None:
    said = [[{"role": "user", "content": "1+1="}], [{"role": "user", "content": "2+2=", "name": "x"}]]
    path = written(tmp_path / kind, [{"chat": {"messages": m}} for m in said])
    found = datafile.RowStream(DataSource("source", str(path), {"prompt": "chat.messages"}))
    assert [row["chat.messages"] for _, row in found] == said


PARTS = [
    ("reward_model.ground_truht", "has no field `ground_truht` in `reward_model`, which the column `answer` reads"),
    ("reward_modle.ground_truth", "has no field `reward_modle.ground_truth`, which the column `answer` reads"),
    ("ground_truth", "has no field `ground_truth`, which the column `answer` reads"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("field", "message"), PARTS)
def test_a_part_that_is_not_there_is_reported_with_the_one_that_is_meant(
    tmp_path: Path, kind: str, field: str, message: str
) -> None:
    written(tmp_path / kind, [VERL] * 4)
    (found,) = told(program(tmp_path, kind, f'answer = "{field}"'))
    assert found.message.endswith(message)
    meant = re.match(r"did you mean `(.*?)`\? ", found.help)
    assert meant and meant[1] == "reward_model.ground_truth"
    compile(program(tmp_path, kind, f'answer = "{meant[1]}"'))


def test_a_row_without_the_part_is_reported_with_its_number(tmp_path: Path) -> None:
    for kind, place in (("rows.jsonl", "line 2 of "), ("rows.parquet", "row 2 of ")):
        written(tmp_path / kind, [VERL, {**VERL, "reward_model": None}, VERL, VERL])
        (found,) = told(program(tmp_path, kind, 'answer = "reward_model.ground_truth"'))
        what = "has null in `reward_model`, where an object with the field `ground_truth` belongs"
        assert found.message == f"{place}{tmp_path / kind} {what}"
        assert found.help == "give each row an object in `reward_model`, or leave such rows out: `missing = omit`"
    (found,) = told(program(tmp_path, kind, 'answer = "ability.kind"'))
    assert found.message.endswith(" has string in `ability`, where an object with the field `kind` belongs")
    assert found.help == "only an object, in Parquet a struct, has fields: `ability` is not one"
    written(tmp_path / "rows.jsonl", [VERL, {**VERL, "reward_model": {"style": "rule"}}, VERL, VERL])
    (found,) = told(program(tmp_path, "rows.jsonl", 'answer = "reward_model.ground_truth"'))
    assert found.message.startswith("line 2 of ") and "has no field `ground_truth` in `reward_model`" in found.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [STRUCT, {"rule": STRUCT}, {"style": [1], "answers": "2"}])
def test_an_object_where_text_belongs_is_reported_with_its_fields(tmp_path: Path, kind: str, value: Any) -> None:
    written(tmp_path / kind, [{"prompt": "1+1=", "answer": value}] * 4)
    (found,) = told(program(tmp_path, kind))
    write, fields, whole = found.help.split("; ")
    assert re.fullmatch(r"write (.*) to read a field of `answer`", write)
    assert fields == "the fields of `answer` are " + ", ".join(f"`{k}`" for k in value)
    assert whole == "a column of type `json` takes any object or list as it is, for functions"
    forms = re.findall(r"`(answer = .*?)`", write)
    assert len(forms) == (1 if "answers" in value else 2)  # which of several is meant is not guessed
    for form in forms:
        compile(program(tmp_path, kind, form))


def test_a_json_column_takes_what_text_does_not(tmp_path: Path) -> None:
    written(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": [1]}] * 4)
    (found,) = told(program(tmp_path))
    assert found.help == "a column of type `json` takes any object or list as it is, for functions"
    grpo = (Path(algorithms.__file__).parent / "grpo.rlg").read_text(encoding="utf-8")
    own = grpo.replace("answer    : text", "answer    : json").replace("math_verify()", '"f.py:right"')
    (tmp_path / "grpo.rlg").write_text(own, encoding="utf-8")
    (tmp_path / "f.py").write_text("def right(prompt, response, answer): return 1.0", encoding="utf-8")
    path = program(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("import grpo", 'import "grpo.rlg"'), encoding="utf-8")
    compile(path)


def test_a_struct_with_two_fields_of_a_name_is_reported(tmp_path: Path) -> None:
    twice = pa.StructArray.from_arrays([pa.array(["1"]), pa.array(["2"])], ["gold", "gold"])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1="], "answer": twice}), path)
    for field in ("answer", "answer.gold"):
        with pytest.raises(Fault, match=r"has several fields `answer\.gold`"):
            list(datafile.RowStream(DataSource("source", str(path), {"answer": field})))
    assert len(list(datafile.RowStream(data(path)))) == 1
