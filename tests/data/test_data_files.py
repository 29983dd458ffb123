"""Which files data are: folders, globs, splits."""

import json
import os

import pytest
from data_forms import FORMS

from msrl_graph.data.data_files import exists, find_mistake, hub_dataset, list_files, titled_paths
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.data_options import DataOptions
from msrl_graph.ir.plan import DataSource


def data(path, **options):
    return DataSource("source", str(path), {}, options=DataOptions(**options))


def names(folder, path, **options):
    return [str(file.path.relative_to(folder)) for file in list_files(data(folder / path, **options))]


def touch(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def told(source):
    with pytest.raises(Fault) as fault:
        list_files(source)
    return fault.value.diagnostics[0].message, fault.value.diagnostics[0].help


def test_a_folder_has_the_files_with_rows_by_name(tmp_path):
    touch(tmp_path, "b.jsonl", "a/z.jsonl", "README.md", ".hidden/c.jsonl", "_SUCCESS", "dataset_info.json", "x.txt")
    assert names(tmp_path, "") == ["a/z.jsonl", "b.jsonl"]
    assert names(tmp_path, "*.jsonl") == ["b.jsonl"]
    assert names(tmp_path, "**/*.jsonl") == ["a/z.jsonl", "b.jsonl"]
    assert titled_paths(data(tmp_path)) == {
        "source: a/z.jsonl": tmp_path / "a/z.jsonl",
        "source: b.jsonl": tmp_path / "b.jsonl",
    }


def test_the_files_of_one_format_are_read(tmp_path):
    touch(tmp_path, "a.jsonl", "a.jsonl.gz", "a.parquet")
    message, help = told(data(tmp_path))
    assert message == f"{tmp_path} has files of several formats: .jsonl, .jsonl.gz, .parquet"
    assert help == f"name those of one format: `{tmp_path}/*.jsonl`"
    assert names(tmp_path, "*.jsonl") == ["a.jsonl"]


def test_a_split_is_a_word_of_the_path(tmp_path):
    touch(tmp_path, "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/dev-0.parquet")
    assert names(tmp_path, "", split="train") == [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]
    assert names(tmp_path, "", split="validation") == names(tmp_path, "", split="dev") == ["data/dev-0.parquet"]
    assert told(data(tmp_path)) == (
        f"{tmp_path} has several splits: its splits are `train`, `validation`",
        'name one: `{ split = "validation" }`',
    )
    assert told(data(tmp_path, split="test")) == (
        f"{tmp_path} has no split `test`",
        "its splits are `train`, `validation`",
    )


def test_the_splits_of_save_to_disk(tmp_path):
    FORMS["saved"]([{"a": "1"}, {"a": "2"}], tmp_path / "one")
    assert names(tmp_path, "one") == [f"one/data-0000{i}-of-00002.arrow" for i in range(2)]
    (tmp_path / "all").mkdir()
    (tmp_path / "one").rename(tmp_path / "all" / "easy")
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["easy", "hard"]}))
    assert len(names(tmp_path, "all", split="easy")) == 2
    assert told(data(tmp_path / "all"))[1] == 'name one: `{ split = "hard" }`'
    (tmp_path / "all" / "dataset_dict.json").write_text("{")
    assert "which `save_to_disk` has written, cannot be read" in told(data(tmp_path / "all"))[0]


def test_a_pipe_is_no_data(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    assert told(data(tmp_path / "rows.jsonl"))[0].endswith("it is not a regular file")
    assert told(data(tmp_path / "none.jsonl"))[0] == f"there is no data file {tmp_path / 'none.jsonl'}"


@pytest.mark.parametrize(
    ("target", "is_hub"),
    [
        ("openai/gsm8k", True),
        ("data/train.csv", False),
        ("./gsm8k", False),
        ("hf://datasets/a/b", True),
        ("here/x", False),
    ],
)
def test_a_name_on_the_hub_is_no_file(tmp_path, target, is_hub):
    touch(tmp_path, "here/x/rows.jsonl")
    assert bool(hub_dataset(target, str(tmp_path / target))) == is_hub


@pytest.mark.parametrize("target", ["a.txt", "b.xlsx", "c.parquet.gz", "d", "*.txt", "https://host/e.txt"])
def test_an_unknown_format_is_told_with_the_known_ones(tmp_path, target):
    mistake = find_mistake(target, str(tmp_path / target))
    assert mistake and "`.jsonl`" in mistake.help


@pytest.mark.parametrize("target", ["a.jsonl", "b.csv.gz", "c/", "d/*.parquet", "e/*", "https://host/f.jsonl.zst?x=1"])
def test_a_known_format_is_accepted_before_the_file_exists(tmp_path, target):
    assert find_mistake(target, str(tmp_path / target)) is None and not exists(str(tmp_path / target))
