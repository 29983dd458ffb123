"""The Python API refuses, in words and at the line, whatever has no place in a program; what it takes, the language
takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import Algorithm, Cluster, Deploy, Fault, Imported, check, compile, parse, to_rlg
from msrl_graph.dsl.ast import same_tree

MINE = Algorithm("mine", extends="grpo")
POD = Cluster("pod", device="cpu")
METHODS = [
    Algorithm,
    Cluster,
    Deploy,
    Imported,
    *(
        m
        for owner in (Algorithm, Deploy)
        for n, m in vars(owner).items()
        if not n.startswith("_") and inspect.isfunction(m)
    ),
]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


class Hollow:
    """It can be called, and has what a function has, of other kinds."""

    __code__ = None

    def __call__(self) -> None: ...


ODD = st.sampled_from(
    [
        *(
            object(),
            object,
            len,
            lambda: 0,
            math.inf,
            -math.inf,
            math.nan,
            10**18,
            -(10**4200),
            1j,
            b"f32",
            range(3),
            {"a": 1},
            {"a"},
        ),
        *(
            np.array([1, 2]),
            np.array(3),
            np.float32(0.5),
            np.int64(2),
            np.bool_(True),
            iter("ab"),
            ITSELF,
            Hollow(),
            Path("a b"),
        ),
        *(
            "\ud800",
            "a\0b",
            "a\nb",
            "",
            " ",
            ",",
            "a,,b",
            "source",
            "node",
            "actor.update",
            "f32",
            "1 +",
            '"a',
            "a -> b",
            "x.py:f",
        ),
        *(Algorithm, MINE, POD, Imported("grpo"), Deploy(MINE, on=POD)),
    ]
)
RIGHT = st.sampled_from(["actor", "actor.update", "prompt, response", "f32", "source"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ODD | RIGHT
ANY = st.recursive(
    PLAIN,
    lambda part: st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(st.text(), part, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from(["device", "stages", "loss", "call", "self", "node", "é", "a b", "", "prompt"]) | st.text(
    max_size=4
)


def arguments(method: Callable[..., Any], data: st.DataObject) -> tuple[list[Any], dict[str, Any]]:
    """Any arguments with which Python can make the call."""
    by_place = list[Any]()
    by_name = dict[str, Any]()
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            by_place += data.draw(st.lists(ANY, max_size=3))
        elif p.kind is p.VAR_KEYWORD:
            taken = {q.name for q in parameters if q.kind not in (q.POSITIONAL_ONLY, q.VAR_KEYWORD)}
            taken |= (
                {"self"}
                if next(iter(inspect.signature(method).parameters.values())).kind is not p.POSITIONAL_ONLY
                else set()
            )
            by_name |= data.draw(st.dictionaries(KEYS.filter(lambda k, taken=taken: k not in taken), ANY, max_size=3))
        elif p.default is p.empty or data.draw(st.booleans()):
            # Mostly something right, so that what is wrong stands anywhere.
            value = data.draw(ANY | RIGHT | st.sampled_from([MINE, POD]))
            if p.kind is p.KEYWORD_ONLY or by_name or p.default is not p.empty:
                by_name[p.name] = value
            else:
                by_place.append(value)
    return by_place, by_name


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__qualname__)
@examples(40)
@given(data=st.data())
def test_any_argument_is_taken_or_refused_at_its_line(method: Callable[..., Any], data: st.DataObject) -> None:
    by_place, by_name = arguments(method, data)
    owner = method.__qualname__.partition(".")[0]
    on = [] if isinstance(method, type) else [Algorithm("a") if owner == "Algorithm" else Deploy("grpo", on=POD)]
    try:
        made = method(*on, *by_place, **by_name)
    except Fault as fault:
        (told,) = fault.diagnostics
        assert (
            told.span.file == __file__ and "method(*on" in Path(__file__).read_text().splitlines()[told.span.line - 1]
        )
        return
    program = made if isinstance(method, type) else on[0]
    assert same_tree(program.tree(), parse(to_rlg(program), "p.rlg"))


@examples(40)
@given(program=ANY, text=ANY)
def test_what_is_no_program_is_refused(program: Any, text: Any) -> None:
    if not isinstance(program, Algorithm | Imported | Deploy):
        with pytest.raises(Fault):
            check(program, text=text)
    if text is not None:
        with pytest.raises(Fault):
            check("p.rlg", text=text)


def test_a_text_of_commas_names_nothing() -> None:
    with pytest.raises(Fault, match="`targets` is empty"):
        Deploy("grpo", on=POD).apart(", ,")


@examples(40)
@given(
    name=st.sampled_from(["deploy", "model", "sets", "budget"]),
    value=ANY,
    key=RIGHT | ANY.filter(lambda k: isinstance(k, int | str)),
)
def test_any_option_is_taken_or_refused(name: str, value: Any, key: Any) -> None:
    for given_value in (value, {key: value}, {"group": value}):
        with suppress(Fault):
            compile("grpo", **{name: given_value})  # type: ignore[arg-type]


def test_the_values_of_params_are_numbers_or_text() -> None:
    graph = check("grpo", sets={"group": 4, "prompts": "8 * 2", "kl_coef": 1e-5})
    assert [graph.params[n] for n in ("group", "prompts", "kl_coef")] == [4, 16, 1e-5]
    for sets, told in (
        ({"group": None}, "`group` in `sets` is a str, a number or a bool, not None"),
        ({"group": math.nan}, "`group` in `sets` is a str, a number or a bool, not nan"),
        ({3: 4}, "a name in `sets` is a str, not an int"),
        ([("group", 4)], '`sets` is a dict, as in {"group": "8"}, not a list'),
    ):
        with pytest.raises(Fault) as caught:
            check("grpo", sets=sets)  # type: ignore[arg-type]
        assert str(caught.value) == f"error[bad-value]: {told}"
