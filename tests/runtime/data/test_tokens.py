"""Text and messages as tokens: by the template of the model that reads them, with nothing added twice; and from tokens
back to text."""

import json
import subprocess
import sys

import chat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.data.chat import messages
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.data.columns import texts
from msrl_graph.runtime.data.dataset_preview import check
from msrl_graph.runtime.data.rendering import BadMessages
from msrl_graph.runtime.data.token_pieces import Pieces
from msrl_graph.runtime.data.tokens import Tokens

USER = {"role": "user", "content": "what is one plus two"}
SAYS = {"role": "assistant", "content": "three"}
ASKED = "<|start|>user\nwhat is one plus two<|stop|>\n<|start|>assistant\n"


@pytest.fixture(scope="session", params=["in the tokenizer's config", "in a file of its own"])
def tokens(request, tmp_path_factory):
    return Tokens(str(chat.model(tmp_path_factory.mktemp("chat") / "model", separate="own" in request.param)))


def test_a_text_column_is_read_as_it_is_and_messages_by_the_template(tokens):
    column = tokens.read(texts(["one plus", json.dumps([USER]), "", '[{"role": 3}]', "[one"]))
    assert tokens.decode((column[i] for i in range(5)), special=True) == [
        "one plus",
        ASKED,
        "",
        '[{"role": 3}]',
        "[one",
    ]
    assert tokens.decode([column[1]]) == ["user\nwhat is one plus two\nassistant\n"]
    assert column.values.dtype == "int32" and column.lengths[1] > 4  # neither cut nor padded, whatever the file says


@given(st.text())
@examples(50)
def test_any_text_is_itself_again(tokens, text):
    column = tokens.read(texts([text])) if not messages(text) else None
    assert column is None or tokens.decode([column[0]], special=True) == [text]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '[{"role": ' * 100_000, "[1]", "[]", '[{"role": "user"}]', "{}", '[{"content": "a"}]']
)
def test_what_are_no_messages(text):
    assert messages(text) is None


def test_a_response_is_what_a_generation_would_have_written(tokens):
    assert tokens.prompt([USER]) == ASKED
    assert tokens.response([USER], [SAYS]) == "three<|stop|>"
    assert tokens.response([USER], [USER, SAYS]) == "three<|stop|>"
    again = tokens.response([USER], [SAYS, USER, SAYS])
    assert again == f"three<|stop|>\n{ASKED}three<|stop|>"
    assert tokens.response([], [SAYS]) == "<|start|>assistant\nthree<|stop|>"


def test_a_template_that_cannot_be_used_is_told(tmp_path, tokens):
    with pytest.raises(BadMessages, match=r"the chat template of .* does not render them: nobody speaks"):
        tokens.prompt([{"role": "nobody", "content": ""}])
    thinks = chat.TEMPLATE.replace('assistant\n" }}{% endif', 'assistant\n<think>" }}{% endif')
    with pytest.raises(BadMessages, match=r"writes 'three.* with the response where the prompt alone has '<think>'"):
        Tokens(str(chat.model(tmp_path / "thinks", thinks))).response([USER], [SAYS])
    with pytest.raises(
        BadMessages,
        match=r"no chat template to render them: there is no chat_template\.jinja, and no `chat_template` in",
    ):
        Tokens(str(chat.model(tmp_path / "none", ""))).prompt([USER])


@pytest.mark.parametrize(
    ("ends", "own", "found"),
    [
        ((0, 2), "<|stop|>", (2, 0)),
        ((0, 2), "<|end|>", (0, 2)),
        (0, "<|stop|>", (0,)),
        ([2], "<|end|>", (2,)),
        (None, "<|end|>", (1,)),
    ],
)
def test_the_tokens_that_end_a_response(tmp_path, ends, own, found):
    assert Tokens(str(chat.model(tmp_path / "model", ends=ends, own=own))).ends == found


def test_who_has_no_messages_does_not_wait_for_transformers(tmp_path):
    chat.model(tmp_path / "model")
    program = """
import sys
from msrl_graph.runtime.data.dataset_preview import check
from msrl_graph.runtime.data.tokens import Tokens
assert len(Tokens(sys.argv[1]).encode(["one"])[0])
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "model"], check=True)


PAIRS = {"prompt": "i32[<= 40]", "chosen": "i32[<= 20]", "rejected": "i32[<= 20]"}
SCORES = {"out_chosen": "f32[chosen]", "out_rejected": "f32[rejected]"}
UPDATE = """node judge.infer(prompt, chosen, rejected) -> out_chosen, out_rejected
            node actor.update(prompt, chosen, rejected, out_chosen, out_rejected) {
              loss = dpo(0.1, ref_chosen = out_chosen, ref_rejected = out_rejected)
              optimizer = adamw(lr = 1e-3)
            }
            source -> judge.infer -> actor.update"""


@pytest.fixture
def pairs(tmp_path):
    chat.model(tmp_path / "model")

    def made(rows, columns=PAIRS | SCORES, nodes=UPDATE, parquet=False):
        return chat.dataset(tmp_path, columns, rows, nodes, parquet)

    return made


def shown(data, name):
    column = data.all()[name]
    return data.tokens.decode((column[i] for i in range(len(data))), special=True)


@pytest.mark.parametrize("parquet", [False, True])
def test_pairs_of_messages_or_text_end_with_the_end_token(pairs, parquet):
    two = {"role": "assistant", "content": "two"}
    data = pairs([{"prompt": [USER], "chosen": [SAYS], "rejected": [USER, two]}], parquet=parquet)
    assert (shown(data, "prompt"), shown(data, "chosen"), shown(data, "rejected")) == (
        [ASKED],
        ["three<|stop|>"],
        ["two<|stop|>"],
    )
    data = pairs([{"prompt": "one plus", "chosen": " three", "rejected": " two<|end|>"}], parquet=parquet)
    assert (shown(data, "prompt"), shown(data, "chosen"), shown(data, "rejected")) == (
        ["one plus"],
        [" three<|stop|>"],
        [" two<|end|>"],
    )
    data = pairs([{"prompt": [5, 6], "chosen": [7, 2], "rejected": [8]}], parquet=parquet)
    assert [data.all()[c][0].tolist() for c in PAIRS] == [[5, 6], [7, 2], [8, 2]]


def test_what_does_not_fit_together_in_a_pair(pairs):
    def told(**row):
        with pytest.raises(Fault) as fault:
            pairs([{"prompt": "one", "chosen": "two", "rejected": "three"}, row])
        (diagnostic,) = fault.value.diagnostics
        return diagnostic.message.replace(diagnostic.message.split(" of ")[1].split(" has ")[0], "FILE")

    assert told(prompt="one", chosen=[SAYS], rejected="two") == (
        "line 2 of FILE has messages in `chosen`, but no single list of messages before it, in `prompt`"
    )
    assert told(prompt=[USER], chosen=[USER], rejected="two").startswith(
        "line 2 of FILE has messages in `chosen`, and the response has no turn of its own"
    )
    assert told(prompt=[1, 400], chosen="two", rejected="two").startswith(
        "line 2 of FILE has the token 400 in `prompt`, outside the vo"
    )
    assert told(prompt=[-1], chosen="two", rejected="two").startswith(
        "line 2 of FILE has the token -1 in `prompt`, outside the vo"
    )


# As Mistral's and Llama 2's: nothing is written before an answer.
HEADLESS = """\
{%- for m in messages %}{% if m.role == "assistant" %}{{ m.content }}<|stop|>{% else %}[ {{ m.content }} ]{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("template", [chat.TEMPLATE, HEADLESS], ids=["chatml", "headless"])
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_response_that_begins_with_another_turn_is_refused_whatever_the_template_writes(tmp_path, template, role):
    chat.model(tmp_path / "model", template)
    other = {"role": role, "content": "one plus one"}
    for chosen in ([other, SAYS], [other, USER, SAYS], [other]):
        with pytest.raises(Fault) as told:
            row = {"prompt": [USER], "chosen": chosen, "rejected": [SAYS]}
            chat.dataset(tmp_path, PAIRS | SCORES, [row], UPDATE)
        (diagnostic,) = told.value.diagnostics
        assert diagnostic.message.endswith(
            f"has messages in `chosen`, and the response begins with a turn of the `{role}`"
        )
        assert diagnostic.help.startswith("write what the `assistant` says, alone or after the prompt's messages")
    for chosen in ([SAYS], [USER, SAYS]):  # as the help says
        data = chat.dataset(tmp_path, PAIRS | SCORES, [{**row, "chosen": chosen}], UPDATE)
        assert shown(data, "chosen") == ["three<|stop|>"]
    with pytest.raises(Fault, match="the response has no turn of its own"):
        chat.dataset(tmp_path, PAIRS | SCORES, [{**row, "chosen": [USER]}], UPDATE)


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("strings", [{"prompt"}, {"chosen", "rejected"}, {"prompt", "chosen", "rejected"}])
def test_messages_as_json_text_are_messages_in_every_column(pairs, strings, parquet):
    row = {"prompt": [USER], "chosen": [SAYS], "rejected": [USER, SAYS]}
    given = {name: json.dumps(value) if name in strings else value for name, value in row.items()}
    data = pairs([given], parquet=parquet)
    assert [shown(data, name) for name in row] == [[ASKED], ["three<|stop|>"], ["three<|stop|>"]]


def test_control_tokens_in_the_text_of_rows_are_warned_of_before_a_run(tmp_path):
    chat.model(tmp_path / "model")
    fine = {"prompt": "one", "chosen": "two<|stop|>", "rejected": "three"}
    rows = [fine, {**fine, "prompt": "one<|end|> two"}, {**fine, "chosen": "<|start|>two"}]
    rows += [{**fine, "prompt": [{**USER, "content": "one<|stop|>"}]}, {**fine, "prompt": "one<|en|>"}]
    path = tmp_path / "rows.jsonl"

    def warned(rows):
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        plan = chat.plan(tmp_path, path, PAIRS | SCORES, UPDATE)
        return list(check(plan.deploy.data["source"], plan).warnings(plan.deploy.data["source"], 1))

    (told,) = warned(rows)
    assert (told.code, told.severity) == ("bad-data", "warning")
    assert told.message == (
        f"3 of 5 rows of {path} contain control tokens in their text, such as `<|end|>` in `prompt` of line 2 of "
        f"{path}: the model reads the token, not its letters"
    )
    assert not warned([fine, rows[-1], {**fine, "prompt": [USER]}])


def test_rows_that_are_left_out_are_counted_by_column(pairs):
    fine = {"prompt": "one", "chosen": "two", "rejected": "three"}
    long = " one two three four" * 20
    rows = [
        fine,
        {**fine, "prompt": long},
        {**fine, "chosen": ""},
        {**fine, "chosen": long},
        {**fine, "prompt": long, "chosen": long},
        fine,
    ]
    data = pairs(rows)
    assert (len(data), data.too_long, data.left_out) == (2, 4, {"prompt": 2, "chosen": 2})
    assert data.reason == "`prompt` is empty or longer than 40 (rows: 2), `chosen` is empty or longer than 20 (rows: 2)"
    with pytest.raises(Fault) as fault:
        pairs(rows[1:2])
    assert fault.value.diagnostics[0].help == "`prompt` is empty or longer than 40 (rows: 1)"


def test_a_row_of_megabytes_is_left_out_without_encoding_all_of_it(pairs, monkeypatch):
    encoded = []
    encode = Pieces.encode
    monkeypatch.setattr(Pieces, "encode", lambda self, texts: encoded.extend(map(len, texts)) or encode(self, texts))
    fine = {"prompt": "one", "chosen": "two", "rejected": "three"}
    data = pairs([fine, {**fine, "chosen": " é three" * 1_000_000}, {**fine, "prompt": "one two" * 1_000_000}, fine])
    assert (len(data), data.left_out) == (2, {"prompt": 1, "chosen": 1})
    assert max(encoded) < 10_000


def test_values_beside_a_prompt_that_is_too_long_are_not_compared(tmp_path):
    chat.model(tmp_path / "model")
    columns = {"prompt": "i32[<= 4]", "weight": "f32[prompt]", "out": "i32[<= 2]"}
    nodes = "node actor.generate(prompt) -> out\n source -> actor.generate"
    rows = [{"prompt": "ab", "weight": [1.0, 2.0]}, {"prompt": "ab" * 100_000, "weight": [1.0] * 200_000}]
    data = chat.dataset(tmp_path, columns, rows, nodes)
    assert (len(data), data.left_out) == (1, {"prompt": 1})
    with pytest.raises(Fault, match="1 values in `weight`"):
        chat.dataset(tmp_path, columns, [{"prompt": "ab", "weight": [1.0]}], nodes)


MIXED = {
    "prompt": "i32[<= 40]",
    "level": "i32",
    "hard": "bool",
    "weight": "f32",
    "shape": "f32[3]",
    "note": "text",
    "task": "json",
}
PROMPTS = "node actor.generate(prompt) -> out\n source -> actor.generate"


@pytest.mark.parametrize("parquet", [False, True])
def test_fields_of_all_types_travel_as_columns(pairs, parquet):
    row = {
        "prompt": [USER],
        "level": 3,
        "hard": True,
        "weight": 0.5,
        "shape": [1, 2, 3.5],
        "note": [USER],
        "task": {"goal": [1, 2], "say": "é"},
    }
    columns = pairs([row, row], {**MIXED, "out": "i32[<= 9]"}, PROMPTS, parquet).rows(3, 2)
    kinds = {
        "level": "int32",
        "hard": "bool",
        "weight": "float32",
        "shape": "float32",
        "note": "uint8",
        "task": "uint8",
        "prompt": "int32",
    }
    assert {n: str(c.values.dtype) for n, c in columns.items()} == kinds
    assert [columns[n][1].tolist() for n in ("level", "hard", "weight", "shape")] == [3, True, 0.5, [1, 2, 3.5]]
    assert all((columns[n].offsets is None) == (n in ("level", "hard", "weight")) for n in columns)
    assert json.loads(columns["task"].text(1)) == row["task"] and json.loads(columns["note"].text(0)) == [USER]


def test_what_a_field_may_hold_a_run_takes(tmp_path):
    chat.model(tmp_path / "model")
    (tmp_path / "rows.jsonl").touch()
    plan = chat.plan(tmp_path, tmp_path / "rows.jsonl", {**MIXED, "out": "i32[<= 9]"}, PROMPTS)
    assert find_unsupported(plan) == []


def test_a_column_as_long_as_another_is_held_against_it(pairs):
    columns = {**PAIRS, **SCORES, "shares": "f32[chosen]"}
    rows = [{"prompt": [5], "chosen": [6, 7, 2], "rejected": [8, 2], "shares": [0, 1, 0.5]}]
    assert pairs(rows, columns).all()["shares"][0].tolist() == [0, 1, 0.5]
    with pytest.raises(Fault) as fault:
        pairs([*rows, {**rows[0], "chosen": [6, 7]}, {**rows[0], "chosen": [6, 2]}], columns)
    message = fault.value.diagnostics[0].message
    assert message.startswith("line 3 of ") and message.endswith(" has 3 values in `shares`, but `chosen` has 2")


def test_a_text_that_a_model_reads_is_held_against_its_bound_in_tokens(pairs):
    columns = {"prompt": "i32[<= 40]", "question": "text[<= 12]", "out": "i32[<= 9]", "out_two": "i32[<= 9]"}
    nodes = PROMPTS + "\n node judge.generate(question) -> out_two\n source -> judge.generate"
    rows = [
        {"prompt": "one", "question": q}
        for q in ("one plus two", "one two " * 9, "", [{"role": "user", "content": "one"}], [USER])
    ]
    data = pairs(rows, columns, nodes)
    assert data.left_out == {"question": 3}
    assert [data.all()["question"].text(i) for i in range(2)] == [
        "one plus two",
        '[{"role": "user", "content": "one"}]',
    ]
    with pytest.raises(Fault) as fault:
        pairs([{"prompt": "one", "question": [{"role": "nobody", "content": ""}]}], columns, nodes)
    assert "has messages in `question`, and the chat template of" in fault.value.diagnostics[0].message


def test_draws_by_weights_are_of_usable_rows(pairs):
    fine = {"prompt": "one", "chosen": "two", "rejected": "three"}
    data = pairs([fine, {**fine, "chosen": ""}, {**fine, "prompt": "two"}, {**fine, "prompt": "three"}])
    drawn = data.draw(np.array([0, 1, 0]), 5, 0, 3)
    assert drawn[0] == 1 and sorted(drawn) == [0, 1, 2]
    column = data.take(drawn[:1])["prompt"]
    assert data.tokens.decode([column[0]]) == ["two"]
    assert data.rows(0, 3)["prompt"].values.tolist() == data.take(data.indices(0, 3))["prompt"].values.tolist()
