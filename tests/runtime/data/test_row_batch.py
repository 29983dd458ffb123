"""Prompts as messages: a system message, variables of the chat template, and templates of text."""

import json

import chat
import pytest

from msrl_graph import Fault
from msrl_graph.ir.data_options import DataOptions
from msrl_graph.ir.plan import DataSource
from msrl_graph.runtime.data.dataset import Dataset
from msrl_graph.runtime.data.tokens import Tokens, column_tokenizer, tokenise_columns

TEMPLATE = chat.TEMPLATE + "{%- if thinking is defined and not thinking %}(at once){% endif -%}"
NODES = """
node actor.generate(prompt) -> out
node host.reward(out, answer) -> out_r { call = exact_match(response = out) }
source -> actor.generate
actor.generate, source -> host.reward
"""


def loaded(folder, rows, kind="i32[<= 64]", prompt="question", **options):
    if not (folder / "model").exists():
        chat.model(folder / "model", TEMPLATE)
    columns = {"prompt": kind, "answer": "json", "out": "i32[<= 4]", "out_r": "f32"}
    path = folder / "rows.jsonl"
    path.unlink(missing_ok=True)  # compiling would look into it, and read other fields
    made = chat.plan(folder, path, columns, NODES)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = DataSource("source", str(path), {"prompt": prompt, "answer": "gold"}, options=DataOptions(**options))
    made.deploy.data["source"] = source
    return made, Dataset(source, made)


def texts(made, data):
    tokens = Tokens(str(made.deploy.models["policy"].path))
    columns = tokenise_columns(made, made.graph.node("actor.generate"), {"prompt": data.all()["prompt"]})
    return tokens.decode((columns["prompt"][i] for i in range(len(data))), special=True)


SAYS = [{"role": "system", "content": "two"}, {"role": "user", "content": "one"}]
ROWS = [{"question": "one", "gold": "1"}, {"question": SAYS, "gold": ["2", "two"]}]


@pytest.mark.parametrize("kind", ["i32[<= 64]", "text"])
def test_a_system_message_is_put_before_a_prompt_without_one(tmp_path, kind):
    made, data = loaded(tmp_path, ROWS, kind, system="plus")
    assert texts(made, data) == [
        f"<|start|>system\n{system}<|stop|>\n<|start|>user\none<|stop|>\n<|start|>assistant\n"
        for system in ("plus", "two")
    ]


@pytest.mark.parametrize("kind", ["i32[<= 64]", "text"])
def test_variables_of_the_chat_template_hold_wherever_the_policy_reads_messages(tmp_path, kind):
    made, data = loaded(tmp_path, ROWS[:1], kind, chat=(("thinking", False),))
    assert texts(made, data) == ["<|start|>user\none<|stop|>\n<|start|>assistant\n(at once)"]
    assert column_tokenizer(made, "out").prompt([{"role": "user", "content": "x"}]).endswith("(at once)")
    made, data = loaded(tmp_path, ROWS[:1], kind, chat=())
    assert texts(made, data) == ["<|start|>user\none<|stop|>\n<|start|>assistant\n"]
    made, data = loaded(tmp_path, ROWS[:1], kind)
    assert texts(made, data) == ["one"]


def test_a_template_of_text_may_be_a_message(tmp_path):
    made, data = loaded(tmp_path, ROWS[:1], prompt="plus {question} {gold}", chat=())
    assert texts(made, data) == ["<|start|>user\nplus one 1<|stop|>\n<|start|>assistant\n"]


def test_token_ids_follow_no_message(tmp_path):
    with pytest.raises(Fault) as fault:
        loaded(tmp_path, [*ROWS, {"question": [4, 5], "gold": "1"}], system="plus")
    assert "line 3 of " in str(fault.value) and "has token ids in `question`, where text or messages" in str(
        fault.value
    )


def test_dropped_rows_are_counted_with_the_others(tmp_path):
    rows = [*ROWS, {"question": "two"}, {"question": None, "gold": "1"}, {"question": "x" * 99, "gold": "1"}]
    _, data = loaded(tmp_path, rows, missing="omit")
    assert (len(data), data.row_count, data.excluded) == (2, 5, 3)
    assert data.reason == (
        "`prompt` is empty or longer than 64 (rows: 1), `gold` is missing (rows: 1), `question` is missing (rows: 1)"
    )
    with pytest.raises(Fault, match="lacks a value, so `missing = omit` leaves no row"):
        loaded(tmp_path, rows[2:4], missing="omit")
