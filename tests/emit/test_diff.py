"""What changed between two plans: exact texts, and that nothing changes unseen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import networkx as nx
import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.cli import compile_main
from msrl_graph.emit.diff import diff_json, diff_text, difference
from msrl_graph.ir.plan import Plan, from_json

Golden = Callable[[str, str], None]
Capture = pytest.CaptureFixture[str]
PROGRAMS = TESTS / "programs"
# Of a plan: what says no more than the rest says, or why it is so.
WORDS = {"span", "search", "basis", "reason", "remark", "tensors", "format_version", "how"}
# What a deploy leaves open or states stands in placements, docks and reshards as it came to be.
PLACED = {"layouts", "engines", "pools", "together", "dock", "reshard"}


def changed(name: str, *changes: tuple[str, str]) -> Plan:
    text = (PROGRAMS / f"{name}.rlg").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return compile(f"{name}.rlg", text=text)


def test_a_layout_and_a_param(golden: Golden) -> None:
    new = changed(
        "grpo_page",
        ("tp = 4, dp = 4", "tp = 2, dp = 8"),
        ("group        = 16", "group        = 8"),
        ("clip(0.2)", "clip(0.3)"),
    )
    changes = difference(changed("grpo_page"), new)
    golden("grpo_page.diff.txt", diff_text(changes, "old.json"))
    golden("grpo_page.diff.json", diff_json(changes, "old.json"))


def test_pools_come_and_states_go(golden: Golden) -> None:
    less = [
        ("  worker reference : policy frozen\n", ""),
        ("  node reference.infer(prompt, response) -> ref_logp\n", ""),
        ("    ref_logp  : f32[response]\n", ""),
        ("actor.infer, reference.infer, host.reward", "actor.infer, host.reward"),
        ("actor.infer, reference.infer, host.advantage", "actor.infer, host.advantage"),
        ("old_logp, ref_logp, advantage", "old_logp, advantage"),
        (" + kl_coef * kl(low_var)", ""),
        ("  param kl_coef      = 0.001\n", ""),
        ("tp = 8, dp = 2", "tp = 8, dp = 1"),
        ("tp = 4, dp = 4", "tp = 4, dp = 2"),
        ("  run {", "  apart actor.generate, actor.update\n  run {"),
    ]
    golden(
        "grpo_page.apart.diff.txt", diff_text(difference(changed("grpo_page"), changed("grpo_page", *less)), "old.json")
    )


def test_what_an_algorithm_changes_in_the_one_that_it_extends(capsys: Capture, tmp_path: Path, golden: Golden) -> None:
    def changes(body: str) -> str:
        path = tmp_path / "plain.rlg"
        path.write_text(f"import grpo\nalgorithm plain extends grpo {{{body}}}\n", encoding="utf-8")
        assert compile_main([str(path), "--emit", "graph", "--set", "group=4"]) == 0
        return capsys.readouterr().out.partition("reshard.\n\n")[2]

    node = "actor.update(prompt, response, old_logp, advantage) { epochs = 2, loss = clip(0.2, 0.28) }"
    golden(
        "plain.graph.diff.txt", changes(f"drop reference\ndrop ref_logp\ndrop kl_coef\nnode {node}\nparam prompts = 8")
    )
    assert changes("") == "Changes from grpo  0 changes\n"


def test_an_algorithm_of_its_own_has_no_changes(capsys: Capture) -> None:
    assert compile_main([str(PROGRAMS / "grpo_page.rlg"), "--emit", "graph"]) == 0
    assert "Changes from" not in capsys.readouterr().out


def test_no_differences_are_told() -> None:
    plan = changed("grpo_page")
    text = diff_text(difference(from_json(plan.to_json()), plan), "old.json")
    assert text == (
        "No differences from old.json: the same program, placements, docks, resharding, bytes, memory and\nseconds.\n"
    )
    assert json.loads(diff_json((), "old.json"))["changes"] == []


def test_the_other_way_round_signs_are_opposite() -> None:
    old = changed("grpo_page")
    new = changed("grpo_page", ("tp = 4, dp = 4", "tp = 2, dp = 8"))
    there = difference(old, new)
    back = difference(new, old)

    def key(*of: object) -> str:
        return repr(of)

    assert {key(c.part, c.item, c.what, c.old, c.new) for c in there} == {
        key(c.part, c.item, c.what, c.new, c.old) for c in back
    }
    opposite = {(c.part, c.item, c.what): c.difference for c in back}
    for c in there:
        assert c.difference == (None if c.difference is None else -(opposite[c.part, c.item, c.what] or 0))
        if c.percent is not None and isinstance(c.old, float) and isinstance(c.new, float):
            assert c.new == pytest.approx(c.old * (1 + c.percent / 100))


def leaves(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a plan's JSON stand, words that explain left out; of long lists the first and the last."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key not in WORDS and not (path == ("deploy",) and key in PLACED):
                yield from leaves(value, (*path, key))
    elif isinstance(part, list):
        for n in sorted({0, len(part) - 1} if part else set()):
            yield from leaves(part[n], (*path, n))
    elif part is not None:
        yield path


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"{value}x"


# What another fact tells: an expression's parts by its text, a bucket's tensors by the number of buckets, the states of
# a pool by where they are placed, the hosts of warehouses by how many there are, columns of traffic by those of the
# edge, a phase's pool by its state's, why a variable is set by its name, what a device is made of by its name.
SILENT = (
    r"graph/.*attributes/.*/(kind|unit|args|keys).*",
    r"graph/columns/\d+/dims/\d+/(size|ragged)",
    r"deploy/data/\w+/(name|stated/.*)",
    r"pools/\d+/nodes/.*",
    r"docks/warehouses/.*",
    r"reshards/\d+/buckets/.*",
    r"surroundings/\d+/settings/\d+/(why|source|fails)",
    r"cluster/device/((host_)?dies|mesh)",
    r"reshards/\d+/ways/\d+/(block|across)",  # of a send
    r"traffic/\d+/columns/.*",
    r"memory/\d+/pool",
    r"estimate/phases/\d+/pool",
    r"(reshards|traffic|memory|estimate)/.*source",
)


def silent(path: tuple[Any, ...]) -> bool:
    return any(re.fullmatch(s, "/".join(map(str, path))) for s in SILENT)


def test_nothing_changes_unseen() -> None:
    plan = compile(PROGRAMS / "apart_four.rlg")
    whole = json.loads(plan.to_json())
    seen = 0
    broken = []
    unseen = []
    for path in leaves(whole):
        if silent(path):
            continue
        data = json.loads(plan.to_json())
        at = data
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = other(at[path[-1]])
        try:
            changes = difference(plan, from_json(json.dumps(data)))
        except (KeyError, StopIteration, msgspec.ValidationError, nx.NetworkXException):
            broken.append(path)  # what refers to nothing is no plan
            continue
        seen += 1
        if not changes:
            unseen.append(path)
    assert unseen == []
    assert seen > 200 and len(broken) < 60, (seen, broken)


def test_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    page = str(PROGRAMS / "grpo_page.rlg")
    old = tmp_path / "old.json"
    assert compile_main([page, "--format", "json", "-o", str(old)]) == 0
    assert compile_main([page, "--diff", str(old)]) == 0
    assert capsys.readouterr().out.startswith("No differences from ")
    assert compile_main([page, "--set", "group=8", "--diff", str(old)]) == 0
    assert "group              16    8\n" in capsys.readouterr().out
    assert (
        compile_main([page, "--set", "group=8", "--diff", str(old), "--format", "json", "-o", str(tmp_path / "d.json")])
        == 0
    )
    told = json.loads((tmp_path / "d.json").read_text())
    (whole,) = [c for c in told["changes"] if (c["part"], c["item"]) == ("Seconds", "an iteration")]
    assert (told["stage"], whole["unit"]) == ("diff", "s")
    assert whole["difference"] == whole["new"] - whole["old"]
    assert whole["percent"] == pytest.approx(100 * whole["difference"] / whole["old"])


def test_an_old_plan_that_is_none(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    page = str(PROGRAMS / "grpo_page.rlg")
    plan = compile(page)
    monkeypatch.chdir(tmp_path)
    help = "  = help: write it again: msrl-compile FILE --format json -o plan.json\n"
    for data, why in (
        (replace(plan, format_version=7).to_json(), "its format is 7, this version reads 1"),
        ('{"format_version": 7}', "its format is 7, this version reads 1"),
        ("algorithm", "JSON is malformed: invalid character (byte 0)"),
        (json.dumps({**json.loads(plan.to_json()), "schedule": []}), "the part of the pass `schedule` is incomplete"),
    ):
        Path("old.json").write_text(data)
        capsys.readouterr()
        assert compile_main([page, "--diff", "old.json"]) == 1
        out, err = capsys.readouterr()
        assert (out, err) == ("", f"error[bad-plan]: old.json is not a plan of this version: {why}\n{help}")
    assert compile_main([page, "--diff", "none.json"]) == 1
    assert (
        capsys.readouterr().err == "error[missing-file]: the plan none.json cannot be read: No such file or directory\n"
    )
    assert compile_main(["grpo", "--diff", "old.json"]) == 1
    assert "error[no-deploy]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--emit", "graph"], ["--check"], ["--why"], ["--simulate", "2"], ["--format", "html"]]
)
def test_what_is_no_plan_is_not_compared(more: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compile_main(["grpo", "--diff", "old.json", *more])
    assert ended.value.code == 2
