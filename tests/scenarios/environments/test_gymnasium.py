"""Environments as gymnasium has them, and such as wait: recognised by how they are called, with or without the
package."""

import time

import pytest
from gymnasium_files import file, planned, played

from msrl_graph.runtime.process.task_report import Report, RunError


@pytest.mark.parametrize("base", ["", "(gymnasium.Env)"])
@pytest.mark.parametrize("wait", ["", "async"])
@pytest.mark.parametrize("on_failure", ["stop", "drop_row"])
def test_reset_and_step_are_called_as_gymnasium_has_them(base, wait, on_failure, tmp_path):
    super = "super().reset(seed=seed); seed = int(self.np_random.integers(10**6))" if base else "pass"
    plan = planned(file(tmp_path, base, wait, super), more=f"on_failure = {on_failure},")
    (first, one, two), columns, stay, _ = played(plan)
    # The prompt comes decoded: of PROMPTS all but one have so many characters as tokens.
    assert first[:4] == [("856", False), ("856", False), ("74", False), ("74", False)]
    assert one == [(f"={'1'}", False)] * 8
    assert two == [("=1" if i % 2 else "=12", True) for i in range(8)]
    assert columns["reward"].values.tolist() == [0.5 if i % 2 else 0.75 for i in range(8)]
    seeds = [columns["said"].text(i) for i in range(8)]
    assert len(set(seeds)) == 8 and stay.all()
    again = played(plan)[1]
    assert [again["said"].text(i) for i in range(8)] == seeds  # keyed by seed, iteration, node and row


def test_rewards_come_by_turn_where_the_column_holds_several(tmp_path):
    columns = played(planned(file(tmp_path), reward="f32[<= 8]"))[1]
    assert [columns["reward"][i].tolist() for i in range(2)] == [[0.25, 0.5], [0.25, 0.25]]


def test_those_that_wait_do_so_side_by_side_each_with_its_time(tmp_path):
    step = "await asyncio.sleep(60 if self.options['answer'] == '7' else 0.5)"
    plan = planned(file(tmp_path, async_="async", step=step), more="on_failure = drop_row, timeout = 2 s,")
    begin = time.monotonic()
    _, columns, stay, episodes = played(plan)
    report = Report("rank")
    episodes.verdicts(report, "")
    assert stay.tolist() == [True, True, False, False, True, True, True, True]
    assert report.sums["failed/timeout"] == (2, 0)
    assert len(columns["reward"].values) == 6
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("wait", ["", "async"])
@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("return 3, 1.0, True, False, {}", "the observation is int 3, but a policy reads text: wrap the class"),
        (
            "return '', 1.0, True, {}",
            "`step` returned tuple of 4, where a tuple of 5 belongs: the observation, reward,",
        ),
        ("return 'half \\ud83d', 1.0, True, False, {}", "the observation has half a character (U+D83D), but a policy"),
        ("return '', None, True, False, {}", "`step` returned None for the reward, where a number belongs"),
        ("return '', '3.5', True, False, {}", "`step` returned str '3.5' for the reward, where a number belongs"),
        ("return '', 1.0, 1, False, {}", "`step` returned int 1 for `terminated`, where true or false belongs"),
        ("return '', 1.0, True, None, {}", "`step` returned None for `truncated`, where true or false belongs"),
        ("return '', 1.0, True, False, {}", "`step` returned an info without `said`, which the generation writes"),
        ("return '', 1.0, True, False, None", "`step` returned None for the info, where a dictionary belongs"),
        ("raise ValueError('lost')", "ValueError: lost, at "),
        ("raise SystemExit(1)", "SystemExit: 1, at "),
    ],
)
def test_what_does_not_belong_there_is_told(wait, step, told, tmp_path):
    plan = planned(file(tmp_path, async_=wait, step=step))
    with pytest.raises(RunError) as raised:
        played(plan)
    assert "failed on row 0, turn 1 of iteration 3: " in str(raised.value)
    assert told in str(raised.value)


@pytest.mark.parametrize("on_failure", ["stop", "drop_row"])
def test_what_has_a_close_is_closed(on_failure, tmp_path):
    close = f"self.file = open('{tmp_path}/closed', 'a'); self.file.write('x'); self.file.close()"
    played(planned(file(tmp_path, close=close), more=f"on_failure = {on_failure},"))
    assert (tmp_path / "closed").read_text() == "x" * 8


def test_ours_may_be_async_too(tmp_path):
    (tmp_path / "game.py").write_text(
        "import asyncio\nclass Game:\n"
        "    async def reset(self, answer: str, rng):\n        await asyncio.sleep(0.2)\n        return answer\n"
        "    async def step(self, text):\n"
        "        await asyncio.sleep(0.2)\n        return text, text, 2.0, text == '12'\n"
    )
    (first, _, two), columns, _, _ = played(planned(tmp_path / "game.py"))
    assert first[2] == ("7", False) and two[0] == ("12", True) and two[1] == ("1", False)
    assert columns["reward"].values.tolist() == [2.0] * 8
