"""What functions return: nothing of it is lost, put in another order or made into another number."""

from decimal import Decimal

import numpy as np
import pytest
import torch
from function_calls import call

from msrl_graph.runtime.functions.values import pure_numbers
from msrl_graph.runtime.process.task_report import RunError

HALF = '"\\ud83d"'  # as an API returns it that cuts a text by UTF-16


def refused(tmp_path, source, writes, per="row", **more):
    with pytest.raises(RunError) as error:
        call(tmp_path, source, writes, per, **more)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("{0: 800.0, 1: 800.0}", "dict of 2"),
        ("{3.0, 1.0}", "set of 2"),
        ("frozenset({3.0, 1.0})", "frozenset of 2"),
        ("(x for x in score)", "generator"),
        ("map(float, score)", "map"),
        ("b'ab'", "bytes of 2"),
        ("'ab'", "str 'ab'"),
        ("{0: 800.0, 1: 800.0}.values()", "dict_values of 2"),
        ("[1.0]", "list of 1"),
        ("np.ma.masked_array([1.0, 2.0], [True, False])", "MaskedArray of 2"),
    ],
)
def test_a_group_gives_its_rows_in_order_or_nothing(returned, what, tmp_path):
    source = f"import numpy as np\n\ndef f(score):\n    return {returned}\n"
    told = refused(tmp_path, source, ("reward",), "prompt")
    assert told.startswith("`host.mine` (line 0) failed on prompt 0 of iteration 7: BadResult: it returned ")
    assert what in told and "for `reward`" in told, told
    if what not in ("list of 1", "str 'ab'"):
        assert "return a list" in told, told


@pytest.mark.parametrize(
    "returned",
    [
        "[3.0, 4.0]",
        "(3.0, 4.0)",
        "np.array([3.0, 4.0])",
        "np.array([3.0, 4.0], object)",
        "torch.tensor([3.0, 4.0])",
        "torch.tensor([3.0, 4.0], dtype=torch.bfloat16)",
        "torch.tensor([3.0, 4.0], requires_grad=True)",
        "[torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(4.0)]",
        "range(3, 5)",
        "collections.deque([3.0, 4.0])",
        "[Decimal(3), Fraction(4)]",
        "[np.float16(3), np.int8(4)]",
    ],
)
def test_sequences_and_arrays_of_any_library_are_taken(returned, tmp_path):
    head = "import collections\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    source = f"{head}import numpy as np\nimport torch\n\ndef f(score):\n    return {returned}\n"
    assert call(tmp_path, source, ("reward",), "prompt")["reward"].values.tolist() == [3.0, 4.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "column", "what"),
    [
        ("1 + 2j", "reward", "complex (1+2j)"),
        ("np.complex64(1 + 2j)", "reward", "complex64 (1+2j)"),
        ("[1 + 0j] * len(response)", "advantage", "complex"),
        ("1 + 0j", "level", "complex (1+0j)"),
        ("[None] * len(response)", "advantage", "list of"),
        ("[Decimal(1), '2']", "advantage", "list of 2"),
        ("np.datetime64('2026-01-01')", "reward", "datetime64"),
        ("np.timedelta64(3, 's')", "reward", "timedelta64"),
        ("np.ma.masked_array([1.0] * len(response), True)", "advantage", "MaskedArray of"),
        ("np.uint64(2**32 + 1)", "level", "uint64 4294967297"),
        ("1e300", "level", "float 1e+300"),
        ("float('nan')", "level", "float nan"),
        ("1e39", "reward", "float 1e+39"),
        ("10**400", "reward", "int 1000"),
        ("Decimal('1e39')", "reward", "Decimal Decimal('1E+39')"),
        ("2", "right", "int 2"),
        ("Decimal('0.5')", "level", "Decimal Decimal('0.5')"),
    ],
)
def test_a_number_is_taken_as_it_is_or_told(returned, column, what, tmp_path):
    source = f"from decimal import Decimal\nimport numpy as np\n\ndef f(response):\n    return {returned}\n"
    told = refused(tmp_path, source, (column,))
    assert "BadResult: it returned " in told and f"for `{column}`" in told, told
    assert what in told, told


def test_a_number_that_no_column_holds_is_no_infinite_one_where_these_may_go_on(tmp_path):
    """`on_nan = skip` lets through what is not finite, not what is and would become it."""
    told = refused(tmp_path, "def f(score):\n    return 1e39\n", ("reward",), on_nan="skip")
    assert "it returned float 1e+39 for `reward`, where f32 belongs" in told, told
    assert "None" in refused(tmp_path, "def f(response):\n    return [None] * 2\n", ("advantage",), on_nan="skip")
    made = call(tmp_path, "def f(score):\n    return float('inf')\n", ("reward",), on_nan="skip")
    assert np.isinf(made["reward"].values).all()


@pytest.mark.parametrize(
    ("value", "dtype", "made"),
    [
        (True, np.float32, 1.0),
        (np.bool_(False), np.float32, 0.0),
        (3.0, np.int32, 3),
        (np.uint8(3), np.int32, 3),
        (Decimal("0.5"), np.float32, 0.5),
        (torch.tensor(2.0, dtype=torch.bfloat16), np.int64, 2),
        (1.0, np.bool_, True),
        (2**63 - 1, np.int64, 2**63 - 1),
    ],
)
def test_numbers_of_other_types_are_the_same_numbers(value, dtype, made):
    assert pure_numbers(value, dtype).dtype == dtype and pure_numbers(value, dtype).item() == made


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("{1: 'a', '1': 'b'}", "a key that is not text: int 1"),
        ("[{'a': {True: 1}}]", "a key that is not text: bool True"),
        ("float('nan')", "a value that JSON does not know"),
        ("{'a': [float('inf')]}", "a value that JSON does not know"),
        ("{'a': {1, 2}}", "a value that JSON does not know (Object of type set is not JSON serializable)"),
        ("1 + 2j", "a value that JSON does not know (Object of type complex is not JSON serializable)"),
        (HALF, "half a character (U+D83D)"),
        (f"{{'a': [{{{HALF}: 1}}]}}", "half a character (U+D83D)"),
    ],
)
def test_json_that_would_come_back_as_something_else_is_told(returned, why, tmp_path):
    told = refused(tmp_path, f"def f(answer: str):\n    return {returned}\n", ("notes",))
    assert f"for `notes`: {why}" in told, told


def test_half_a_character_is_told_with_node_and_row_and_the_help_helps(tmp_path):
    source = f"def f(score):\n    text = {HALF} if score == 3 else 'ok'\n    return text\n"
    told = refused(tmp_path, source, ("kind",))
    assert told.startswith("`host.mine` (line 0) failed on row 2 of iteration 7: BadResult: it returned half a ")
    assert "half a character (U+D83D) for `kind`, where text belongs" in told
    fix = told.partition("to replace it, return `")[2].partition("`")[0]
    made = call(tmp_path, source.replace("return text", f"return {fix}"), ("kind",))["kind"]
    assert [made.text(row) for row in range(4)] == ["ok", "ok", "?", "ok"]


def test_an_error_that_has_half_a_character_in_it_can_be_told(tmp_path):
    told = refused(tmp_path, f"def f(score):\n    raise ValueError({HALF})\n", ("kind",))
    assert "ValueError: \\ud83d, at " in told
    told.encode("utf-8")
