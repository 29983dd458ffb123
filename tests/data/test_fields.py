"""Fields by the type of their column: what is taken, and what is told of what is not."""

import numpy as np
import pytest

from msrl_graph.data.chat import messages
from msrl_graph.data.fields import Misfit, take
from msrl_graph.ir.graph import Column, Dimension

MOST = Dimension(9, ragged=True)
FOUR = Dimension(4)
LIKE = Dimension(like="chosen")
CHAT = [{"role": "user", "content": "hello"}]
HALF_MESSAGE = "half a character (U+D800), where text, messages or token ids belong"


@pytest.mark.parametrize(
    ("element", "dims", "value", "taken"),
    [
        ("i32", (), 3, [3]),
        ("f32", (), 3, [3.0]),
        ("bf16", (), 0.1, [np.float32(0.1)]),
        ("i64", (), 2**40, [2**40]),
        ("bool", (), True, [True]),
        ("f32", (LIKE,), [1, 0.5], [1, 0.5]),
        ("f32", (FOUR,), [1, 2, 3, 4], [1, 2, 3, 4]),
        ("f32", (MOST, Dimension(2)), [[1, 2], [3, 4], [5, 6]], [1, 2, 3, 4, 5, 6]),
        ("bool", (MOST,), [], []),
        ("i32", (MOST,), [5, 6], [5, 6]),
        ("i32", (MOST,), "text", "text"),
        ("i32", (MOST,), [{**CHAT[0], "name": None}], CHAT),
        ("text", (), 1.5, "1.5"),
        ("text", (), [{**CHAT[0], "name": None}], '[{"role": "user", "content": "hello"}]'),
        ("text", (Dimension(9, ragged=True),), "é", "é"),
        ("json", (), {"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        ("json", (), "text", '"text"'),
        ("json", (), None, "null"),
    ],
)
def test_what_is_taken(element, dims, value, taken):
    found = take(value, Column("c", element, dims))
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == taken


@pytest.mark.parametrize(
    ("element", "dims", "value", "message"),
    [
        ("i32", (), True, "bool, where a whole number of 32 bits belongs"),
        ("i32", (), 3.0, "float, where a whole number of 32 bits belongs"),
        ("i32", (), 2**31, "2.15e+09, where a whole number of 32 bits belongs"),
        ("i64", (), None, "null, where a whole number of 64 bits belongs"),
        ("bool", (), 1, "int, where true or false belongs"),
        ("f32", (), "3", "str, where a finite number belongs"),
        ("f32", (), float("nan"), "nan, where a finite number belongs"),
        ("f32", (), 1e39, "1e+39, where a finite number belongs"),
        ("f32", (), [1.0], "list, where a finite number belongs"),
        ("f32", (FOUR,), [1, 2, 3], "a list of 3, where a list of 4 finite numbers belongs"),
        ("f32", (FOUR,), 1, "int, where a list of 4 finite numbers belongs"),
        ("f32", (LIKE,), [1, None], "a list with null, where a list of finite numbers belongs"),
        ("f32", (LIKE, FOUR), [[1, 2, 3, 4], [1]], "a list of 1, where a list of 4 finite numbers belongs"),
        ("f32", (LIKE, FOUR), [1, 2], "int, where a list of 4 finite numbers belongs"),
        ("i32", (MOST,), [1, "2"], "a list with str, where text, messages or token ids belong"),
        ("i32", (MOST,), [2**40], "a list with 1.1e+12, where text, messages or token ids belong"),
        ("i32", (MOST,), [{"role": "user"}], "a list with dict, where text, messages or token ids belong"),
        ("i32", (MOST,), [{"role": 1, "content": "a"}], "a list with dict, where text, messages or token ids belong"),
        ("i32", (MOST,), {}, "dict, where text, messages or token ids belong"),
        ("i32", (MOST,), "\ud800", "half a character (U+D800), where text, messages or token ids belong"),
        ("text", (), [], "list, where text, a number or messages belong"),
        ("i32", (MOST,), [{"role": "user", "content": "\ud800"}], HALF_MESSAGE),
        ("i32", (MOST,), [{"role": "user", "content": "", "\ud800": 1}], HALF_MESSAGE),
        ("json", (), {"a": ["\ud800"]}, "half a character (U+D800), where JSON belongs"),
        (
            "json",
            (),
            b"a",
            "a value that JSON does not know (Object of type bytes is not JSON serializable), where JSON belongs",
        ),
        (
            "json",
            (),
            [float("inf")],
            "a value that JSON does not know (Out of range float values are not JSON compliant), where JSON belongs",
        ),
    ],
)
def test_what_is_not(element, dims, value, message):
    with pytest.raises(Misfit) as misfit:
        take(value, Column("c", element, dims))
    assert str(misfit.value) == message


def test_what_a_policy_writes_is_no_conversation_where_a_template_could_not_write_it():
    """A judge reads it as the text that it is."""
    assert messages('[{"role": "user", "content": "\\ud83d"}]') is None
    assert messages('[{"role": "user", "content": "\\ud83d\\ude00"}]') == [{"role": "user", "content": "\U0001f600"}]
