"""What outlives an iteration: positions in the data and states, taken from reports in any order, and from a
checkpoint."""

import itertools
import shutil

import numpy as np
import pytest

from msrl_graph import compile
from msrl_graph.runtime.driver.carried import Carried, _cut
from msrl_graph.runtime.driver.carried import _arrays as carried_arrays
from msrl_graph.runtime.process.report import NextValues, Report, RunError
from msrl_graph.runtime.process.task import Cut
from msrl_graph.runtime.weights import checkpoint

PROGRAM = """
algorithm a {
  columns { prompt : i32[<= 8]
            answer : text
            response : i32[<= 8]
            reward : f32
            advantage : f32[response] }
  STATES
  worker actor : policy
  worker host : function
  source(3) -> prompt, answer
  node actor.generate(prompt) -> response { samples = 4 }
  node host.reward(response, answer) -> reward { call = exact_match() }
  node host.mixed(reward) { keep = mixed(), per = prompt REFILL }
  node host.advantage(response, reward) -> advantage { call = group_norm(), per = prompt }
  node actor.update(prompt, response, advantage) { loss = clip(), optimizer = adamw(lr = 1e-6) }
  source -> actor.generate -> host.reward -> host.mixed -> host.advantage -> actor.update
  SET
  actor.update => actor.generate
}
cluster c { device = "cpu", nodes = 1, devices_per_node = 1 }
deploy a on c { model policy = "tiny"
  data source = "tiny.jsonl" { prompt = "problem", answer = "answer" } }
"""
STATES = "state rate : f32 per prompt = 0.5\n  state level : f32 = 2"
SET = """
  node host.rate(reward, rate) -> rate { call = moving_mean(mean = rate), per = prompt }
  node host.level(reward, level) -> level { call = moving_mean(mean = level), per = batch }
  host.reward -> host.rate, host.level"""
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


def planned(states=False, refill=False):
    text = PROGRAM.replace("STATES", STATES if states else "").replace("SET", SET if states else "")
    if refill:
        text = text.replace("host.reward -> host.rate, host.level", "host.mixed -> host.rate, host.level")
    return compile("a.rlg", text=text.replace("REFILL", ", refill = 2" if refill else ""))


def report(states=None, drawn=(), prompts_drawn=0):
    found = Report(
        "functions", states={n: NextValues(*v) for n, v in (states or {}).items()}, drawn=np.array(drawn, np.int64)
    )
    if prompts_drawn:
        found.count("prompts_drawn", prompts_drawn, 0)
    return found


@pytest.mark.parametrize("states", [False, True])
def test_prompts_go_on_where_the_last_iteration_ended(states):
    """With a refill by as many as were drawn; the next iteration is known beforehand where there is neither that nor a
    state."""
    plain, refilling = Carried(planned(states), 10), Carried(planned(states, refill=True), 10)
    assert plain.known is not states and not refilling.known
    positions: list[tuple[int, int]] = []
    for i, rounds in enumerate((1, 3, 2)):
        positions.append((plain.task(i).position, refilling.task(i).position))
        plain.after(plain.task(i), [report()])
        refilling.after(refilling.task(i), [report(), report(prompts_drawn=3 * rounds)])
    assert positions == [(0, 0), (3, 3), (6, 12)] and refilling.position == 18


def test_the_last_prompt_of_a_row_counts_whoever_tells_of_it_first():
    host = report({"level": ([0], [7.0])}, drawn=[4, 8, 4])  # the first and the third prompt are of one row
    parts = [report({"rate": ([0], [0.1])}), report({"rate": ([2, 1], [0.3, 0.2])}), host]
    for order in itertools.permutations(parts):
        carried = Carried(planned(states=True), 10)
        assert carried.task(0).states == {"level": 2.0} and carried.tables(0).states["rate"].tolist() == [0.5] * 10
        carried.after(carried.task(0), list(order))
        assert carried.task(1).states == {"level": 7.0}
        assert carried.tables(1).states["rate"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.3, 0.5, 0.5, 0.5, 0.2, 0.5]


def test_what_is_begun_early_draws_by_older_states_and_waits_for_those_of_the_iteration_before():
    carried, begun = Carried(planned(states=True), 10), report({"level": ([0], [7.0])}, drawn=[4, 8, 4])
    first, second = carried.task(0), carried.task(1)
    assert not carried.knows(1) and (second.draws, second.states) == ({"level": 2.0}, {})
    assert carried.tables(1).states == {} and carried.tables(1).draws["rate"].tolist() == [0.5] * 10
    carried.learn(0, [begun, report({"rate": ([0], [0.1])})])  # its functions have ended, its update has not
    assert carried.knows(1) and carried.task(1).states == {"level": 7.0} and carried.task(0).states == {"level": 2.0}
    assert carried.tables(1).states["rate"][4] == 0.1 and carried.tables(1).draws["rate"][4] == 0.5
    assert carried.task(2).draws == {"level": 2.0}, "those that the updates are with"
    carried.after(first, [begun])
    assert carried.task(1).draws == {"level": 2.0} and carried.task(3).draws == {"level": 7.0}


def test_a_checkpoint_holds_no_state_of_functions_that_are_ahead(tmp_path):
    carried = Carried(planned(states=True), 10)
    tasks = [carried.task(i) for i in range(2)]
    carried.after(tasks[0], [report({"level": ([0], [3.0])}, drawn=[0])])
    carried.learn(1, [report({"level": ([0], [4.0])}, drawn=[0])])
    path, again = saved(carried, tmp_path, 1), Carried(planned(states=True), 10)
    again.restore(path, checkpoint.manifest_of(path))
    assert again.task(1).states == {"level": 3.0}


def saved(carried, folder, iteration):
    partial = checkpoint.begin(folder, iteration)
    files = carried.save(partial, {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, iteration, 0, {}, {}, tuple(files), carried.position)
    return checkpoint.commit(partial, manifest, 2)


def test_a_checkpoint_holds_positions_and_states(tmp_path):
    plan = planned(states=True, refill=True)
    carried = Carried(plan, 10)
    carried.after(
        carried.task(0), [report({"level": ([0], [7.25]), "rate": ([5], [0.1])}, drawn=range(6), prompts_drawn=6)]
    )
    path = saved(carried, tmp_path, 1)
    again = Carried(plan, 10)
    again.restore(path, checkpoint.manifest_of(path))
    assert again.task(1) == carried.task(1) and again.task(1).position == 6
    assert again.tables(1).states["rate"].tolist() == [0.5] * 5 + [0.1] + [0.5] * 4
    with pytest.raises(RunError, match="holds 10 values of the state `rate`, and the data has 11 rows"):
        Carried(plan, 11).restore(path, checkpoint.manifest_of(path))
    without = saved(Carried(planned(), 10), tmp_path, 2)
    shutil.copy(path / "states.safetensors", without)  # what its manifest does not name is not of it
    with pytest.raises(RunError, match="holds no value of the state `rate`: it is a checkpoint of another program"):
        again.restore(without, checkpoint.manifest_of(without))


def test_responses_that_go_on_keep_the_row_that_they_began_as_also_from_an_older_checkpoint():
    response = (np.array([5, 6], np.int32), np.zeros(2, np.float32), np.array([3, 4], np.int32), False)
    cut = tuple(Cut(position, (response,) * 2, 1, began, row) for position, began, row in ((17, 3, 5), (20, 4, 0)))
    held = carried_arrays(cut)
    for one, other in zip(_cut(held, 5), cut, strict=True):
        assert one[0] == other[0] and one[2:] == other[2:] and one.responses[1][0].tolist() == [5, 6]
    older = {name: values for name, values in held.items() if name not in ("cut/iterations", "cut/rows")}
    assert [(c.position, c.iteration, c.row) for c in _cut(older, 5)] == [(17, 5, 0), (20, 5, 1)]


def test_a_changed_program_reads_on_where_the_old_one_ended(tmp_path):
    refilling = Carried(planned(refill=True), 10)
    refilling.after(refilling.task(0), [report(prompts_drawn=9)])
    path = saved(refilling, tmp_path, 1)
    plain = Carried(planned(), 10)
    plain.restore(path, checkpoint.manifest_of(path))
    assert plain.known and [plain.task(i).position for i in (1, 2)] == [9, 12]
