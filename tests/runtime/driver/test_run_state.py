"""What outlives an iteration: positions in the data and states, taken from reports in any order, and from a
checkpoint."""

import itertools
import shutil

import numpy as np
import pytest
from run_states import PROGRAM, saved

from msrl_graph import Fault, compile
from msrl_graph.runtime.driver.adaptive_draw import prompts_for
from msrl_graph.runtime.driver.run_state import RunState, _from_arrays
from msrl_graph.runtime.driver.run_state import _to_arrays as carried_arrays
from msrl_graph.runtime.process.task import CutPrompt, Task
from msrl_graph.runtime.process.task_report import NextValues, Report, RunError
from msrl_graph.runtime.weights import checkpoint

STATES = "state rate : f32 per prompt = 0.5\n  state level : f32 = 2"
SET = """
  node host.rate(reward, rate) -> rate { call = moving_mean(mean = rate), per = prompt }
  node host.level(reward, level) -> level { call = moving_mean(mean = level), per = batch }
  host.reward -> host.rate, host.level"""
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


def planned(states=False, refill=False, adaptive=False):
    text = PROGRAM.replace("STATES", STATES if states else "").replace("SET", SET if states else "")
    if refill:
        text = text.replace("host.reward -> host.rate, host.level", "host.mixed -> host.rate, host.level")
    stated = f", refill = 2, adaptive = {str(adaptive).lower()}" if refill else ""
    return compile("a.rlg", text=text.replace("REFILL", stated))


def report(states=None, drawn=(), prompts_drawn=0, prompts_kept=0):
    found = Report(
        "functions",
        states={n: NextValues(*v) for n, v in (states or {}).items()},
        prompt_rows=np.array(drawn, np.int64),
    )
    if prompts_drawn:
        found.count("prompts_drawn", prompts_drawn, 0)
        found.count("prompts_kept", prompts_kept, 0)
    return found


@pytest.mark.parametrize("states", [False, True])
def test_prompts_go_on_where_the_last_iteration_ended(states):
    """With a refill by as many as were drawn; the next iteration is known beforehand where there is neither that nor a
    state."""
    plain = RunState(planned(states), 10)
    refilling = RunState(planned(states, refill=True), 10)
    assert plain.known_early is not states and not refilling.known_early
    positions: list[tuple[int, int]] = []
    for i, rounds in enumerate((1, 3, 2)):
        positions.append((plain.task(i).position, refilling.task(i).position))
        plain.end_iteration(plain.task(i), [report()])
        refilling.end_iteration(refilling.task(i), [report(), report(prompts_drawn=3 * rounds)])
    assert positions == [(0, 0), (3, 3), (6, 12)] and refilling.position == 18


def test_the_last_prompt_of_a_row_counts_whoever_tells_of_it_first():
    host = report({"level": ([0], [7.0])}, drawn=[4, 8, 4])  # the first and the third prompt are of one row
    parts = [report({"rate": ([0], [0.1])}), report({"rate": ([2, 1], [0.3, 0.2])}), host]
    for order in itertools.permutations(parts):
        carried = RunState(planned(states=True), 10)
        assert carried.task(0).states == {"level": 2.0} and carried.tables(0).states["rate"].tolist() == [0.5] * 10
        carried.end_iteration(carried.task(0), list(order))
        assert carried.task(1).states == {"level": 7.0}
        assert carried.tables(1).states["rate"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.3, 0.5, 0.5, 0.5, 0.2, 0.5]


def test_what_is_begun_early_draws_by_older_states_and_waits_for_those_of_the_iteration_before():
    carried = RunState(planned(states=True), 10)
    begun = report({"level": ([0], [7.0])}, drawn=[4, 8, 4])
    first = carried.task(0)
    second = carried.task(1)
    assert not carried.knows(1) and (second.draws, second.states) == ({"level": 2.0}, {})
    assert carried.tables(1).states == {} and carried.tables(1).draws["rate"].tolist() == [0.5] * 10
    carried.learn(0, [begun, report({"rate": ([0], [0.1])})])  # its functions have ended, its update has not
    assert carried.knows(1) and carried.task(1).states == {"level": 7.0} and carried.task(0).states == {"level": 2.0}
    assert carried.tables(1).states["rate"][4] == 0.1 and carried.tables(1).draws["rate"][4] == 0.5
    assert carried.task(2).draws == {"level": 2.0}, "those that the updates are with"
    carried.end_iteration(first, [begun])
    assert carried.task(1).draws == {"level": 2.0} and carried.task(3).draws == {"level": 7.0}


def test_a_checkpoint_holds_no_state_of_functions_that_are_ahead(tmp_path):
    carried = RunState(planned(states=True), 10)
    tasks = [carried.task(i) for i in range(2)]
    carried.end_iteration(tasks[0], [report({"level": ([0], [3.0])}, drawn=[0])])
    carried.learn(1, [report({"level": ([0], [4.0])}, drawn=[0])])
    path = saved(carried, tmp_path, 1)
    again = RunState(planned(states=True), 10)
    again.restore(path, checkpoint.read_manifest(path))
    assert again.task(1).states == {"level": 3.0}


def test_a_checkpoint_holds_positions_and_states(tmp_path):
    plan = planned(states=True, refill=True)
    carried = RunState(plan, 10)
    carried.end_iteration(
        carried.task(0), [report({"level": ([0], [7.25]), "rate": ([5], [0.1])}, drawn=range(6), prompts_drawn=6)]
    )
    path = saved(carried, tmp_path, 1)
    again = RunState(plan, 10)
    again.restore(path, checkpoint.read_manifest(path))
    assert again.task(1) == carried.task(1) and again.task(1).position == 6
    assert again.tables(1).states["rate"].tolist() == [0.5] * 5 + [0.1] + [0.5] * 4
    with pytest.raises(RunError, match="holds 10 values of the state `rate`, but the data has 11 rows"):
        RunState(plan, 11).restore(path, checkpoint.read_manifest(path))
    without = saved(RunState(planned(), 10), tmp_path, 2)
    shutil.copy(path / "states.safetensors", without)  # what its manifest does not name is not of it
    with pytest.raises(RunError, match="holds no value of the state `rate`: it is a checkpoint of another program"):
        again.restore(without, checkpoint.read_manifest(without))


def test_responses_that_go_on_keep_the_row_that_they_began_as_also_from_an_older_checkpoint():
    response = (np.array([5, 6], np.int32), np.zeros(2, np.float32), np.array([3, 4], np.int32), False)
    cut = tuple(
        CutPrompt(position, (response,) * 2, 1, began, row) for position, began, row in ((17, 3, 5), (20, 4, 0))
    )
    held = carried_arrays(cut)
    for one, other in zip(_from_arrays(held, 5), cut, strict=True):
        assert one[0] == other[0] and one[2:] == other[2:] and one.responses[1][0].tolist() == [5, 6]
    older = {name: values for name, values in held.items() if name not in ("cut/iterations", "cut/rows")}
    assert [(c.position, c.iteration, c.row) for c in _from_arrays(older, 5)] == [(17, 5, 0), (20, 5, 1)]


def test_a_changed_program_reads_on_where_the_old_one_ended(tmp_path):
    refilling = RunState(planned(refill=True), 10)
    refilling.end_iteration(refilling.task(0), [report(prompts_drawn=9)])
    path = saved(refilling, tmp_path, 1)
    plain = RunState(planned(), 10)
    plain.restore(path, checkpoint.read_manifest(path))
    assert plain.known_early and [plain.task(i).position for i in (1, 2)] == [9, 12]


# Adaptive refills


def drawn_on_average(size, target, share, most):
    """Prompts that rounds of a size draw until so many have passed, and what rounds cost, over random draws."""
    draw = np.random.default_rng(0)
    rounds = -(-most // size)
    passed = np.cumsum(draw.binomial(size, share, (4000, rounds)), axis=1)
    needed = np.minimum(1 + (passed < target).sum(axis=1), rounds)
    return float((needed * size + (needed - 1) * target / 4).mean())


@pytest.mark.parametrize(
    ("target", "share", "most"), [(64, 0.7, 704), (8, 0.52, 88), (256, 0.95, 512), (64, 0.1, 704), (20, 0.4, 60)]
)
def test_an_adaptive_draw_is_the_cheapest_of_all_sizes(target, share, most):
    found = drawn_on_average(prompts_for(target, share, most), target, share, most)
    every = [drawn_on_average(size, target, share, most) for size in range(target, most + 1, max(1, most // 100))]
    assert found <= 1.03 * min(every) and found <= drawn_on_average(target, target, share, most) + 1e-9


def test_an_adaptive_draw_where_nearly_all_is_known():
    """Of 64 prompts with 70 % that pass, a refill of 64 draws 128."""
    assert 98 <= prompts_for(64, 0.7, 704) <= 110
    assert prompts_for(64, 1.0, 128) == 64 and prompts_for(64, 0.0, 128) == prompts_for(64, 0.01, 128) == 128


def test_an_adaptive_draw_follows_the_share_that_passed_and_a_checkpoint_holds_it(tmp_path):
    plan = planned(refill=True, adaptive=True)
    carried = RunState(plan, 100)
    sizes = []
    expected = []
    passed = drawn = 0.0
    for i, (part, rounds) in enumerate([(1, 1), (0.84, 2), (0.8, 1), (1, 1), (1, 1), (0.9, 1)]):
        expected.append(prompts_for(3, passed / drawn if drawn else 1.0, 9))
        task = carried.task(i)
        sizes.append(task.prompts)
        assert task.wanted == task.target == 3 and task.prompts * task.rounds(2) >= 9
        assert carried.task(i) == task  # whoever asks again
        metrics = Report("functions", prompt_rows=np.zeros(task.prompts * rounds, np.int64))
        carried.count(i, [metrics])
        assert metrics.sums["refill/prompts"] == (task.prompts, 1)
        position = carried.position
        kept = round(part * task.prompts * rounds)
        passed = 0.8 * passed + kept
        drawn = 0.8 * drawn + task.prompts * rounds
        carried.end_iteration(task, [report(prompts_drawn=task.prompts * rounds, prompts_kept=kept)])
        assert carried.position == position + task.prompts * rounds
    assert sizes == expected and sizes[:2] == [3, 3] and len({*sizes}) > 1
    path = saved(carried, tmp_path, 6)
    again = RunState(plan, 100)
    again.restore(path, checkpoint.verify(path))
    assert again.task(6).prompts == carried.task(6).prompts and again.task(6).position == carried.task(6).position
    # A checkpoint of a run that did not adapt: the counts begin anew.
    plain = RunState(planned(refill=True), 100)
    plain.end_iteration(plain.task(0), [report(prompts_drawn=3, prompts_kept=1)])
    path = saved(plain, tmp_path, 1)
    again = RunState(plan, 100)
    again.restore(path, checkpoint.verify(path))
    assert again.task(1).prompts == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "per = prompt REFILL",
            "per = prompt, adaptive = true",
            ("bad-value", "`adaptive` of `host.mixed` has no effect without `refill`"),
        ),
        (
            "keep = mixed(), per = prompt REFILL",
            "keep = reward > 0.5, refill = 2, adaptive = true",
            (
                "bad-scope",
                "`host.mixed` is `adaptive` but does not filter whole prompts, so no share of prompts passes",
            ),
        ),
    ],
)
def test_what_cannot_be_adaptive_is_refused_and_the_help_is_a_way_out(old, new, told):
    text = PROGRAM.replace("STATES", "").replace("SET", "").replace(old, new)
    with pytest.raises(Fault) as fault:
        compile("a.rlg", text=text)
    found = fault.value.diagnostics[0]
    assert (found.code, found.message) == told
    help = found.help.partition("`")[2].partition("`")[0]
    compile("a.rlg", text=text.replace("adaptive = true", f"adaptive = true, {help}"))


def test_the_rows_of_an_adaptive_draw_are_planned_for():
    """No size draws more than twice as many prompts as a refill allows."""
    for target, refill in itertools.product((3, 8, 64), (1, 2, 10)):
        most = target * (1 + refill)
        drawn = [size * Task("train", 0, size, wanted=target).rounds(refill) for size in range(target, most + 1)]
        assert most <= min(drawn) and max(drawn) <= 2 * most
    plans = [planned(refill=True, adaptive=adaptive) for adaptive in (False, True)]
    plain, adaptive = (
        max(m.items["rows"] for m in plan.memory if m.place == "host" and "rows" in m.items) for plan in plans
    )
    assert plain < adaptive <= 2 * plain
