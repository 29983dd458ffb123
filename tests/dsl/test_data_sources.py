"""The statement `data`: files, options and mixtures."""

import pytest
from language import context, diagnose, lowered

from msrl_graph.dsl.format import format
from msrl_graph.ir.data_options import DataOptions

PROGRAM = """import grpo
cluster one {{ device = "cpu" }}
deploy grpo on one {{
  model policy = "qwen2.5-0.5b"
  {data}
}}
"""


def deployed(data, folder=None):
    within = context(folder) if folder else None
    return lowered(PROGRAM.format(data=data), within).deploy.data


def told(data, folder=None):
    found = diagnose(PROGRAM.format(data=data), context(folder) if folder else None)
    return [(d.severity, d.code, d.message, d.help) for d in found if "not on this machine" not in d.message]


def test_columns_are_fields_or_templates_and_all_else_is_an_option():
    made = deployed(
        'data source = "rows/" { prompt = "Q: {q}\\n", answer = "a.b", split = "train", skip = 10, take = 5,\n'
        '    missing = omit, system = "Think.", chat = template(enable_thinking = false, depth = 2) }'
    )["source"]
    assert made.fields == {"prompt": "Q: {q}\n", "answer": "a.b"}
    assert made.options == DataOptions("train", "", 10, 5, "omit", "Think.", (("enable_thinking", False), ("depth", 2)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('data source = "a.jsonl" { promt = "q" }', "`data` has no attribute `promt`"),
        ('data source = "a.jsonl" { prompt = "{q" }', "the template of `prompt` is not complete: expected '}'"),
        (
            'data source = "a.jsonl" { prompt = "{}" }',
            "the template of `prompt` has braces without",
        ),
        ('data source = "a.jsonl" { prompt = "{q:>9}" }', "the template of `prompt` formats a field"),
        ('data source = "a.jsonl" { missing = skip }', "`skip` is not a value of `missing`"),
        ('data source = "a.jsonl" { chat = 3 }', "`chat` takes `template(NAME = VALUE, …)`"),
        ('data source = "a.jsonl" { chat = template(3) }', "`template` takes its settings as keyword arguments"),
        ('data source = "a.jsonl" { chat = template(a = 1, a = 2) }', "`a` is given twice"),
        ('data source = "a.jsonl" { chat = template(a = [1]) }', "`a` takes a number, a string, `true` or `false`"),
        ('data source = "a.jsonl" { subset = "x" }', "`subset` is only for a name on the Hugging Face Hub"),
        ('data source = "https://h/a.jsonl" { split = "x" }', "`split` is only for a folder or a name on the Hugging"),
        ('data source = "a.txt"', "data is a file of JSON, JSON lines, CSV, Parquet or Arrow, a folder, or a name"),
        ("data source = mix(a = 1)", "no data named `a`"),
        ('data source = mix(a = 0)\n  data a = "a.jsonl"', "`a` takes a whole number of 1 or more, not `0`"),
        ("data source = mix(1)", "`mix` takes the weight of each data by name"),
        ("data source = mix()", "data is a string, or a mixture of other data with their weights"),
        ("data source = blend(a = 1)", "data is a string, or a mixture of other data with their weights"),
        ('data source = mix(a = 1, a = 2)\n  data a = "a.jsonl"', "`a` is given twice"),
        ('data source = mix(a = 1) { take = 3 }\n  data a = "a.jsonl"', "a mixture has no attributes"),
        (
            'data source = mix(b = 1)\n  data b = mix(a = 1)\n  data a = "a.jsonl"',
            "`b` is a mixture itself",
        ),
        (
            'data source = "a.jsonl" { chat = template(x = 1) }\n  data b = "b.jsonl" { chat = template(x = 2) }',
            "`data b` sets other variables of the chat template than `data source`",
        ),
    ],
)
def test_what_is_wrong_is_told(data, message):
    found = [text for severity, _, text, _ in told(data) if severity == "error"]
    assert len(found) == 1 and found[0].startswith(message)


def test_weights_of_a_mixture_may_be_params():
    program = PROGRAM.format(
        data='data source = mix(easy = 3, hard = group)\n  data easy = "e.csv"\n  data hard = "h.csv"'
    )
    found = lowered(program.replace("model policy", "set group = 2\n  model policy")).deploy.data
    assert found["source"].parts == {"easy": 3, "hard": 2} and found["source"].path == ""


def test_a_name_on_the_hub_is_what_is_no_file(tmp_path):
    data = 'data source = "openai/gsm8k" { prompt = "question", subset = "main", split = "train" }'
    assert deployed(data, tmp_path)["source"].path == "hf://datasets/openai/gsm8k"
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert next(message for _, _, message, _ in told(data, tmp_path)).startswith("`subset` is only for")


def test_the_formatter_keeps_a_mixture():
    text = PROGRAM.format(data='data source = mix(easy=3,hard = 1)\n  data easy = "e.csv"')
    assert "data source   = mix(easy = 3, hard = 1)" in format(text, "p.rlg") or "mix(easy = 3, hard = 1)" in format(
        text, "p.rlg"
    )
    assert format(format(text, "p.rlg"), "p.rlg") == format(text, "p.rlg")
