"""A mixture deals the rows of its parts in the proportion of their weights, and any position alone."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.ir.plan import DataSource
from msrl_graph.runtime.data.mixture import Mixture, load_data
from msrl_graph.runtime.process.host_facts import sampled_digest
from msrl_graph.runtime.process.task_report import RunError

from .test_dataset import plan

FIELDS = {"prompt": "question", "answer": "gold"}


def mixed(folder, sizes, weights, seed=0):
    data = {}
    for name, size in sizes.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": "1=", "gold": f"{name}{i}"}) + "\n" for i in range(size)))
        data[name] = DataSource(name, str(path), FIELDS)
    data["source"] = DataSource("source", "", {}, parts=weights)
    made = plan(seed=seed)
    return replace(made, deploy=replace(made.deploy, data=data))


def answers(mixture, position, count):
    columns = mixture.take(mixture.indices(position, count))["answer"]
    return [columns.text(i) for i in range(count)]


@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 3))
@examples(25)
def test_each_block_has_the_weights_and_each_part_its_own_passes(tmp_path_factory, position, count, seed):
    made = mixed(tmp_path_factory.mktemp("d"), {"a": 7, "b": 3}, {"a": 3, "b": 2}, seed)
    loaded = load_data(made, {})
    mixture = loaded["source"]
    dealt = answers(mixture, 0, 100)
    assert all(Counter(text[0] for text in dealt[i : i + 5]) == {"a": 3, "b": 2} for i in range(0, 100, 5))
    for name, size in (("a", 7), ("b", 3)):
        own = [text for text in dealt if text[0] == name]
        assert all(len({*own[i : i + size]}) == size for i in range(0, len(own) - size + 1, size))
        columns = loaded[name].rows(0, len(own))["answer"]
        assert own == [columns.text(i) for i in range(len(own))]  # the order that the part has alone
    assert answers(mixture, position, count) == dealt[position : position + count]


def test_another_seed_is_another_order_and_rows_are_located(tmp_path):
    orders = {
        tuple(answers(load_data(mixed(tmp_path, {"a": 7, "b": 3}, {"a": 1, "b": 1}, s), {})["source"], 0, 20))
        for s in range(3)
    }
    assert len(orders) == 3
    mixture = load_data(mixed(tmp_path, {"a": 7, "b": 3}, {"b": 1, "a": 1}), {})["source"]
    assert isinstance(mixture, Mixture) and len(mixture) == 10
    assert (
        mixture.locate(2) == f"line 3 of {tmp_path / 'b.jsonl'}"
        and mixture.locate(3) == f"line 1 of {tmp_path / 'a.jsonl'}"
    )


def test_a_replacement_reads_no_other_rows(tmp_path):
    made = mixed(tmp_path, {"a": 2, "b": 2}, {"a": 1, "b": 1})
    digests = {name: sampled_digest(str(tmp_path / f"{name}.jsonl")) for name in "ab"}
    load_data(made, digests)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    with pytest.raises(RunError, match=r"b.jsonl .* were changed after the run began"):
        load_data(made, digests)
    folder = replace(made.deploy.data["a"], path=str(tmp_path / "*.jsonl"))
    made = replace(made, deploy=replace(made.deploy, data={"a": folder}))
    began = {f"a: {name}.jsonl": sampled_digest(str(tmp_path / f"{name}.jsonl")) for name in "ab"}
    load_data(made, began)
    (tmp_path / "c.jsonl").write_text("")
    with pytest.raises(RunError, match="were changed after the run began"):
        load_data(made, began)
