"""Tree to graph, cluster and deploy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import page
import pytest
from language import PROGRAMS, TESTS, context, diagnose, lowered

from msrl_graph.diagnostics import NOWHERE, Fault
from msrl_graph.dsl.lower import LoweredProgram
from msrl_graph.hardware.cluster import Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.ir.graph import Column, Dimension, Edge, Expr, Graph
from msrl_graph.ir.metrics import RESERVED
from msrl_graph.ir.options import DockOptions, ReshardOptions, Run
from msrl_graph.ir.plan import EngineChoice
from msrl_graph.ir.signatures import read_signatures
from msrl_graph.sharding.layout import Layout

PAGE = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
SMALL = (TESTS / "programs" / "small.rlg").read_text(encoding="utf-8")


def bare(expr: Expr) -> Expr:
    return replace(expr, span=NOWHERE, args=tuple(map(bare, expr.args)))


def number(value: float) -> Expr:
    return Expr("number", value)


@pytest.fixture(scope="module")
def grpo() -> LoweredProgram:
    return lowered(PAGE)


def test_the_page_has_the_graph_that_it_says(grpo: LoweredProgram) -> None:
    graph = grpo.graph
    expected = page.graph()
    assert graph.name == "grpo"
    assert graph.params == expected.params
    assert graph.rows == (256, 4096)
    assert [replace(c, span=NOWHERE) for c in graph.columns] == list(expected.columns)
    assert [replace(w, span=NOWHERE) for w in graph.workers] == list(expected.workers)
    assert {(n.name, n.reads, n.writes, n.per) for n in graph.nodes} == {
        (n.name, n.reads, n.writes, n.per) for n in expected.nodes
    }
    assert [replace(e, span=NOWHERE) for e in graph.edges] == list(expected.edges)


def test_the_nodes_stand_in_dependency_order_ties_by_name(grpo: LoweredProgram) -> None:
    assert [n.name for n in grpo.graph.nodes] == [
        "source",
        "actor.generate",
        "actor.infer",
        "host.reward",
        "host.advantage",
        "reference.infer",
        "actor.update",
    ]


def test_attributes_are_evaluated_and_calls_have_keys(grpo: LoweredProgram) -> None:
    def attributes(name: str) -> dict[str, Expr]:
        return {k: bare(v) for k, v in grpo.graph.node(name).attributes.items()}

    assert attributes("source") == {"count": number(256)}
    assert attributes("actor.generate") == {"samples": number(16), "temperature": number(1.0)}
    assert attributes("host.reward") == {"call": Expr("call", "math_verify")}
    assert attributes("host.advantage") == {"call": Expr("call", "group_norm")}
    update = attributes("actor.update")
    clip = Expr("call", "clip", (number(0.2),), ("low",))
    kl = Expr("call", "kl", (Expr("word", "low_var"),), ("form",))
    assert update["loss"] == Expr("+", args=(clip, Expr("*", args=(number(0.001), kl))))
    assert str(update["loss"]) == "clip(low = 0.2) + 0.001 * kl(form = low_var)"
    assert update["optimizer"] == Expr("call", "adamw", (number(1e-6),), ("lr",))


def test_the_page_has_the_deploy_that_it_says(grpo: LoweredProgram) -> None:
    assert grpo.cluster is not None and grpo.deploy is not None
    assert (grpo.cluster.name, grpo.cluster.nodes, grpo.cluster.devices_per_node) == ("pod", 2, 8)
    assert grpo.cluster.device == DEVICES["ascend-910c"]
    assert grpo.cluster.network == Figure(300e6, "stated", "the program")
    deploy = grpo.deploy
    assert deploy.name == "grpo" and deploy.models["policy"].name == "qwen2.5-32b"
    assert deploy.data["source"].fields == {"prompt": "problem", "answer": "answer"}
    assert Path(deploy.data["source"].path) == TESTS / "programs" / "deepscaler.jsonl"
    assert {k: replace(v, span=NOWHERE) for k, v in deploy.layouts.items()} == {
        "actor.update": Layout(tp=8, dp=2, etp=0),
        "actor.generate": Layout(tp=4, dp=4, etp=0),
    }
    assert replace(deploy.run, span=NOWHERE) == Run(1000, 0)
    assert [d.code for d in grpo.warnings] == ["missing-file"]


def test_every_statement_of_a_deploy_arrives() -> None:
    result = lowered(SMALL)
    deploy = result.deploy
    cluster = result.cluster
    assert deploy is not None and cluster is not None
    assert deploy.name == "try" and result.graph.params["group"] == 4
    assert result.graph.rows == (8, 32)
    assert cluster.device.memory == Figure(16 * 2**30, "stated", "the program")
    assert cluster.device.flops["bf16"].value == 2e12 and cluster.device.launch.value == pytest.approx(20e-6)
    assert cluster.device.host_link == DEVICES["cpu"].host_link
    assert deploy.models["policy"].dtype == "bf16"
    assert {k: replace(v, span=NOWHERE) for k, v in deploy.engines.items()} == {
        "actor.update": EngineChoice("fsdp", {"micro_batch": 2, "recompute": "full"}),
    }
    # dp 0 is left to the placement.
    assert {k: replace(v, span=NOWHERE) for k, v in deploy.layouts.items()} == {
        "actor.update": Layout(tp=2, dp=0, etp=0, zero=3)
    }
    assert replace(deploy.dock, span=NOWHERE) == DockOptions("central", deadline=300.0)
    assert replace(deploy.reshard, span=NOWHERE) == ReshardOptions("naive", "staged", 64 * 2**20)
    assert [replace(e, span=NOWHERE) for e in deploy.evaluations] == [
        Evaluation("test", 5, ("reward", "length"), 1, 0.0),
        Evaluation("seen", 0, ("reward",), 0, None),  # as each generation does in training, where nothing is said
    ]
    assert Path(deploy.data["test"].path).resolve() == (TESTS / "diagnostics" / "data.jsonl").resolve()
    edges = {(e.src, e.dst): {k: bare(v) for k, v in e.attributes.items()} for e in result.graph.edges}
    assert edges["actor.generate", "host.reward"] == {"stream": number(8)}
    assert edges["actor.generate", "actor.infer"] == {"balance": Expr("word", "tokens")}


def test_a_users_function_is_found_beside_the_program() -> None:
    result = lowered(SMALL)
    call = result.graph.node("host.length").attributes["call"]
    assert call.kind == "call" and call.value == str(TESTS / "programs" / "../diagnostics/functions.py") + ":length"
    signature, path = result.library["function", str(call.value)]
    assert signature.columns == ("response",) and Path(path).is_file()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def length(response:", " at its line 1: '(' was never closed"),
        (b"import math\n\ndef length(response)\n    return 1.0\n", " at its line 3: expected ':'"),
        (b"\xff\xfe", ""),
        (b"\x00", ": source code string cannot contain null bytes"),
        (b"(" * 1000, " at its line 1: too many nested parentheses"),
    ],
)
def test_a_file_that_is_not_python_is_told(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    text = PAGE.replace("math_verify()", '"mine.py:length"')
    (told,) = (d for d in diagnose(text, context(tmp_path)) if d.severity == "error")
    assert (told.code, told.message) == ("unknown-function", f"`mine.py` is not Python{why}")


def test_columns_can_be_renamed() -> None:
    text = PAGE.replace("group_norm()", "group_norm(false, reward = score)").replace(
        "reward    : f32\n", "reward    : f32\n    score : f32\n"
    )
    text = text.replace("host.advantage(response, reward)", "host.advantage(response, score)").replace(
        "answer) -> reward", "answer) -> score"
    )
    call = bare(lowered(text).graph.node("host.advantage").attributes["call"])
    assert call == Expr("call", "group_norm", (Expr("bool", False), Expr("column", "score")), ("std", "reward"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("clip()", "clip()"),
        ("-clip(high = 0.28, 0.1)", "-clip(high = 0.28, low = 0.1)"),
        ("clip(0.2) - 2 * 3 * kl()", "clip(low = 0.2) - 6 * kl()"),
        ("kl() / 4", "0.25 * kl()"),
        ("(clip() + kl(k1)) * kl_coef", "(clip() + kl(form = k1)) * 0.001"),
        ("clip(old_logp = ref_logp)", "clip(old_logp = ref_logp)"),
        ("clip(ref_logp, 0.3)", "clip(advantage = ref_logp, low = 0.3)"),
    ],
)
def test_a_loss_keeps_its_terms_and_folds_its_numbers(written: str, said: str) -> None:
    graph = lowered(PAGE.replace("clip(0.2) + kl_coef * kl(low_var)", written)).graph
    assert str(graph.node("actor.update").attributes["loss"]) == said


def test_params_depend_on_each_other_in_any_order() -> None:
    text = PAGE.replace("param prompts      = 256 ", "param prompts = group * 2 ").replace(
        "param kl_coef      = 0.001", "param kl_coef = 1 / prompts"
    )
    graph = lowered(text, context(sets={"group": "2 * 4"})).graph
    assert graph.params["prompts"] == 16 and graph.params["kl_coef"] == 1 / 16 and graph.rows == (16, 128)


def test_the_command_line_outranks_the_deploy_and_the_deploy_the_file() -> None:
    text = PAGE.replace("on pod {", "on pod {\n  set group = 8\n  set prompts = 32")
    assert lowered(text).graph.rows == (32, 256)
    assert lowered(text, context(sets={"group": "2"})).graph.rows == (32, 64)


def test_an_algorithm_of_the_package_is_imported() -> None:
    text = "import grpo\n" + PAGE[PAGE.index("cluster pod") :]
    graph = lowered(text).graph
    assert graph.rows == (256, 4096)
    assert [replace(c, span=NOWHERE) for c in graph.columns] == list(page.graph().columns)


def test_without_a_deploy_there_is_a_graph_and_with_a_model_a_machine() -> None:
    alone = lowered("import grpo")
    assert alone.graph.name == "grpo" and alone.deploy is None and alone.cluster is None
    here = lowered("import grpo", context(model="tiny"))
    assert here.cluster is not None and here.deploy is not None
    assert (here.cluster.device.name, here.cluster.devices) == ("here", 1)
    assert here.deploy.models["policy"].name == "tiny" and here.deploy.data == {}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_no_column_takes_the_name_of_a_metric(name: str) -> None:
    text = PAGE.replace("prompts", "size")  # a param of the page has one of the names
    text = (
        text.replace("reward    : f32", f"{name} : f32")
        .replace("-> reward", f"-> {name}")
        .replace("(response, reward)", f"(response, {name})")
    )
    told = [d for d in diagnose(text.replace("group_norm()", f"group_norm(reward = {name})")) if d.severity == "error"]
    assert [(d.code, d.message) for d in told] == [("bad-value", f"`{name}` is the name of a metric of every run")]


def test_a_step_a_batch_needs_no_old_logp() -> None:
    text = PAGE.replace("old_logp, ref_logp, advantage) {", "ref_logp, advantage) {")
    assert {d.code for d in diagnose(text)} == {"unused-column", "missing-file"}
    for steps in ("mini_batch = 4096", "epochs = 1"):
        assert "stale-logp" not in {d.code for d in diagnose(text.replace("optimizer =", f"{steps}, optimizer ="))}
    for steps in ("mini_batch = 4095", "epochs = 2"):
        assert "stale-logp" in {d.code for d in diagnose(text.replace("optimizer =", f"{steps}, optimizer ="))}
        assert not [d for d in diagnose(PAGE.replace("optimizer =", f"{steps}, optimizer =")) if d.severity == "error"]
    renamed = text.replace("clip(0.2)", "clip(0.2, old_logp = ref_logp)").replace(
        "optimizer =", "epochs = 2, optimizer ="
    )
    assert not [d for d in diagnose(renamed) if d.severity == "error"]


def test_one_of_several_deploys_is_chosen_by_name() -> None:
    text = (TESTS / "programs" / "two_deploys.rlg").read_text(encoding="utf-8")
    result = lowered(text, context(deploy="debug"))
    assert result.graph.rows == (4, 16) and result.deploy is not None and result.deploy.name == "debug"
    assert result.cluster is not None and result.cluster.name == "laptop"
    other = lowered(text, context(deploy="r1"))
    assert other.deploy is not None and other.deploy.engines["actor.update"].name == "megatron"
    assert [d.code for d in diagnose(text)] == ["no-deploy"]


def test_rows_have_levels() -> None:
    graph = lowered(SMALL).graph
    assert {c.name: c.level for c in graph.columns} == {
        "prompt": 0,
        "answer": 0,
        "hint": 0,
        "response": 1,
        "old_logp": 1,
        "reward": 1,
        "length": 1,
        "advantage": 1,
    }
    assert graph.column("old_logp") == Column(
        "old_logp", "f32", (Dimension(like="response"),), 1, graph.column("old_logp").span
    )


def test_a_state_is_read_and_set_beside_columns() -> None:
    text = """import grpo
algorithm tracked extends grpo {
  state rate : f32 per prompt = 1 / 2
  state steps : i32 = 0
  columns { share : f32 }
  node host.track(reward, rate, steps) -> steps, share { call = "functions.py:track", per = batch }
  node host.rate(reward, rate) -> rate { call = "functions.py:track", per = prompt }
  host.reward -> host.track, host.rate
}
"""
    graph = lowered(text, context(TESTS / "diagnostics")).graph
    assert [(s.name, s.element, s.per, s.initial.value) for s in graph.states] == [
        ("rate", "f32", "prompt", 0.5),
        ("steps", "i32", "", 0),
    ]
    track = graph.node("host.track")
    rate = graph.node("host.rate")
    assert (track.reads, track.states, track.writes, track.gives, track.sets) == (
        ("reward",),
        ("rate", "steps"),
        ("share",),
        ("steps", "share"),
        ("steps",),
    )
    assert (rate.reads, rate.states, rate.writes, rate.sets, rate.per) == (
        ("reward",),
        ("rate",),
        (),
        ("rate",),
        "prompt",
    )


def test_a_label_names_a_node() -> None:
    graph = lowered(SMALL).graph
    assert graph.node("hinter").verb == "hint" and Edge("sample", "source", "hinter") in [
        replace(e, span=NOWHERE) for e in graph.edges
    ]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_every_program_of_the_language_is_lowered(path: Path) -> None:
    deploy = {"two_deploys": "debug", "sweep": "base"}.get(path.stem)
    codes = {d.code for d in diagnose(path.read_text(encoding="utf-8"), context(deploy=deploy))}
    # The last of the variants has its KL in the reward, and leaves `ref_logp` among the reads of its update.
    assert codes <= {"missing-file", *(["unused-column"] if path.stem == "variants" else [])}


@pytest.mark.parametrize(
    ("annotation", "kind", "words"),
    [
        ("bool", "bool", ()),
        ("int", "int", ()),
        ("float | None", "float", ()),
        ("int | float", "float", ()),
        ("'float'", "float", ()),
        ("Optional[str]", "str", ()),
        ("typing.Literal['a', 'b']", None, ("a", "b")),
        ("list[int]", None, ()),
        ("float | str", None, ()),
        ("Tokens", None, ()),
    ],
)
def test_an_option_has_the_type_of_its_annotation(annotation: str, kind: str | None, words: tuple[str, ...]) -> None:
    (option,) = read_signatures(f"def f(reward, *, given: {annotation} = None): ...")["f"].options
    assert (option.kind, option.words) == (kind, words)


def test_a_whole_number_is_one_however_it_is_written() -> None:
    update = lowered(PAGE.replace("lr = 1e-6", "lr = 1, warmup = 4 / 2")).graph.node("actor.update")
    lr, warmup = update.attributes["optimizer"].args
    assert (lr.value, warmup.value, type(warmup.value)) == (1, 2, int)


def test_lowering_twice_gives_the_same() -> None:
    first = lowered(SMALL)
    second = lowered(SMALL)
    assert (first.graph, first.cluster, first.deploy) == (second.graph, second.cluster, second.deploy)
    assert isinstance(first.graph, Graph)


def test_all_mistakes_are_told_at_once_in_the_order_of_the_text() -> None:
    text = (
        PAGE.replace("old_logp, ref_logp, advantage) {", "old_logb, ref_logp, advantage) {")
        .replace("tp = 4", "tq = 4")
        .replace("samples =", "sample =")
    )
    with pytest.raises(Fault) as caught:
        lowered(text)
    assert [d.code for d in caught.value.diagnostics] == ["unknown-attribute", "unknown-column", "unknown-attribute"]
    assert [d.span.line for d in caught.value.diagnostics] == sorted(d.span.line for d in caught.value.diagnostics)


def test_versions_of_tokens_are_kept_for_a_replay_and_so_are_used() -> None:
    """A column of a generation that nothing reads is reported, but not the versions, which a replay reads."""
    text = """import grpo
algorithm mine extends grpo {
  columns { made : i32[response], drawn : f32[response] }
  node actor.generate(prompt) -> response, made, drawn
}
"""
    assert [d.message for d in diagnose(text) if d.code == "unused-column"] == [
        "`drawn` is written by `actor.generate` but never read"
    ]
