"""Attributes are declared once, and read where they mean something: their kinds, defaults and what a program states of
them."""

import ast
import dataclasses
import functools
import math
import re

import msgspec
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from language import diagnose, lowered
from sample import examples

from msrl_graph.backends import ENGINES
from msrl_graph.backends.engine_protocols import Sampling, StepRequest
from msrl_graph.compiler import to_program
from msrl_graph.dsl.attributes import read_as
from msrl_graph.dsl.expressions import Names
from msrl_graph.dsl.parse import parse_set
from msrl_graph.ir.attributes import (
    CallAttributes,
    GenerateAttributes,
    ReshardingEdgeAttributes,
    SampleEdgeAttributes,
    SourceAttributes,
    UpdateAttributes,
)
from msrl_graph.ir.graph import Expr, Node
from msrl_graph.ir.kinds import (
    CountsKind,
    FlagKind,
    FormKind,
    NameKind,
    NumericKind,
    QuantityKind,
    StringKind,
    WordsKind,
)
from msrl_graph.ir.options import DockOptions, EngineOptions, LayoutOptions, ReshardOptions, Run
from msrl_graph.ir.plan import EngineChoice
from msrl_graph.ir.statements import STATEMENTS
from msrl_graph.ir.worker_attributes import WorkerAttributes
from msrl_graph.reference import facts
from msrl_graph.sharding.layout import Layout

PACKAGE = ROOT / "msrl_graph"
DECLARED = [(of, name, attribute) for of, said in STATEMENTS.items() for name, attribute in said.declared().items()]
NAMES = {name for _, name, _ in DECLARED}
# Words of the reference for a default that no program can state.
EMPTY = (None, 0, "", (), math.inf)


@functools.cache
def trees():
    return {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize(("of", "name", "attribute"), DECLARED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_declared_is_whole(of, name, attribute):
    assert re.search(r"[.:]$|\.\)$", attribute.doc) and len(attribute.doc) > 3
    assert str(attribute.kind)
    field = next(f for f in dataclasses.fields(STATEMENTS[of]) if f.name == name)
    assert field.default == attribute.default


@pytest.mark.parametrize(("of", "name", "attribute"), DECLARED, ids=lambda x: x if isinstance(x, str) else "")
def test_the_default_is_what_the_reference_shows(of, name, attribute):
    """Read as a program's value it is the typed one; words in its place stand for nothing, or for what another part of
    the plan says."""
    shown = facts.default(attribute)
    if attribute.must:
        assert shown == "required"
    elif attribute.shown is None or re.fullmatch(r"[\d.]+", shown):
        if of == "cluster" and name == "network":
            shown = shown.removesuffix(" (assumed)")
            default = attribute.default.value
        else:
            default = attribute.default
        text = shown.strip("`")
        if isinstance(attribute.kind, FormKind):
            assert str(default) == text
        else:
            assert attribute.kind.value(read_as(attribute.kind, name, parse_set("x", text)[1], Names({}))) == default
    else:
        # What says nothing of recomputation computes nothing again, unless the plan chooses to.
        assert attribute.default in EMPTY or (of, name) == ("engine", "recompute")


@functools.cache
def names(path):
    """The names and the attributes that stand in a file."""
    nodes = list(ast.walk(trees()[path]))
    return {n.id for n in nodes if isinstance(n, ast.Name)}, {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize(
    "said",
    [
        WorkerAttributes,
        SourceAttributes,
        GenerateAttributes,
        UpdateAttributes,
        CallAttributes,
        SampleEdgeAttributes,
        ReshardingEdgeAttributes,
        LayoutOptions,
    ],
)
def test_each_attribute_is_read_by_somebody(said):
    """By a file that names the declaration, or by a rule of its own."""
    declaring = said.__module__.removeprefix("msrl_graph.").replace(".", "/") + ".py"
    others = [names(path) for path in trees() if path not in (declaring, "ir/options.py")]
    found = {name for here, taken in others if said.__name__ in here | taken for name in taken}
    own = next(c for c in ast.walk(trees()[declaring]) if getattr(c, "name", "") == said.__name__)
    found |= {
        n.attr
        for n in ast.walk(own)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }
    handed = {f.name for f in dataclasses.fields(Node)} if said is CallAttributes else set()
    whole = {LayoutOptions: Layout, GenerateAttributes: Sampling, UpdateAttributes: StepRequest}  # handed on by name
    if said in whole:
        handed = {f.name for f in dataclasses.fields(whole[said])}
    assert {*said.declared()} - found - handed == set()


def test_attributes_are_looked_up_by_name_for_messages_only():
    """`stated` and `at` are asked for attributes that there are; nobody takes one from the dictionary by its name."""
    for path, tree in trees().items():
        for call in ast.walk(tree):
            asks = (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in ("stated", "at")
            )
            if asks and path != "runtime/calibrate/measure.py":  # whose `at` is a time
                assert {k.value for k in call.args if isinstance(k, ast.Constant)} <= NAMES, f"{path}:{call.lineno}"
            if path.startswith(("dsl/", "ir/")):
                continue
            taken = (
                isinstance(call, ast.Subscript)
                and isinstance(call.value, ast.Attribute)
                and call.value.attr == "attributes"
            )
            assert not (taken and isinstance(call.slice, ast.Constant)), f"{path}:{call.lineno}"


def test_an_engine_has_options_that_are_declared():
    for engine in ENGINES.values():
        assert {*engine.capabilities.options} <= EngineOptions.declared().keys()


PROGRAM = """\
import grpo
algorithm mine extends grpo {{
  worker spare : policy frozen {{ model = policy, {worker} }}
  source(prompts) -> prompt, answer {{ {source} }}
  node actor.generate {{ {generate} }}
  node reference.infer {{ {infer} }}
  node actor.update {{ {update} }}
  node host.reward {{ {function} }}
  actor.generate -> actor.infer {{ {sample_edge} }}
  actor.update => actor.generate {{ {resharding_edge} }}
}}
cluster pod {{ device = "ascend-910c", devices_per_node = 8, {cluster} }}
deploy mine on pod {{
  model policy = "qwen2.5-7b" {{ {model} }}
  data source = "train.jsonl"
  data test = "test.jsonl" {{ {data} }}
  layout actor.update {{ {layout} }}
  engine actor.update = megatron {{ {engine} }}
  dock {{ {dock} }}
  reshard {{ {reshard} }}
  evaluate test {{ report = reward, {evaluate} }}
  run {{ {run} }}
}}
"""


def program(**stated):
    text = PROGRAM.format(**dict.fromkeys((of.replace(" ", "_") for of in STATEMENTS), "") | stated)
    return re.sub(r", +\}", " }", text)


@pytest.mark.parametrize("of", STATEMENTS)
def test_what_is_not_declared_is_refused(of):
    assert [d for d in diagnose(program()) if d.severity == "error"] == []
    found = [d for d in diagnose(program(**{of.replace(" ", "_"): "nonsense = 1"})) if d.severity == "error"]
    assert [d.code for d in found] == ["unknown-attribute"] and "has no attribute `nonsense`" in found[0].message


def written(kind):
    """Texts of a program and the values that they mean."""
    match kind:
        case NumericKind(low, high, whole=True):
            return st.integers(int(low), int(min(high, 10**6))).map(lambda n: (str(n), n))
        case NumericKind(low, high):
            low = max(low, 0)
            high = min(high, 100)
            return (
                st.floats(low, high, exclude_min=kind.above)
                .filter(lambda x: x == 0 or x > 1e-6)
                .map(lambda x: (f"{x:.9f}", float(f"{x:.9f}")))
            )
        case FlagKind():
            return st.sampled_from([("true", True), ("false", False)])
        case WordsKind(words):
            return st.sampled_from(words).map(lambda w: (w, w))
        case StringKind(several=True):
            return st.lists(st.sampled_from(["a", "</x>", "b c"]), min_size=1, max_size=3).map(
                lambda texts: ("[" + ", ".join(f'"{t}"' for t in texts) + "]", tuple(texts))
            )
        case QuantityKind("s"):
            return st.integers(1, 90).map(lambda n: (f"{n} min", 60.0 * n))
        case QuantityKind("B"):
            return st.integers(1, 90).map(lambda n: (f"{n} GB", n * 10**9))
    return None


def stated(said, *, leave=()):
    """Some attributes of a declaration as a program states them, and their values."""
    known = {name: written(kind) for name, kind in said.kinds().items() if name not in leave}
    return st.fixed_dictionaries({}, optional={name: s for name, s in known.items() if s is not None})


SAID = {
    "generate": GenerateAttributes,
    "update": UpdateAttributes,
    "sample_edge": SampleEdgeAttributes,
    "resharding_edge": ReshardingEdgeAttributes,
}
SAID |= {"dock": DockOptions, "reshard": ReshardOptions, "run": Run}
NEED = ("turns", "conversations", "timeout", "on_failure", "memory", "cuts", "overdue")  # another attribute
LEAVE = {"generate": NEED, "dock": ("mode",)}


@examples(40)
@given(st.fixed_dictionaries({of: stated(said, leave=LEAVE.get(of, ())) for of, said in SAID.items()}))
def test_what_is_stated_is_what_is_said(given):
    texts = {of: ", ".join(f"{name} = {text}" for name, (text, _) in some.items()) for of, some in given.items()}
    found = lowered(program(**texts))
    graph = found.graph
    deploy = found.deploy
    edges = {(e.kind, e.src, e.dst): e for e in graph.edges}
    said = {
        "generate": GenerateAttributes.of(graph.node("actor.generate")),
        "update": UpdateAttributes.of(graph.node("actor.update")),
        "sample_edge": SampleEdgeAttributes.of(edges["sample", "actor.generate", "actor.infer"]),
        "resharding_edge": ReshardingEdgeAttributes.of(edges["reshard", "actor.update", "actor.generate"]),
        "dock": deploy.dock,
        "reshard": deploy.reshard,
        "run": deploy.run,
    }
    of_grpo = {
        ("generate", "samples"),
        ("generate", "temperature"),
        ("update", "loss"),
        ("update", "optimizer"),
        ("update", "mini_batch"),
    }
    for of, view in said.items():
        for name, attribute in type(view).declared().items():
            if name in given[of]:
                value = getattr(view, name)
                assert (value, type(value)) == (given[of][name][1], type(given[of][name][1])), (of, name)
            elif (of, name) not in of_grpo:
                assert getattr(view, name) == attribute.default, (of, name)


def test_a_scope_is_the_nodes_own_field():
    graph = lowered(program()).graph
    assert {n.per for n in graph.nodes} > {"row"} and all(CallAttributes.of(n).per == n.per for n in graph.nodes)


def test_a_view_is_made_once_and_stays_out_of_a_plan():
    node = Node("actor.update", "actor", "update", attributes={"mini_batch": Expr("number", 8)})
    before = msgspec.json.encode(node)
    assert UpdateAttributes.of(node) is UpdateAttributes.of(node) and GenerateAttributes.of(node).samples == 1
    assert msgspec.json.encode(node) == before
    changed = dataclasses.replace(node, attributes={"mini_batch": Expr("number", 9)})
    assert (UpdateAttributes.of(node).mini_batch, UpdateAttributes.of(changed).mini_batch) == (8, 9) and changed != node


def test_what_a_plan_edited_by_hand_says_beside_the_kind_is_left_out():
    odd = {
        "mini_batch": Expr("string", "many"),
        "epochs": Expr("number", 2.0),
        "clip_grad": Expr("number", 1),
        "nobody": Expr("number", 1),
    }
    said = UpdateAttributes.of(Node("actor.update", "actor", "update", attributes=odd))
    assert said.mini_batch is None and (said.epochs, type(said.epochs)) == (2, int) and type(said.clip_grad) is float


@given(
    st.integers(0, 5000),
    st.integers(1, 500) | st.none(),
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(1, 7),
    st.integers(0, 40),
)
def test_the_steps_of_a_run_are_those_of_its_iterations(rows, mini_batch, epochs, after, every, iterations):
    said = UpdateAttributes(mini_batch=mini_batch, epochs=epochs, after=after, every=every)
    each = epochs * len(range(0, rows, mini_batch or max(rows, 1)))
    assert said.steps(rows) == each and said.step_rows(rows) == (mini_batch or rows)
    assert said.steps_in_run(rows, iterations) == each * sum(map(said.due, range(iterations)))


def test_a_response_is_as_long_as_its_column_and_its_bound_allow():
    assert [GenerateAttributes(max_tokens=n).longest(8) for n in (None, 3, 8, 20)] == [8, 3, 8, 8]


def test_names_and_counts_are_read():
    assert NameKind(several=True).value(Expr("list", args=(Expr("word", "a"), Expr("word", "b")))) == ("a", "b")
    assert NameKind(several=True).value(Expr("word", "a")) == ("a",) and CountsKind().value(
        Expr("list", args=(Expr("number", 3),))
    ) == (3,)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("full", "full"),
        ("12", 12),
        ("[moe]", ("moe",)),
        ("[norms, attention]", ("attention", "norms")),
        ("depth", 3),
        ("parts", ("mlp", "norms")),
    ],
)
def test_an_extent_is_a_word_a_number_or_a_list_and_a_plan_carries_it(text, wanted):
    """A param can have it, and the program of a plan states it."""
    params = {"depth": Expr("number", 3), "parts": Expr("list", args=(Expr("string", "norms"), Expr("string", "mlp")))}
    kind = EngineOptions.kinds()["recompute"]
    value = kind.value(read_as(kind, "recompute", parse_set("x", text)[1], Names(params)))
    assert value == wanted
    choice = EngineChoice("fsdp", {"recompute": value})
    assert msgspec.json.decode(msgspec.json.encode(choice), type=EngineChoice) == choice
    (stated,) = to_program._engine("actor.update", choice).attrs
    assert kind.value(read_as(kind, "recompute", stated.value, Names({}))) == wanted
