"""A dock that can starve: told exactly where a batch is larger than what there is, and what the help says is enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from language import TESTS, told
from sample import examples

PAGE = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8").replace("qwen2.5-32b", "tiny")
PAGE = "\n".join(line for line in PAGE.split("\n") if "layout actor" not in line)


def starved(prompts: int, group: int, update: str = "", deploy: str = "", edge: str = "") -> list[tuple[str, str]]:
    """The message and help of each dock-starves."""
    text = PAGE.replace("optimizer = adamw(lr = 1e-6)", f"optimizer = adamw(lr = 1e-6){update}").replace(
        "=> actor.generate", f"=> actor.generate{edge}"
    )
    text = text.replace("  run {", f"  set prompts = {prompts}\n  set group = {group}\n  {deploy}\n  run {{")
    return [(d.message, d.help) for d in told(text, Path()) if d.code == "dock-starves"]


NEAR = st.integers(-1, 1)


@given(st.integers(2, 9), st.integers(2, 5), NEAR, NEAR, NEAR)
@examples(15)
def test_a_batch_starves_where_it_is_larger_than_an_iteration(
    prompts: int, group: int, one: int, two: int, three: int
) -> None:
    every = prompts * group
    mini = every + one
    rows = every + two
    groups = prompts + three
    streams = (
        f"actor.generate -> actor.infer {{ stream = {rows} }}\n  host.reward -> host.advantage {{ stream = {groups} }}"
    )
    found = [message.split("`")[1] for message, _ in starved(prompts, group, f"\n    mini_batch = {mini}", streams)]
    expected = {"actor.update": mini > every, "actor.infer": rows > every, "host.advantage": groups > prompts}
    assert sorted(found) == sorted(name for name, wrong in expected.items() if wrong)


@pytest.mark.parametrize("node", ["actor.infer", "host.reward"])
def test_tokens_starve_where_the_rows_can_never_hold_them(node: str) -> None:
    def told_of(tokens: int) -> list[tuple[str, str]]:
        return starved(4, 3, deploy=f"actor.generate -> {node} {{ stream_tokens = {tokens} }}")

    ((message, help),) = told_of(10**8)
    assert message.startswith(f"`{node}` waits for batches of 100,000,000 tokens, but an iteration has ")
    most = re.match(r"set at most `stream_tokens = (\d+)`", help)
    assert most, help
    assert told_of(int(most[1])) == [] and len(told_of(int(most[1]) + 1)) == 1


def test_who_reads_no_tokens_waits_for_none_of_them() -> None:
    text = PAGE.replace("host.advantage(response, reward)", "host.advantage(reward)")
    told_of = {
        key: [(d.message, d.help) for d in told(text.replace("  run {", f"  {edge} {{ {key} = 1 }}\n  run {{"), Path())]
        for key in ("stream", "stream_tokens")
        for edge in ["host.reward -> host.advantage"]
    }
    (new,) = {*told_of["stream_tokens"]} - {*told_of["stream"]}
    assert new == (
        "`host.advantage` reads no column of tokens, so a batch of 1 tokens is never complete",
        "use `stream`, which counts rows",
    )


@given(st.integers(1, 3000), st.integers(2, 20), st.integers(0, 3), st.sampled_from(["distributed", "central"]))
@examples(8)
def test_the_capacity_that_the_help_names_is_enough_and_little_less_is_not(
    prompts: int, group: int, stale: int, mode: str
) -> None:
    edge, apart = (f" {{ staleness = {stale} }}", "place actor.generate on nodes 0\n  ") if stale else ("", "")

    def told_of(capacity: str) -> list[tuple[str, str]]:
        return starved(prompts, group, deploy=f"{apart}dock {{ mode = {mode}, capacity = {capacity} }}", edge=edge)

    ((message, help),) = told_of("1 B")
    assert ("of each of" in message) == (stale > 0)
    least = re.match(r"`capacity = ([\d.]+) (\w+)`", help)
    assert least, help
    assert told_of(f"{least[1]} {least[2]}") == []
    assert told_of(f"{float(least[1]) * 0.98:.6f} {least[2]}") != []
