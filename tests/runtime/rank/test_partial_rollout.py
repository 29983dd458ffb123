"""Partial rollout, prompt by prompt: whoever draws, from whichever checkpoint, an iteration takes what the simulation
says, and each prompt enters an update once or leaves as overdue."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_engines import sampling
from run_states import PROGRAM, saved
from sample import examples

from msrl_graph import compile
from msrl_graph.backends.engine_protocols import Response
from msrl_graph.backends.generation.segments import generate_in_segments
from msrl_graph.ir.attributes import GenerateAttributes
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.driver.run_state import RunState
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.partial_rollout import PartialRollout
from msrl_graph.runtime.rank.rollout import Rollout
from msrl_graph.runtime.weights import checkpoint
from msrl_graph.simulation import rollout as simulation

FAN = 4
LONGEST = 8
TAKES = 3
ITERATIONS = 6
END = 1
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


@lru_cache
def planned(share: float, cuts: int, overdue: str):
    text = PROGRAM.replace("samples = 4", f"samples = 4, partial = {share}, cuts = {cuts}, overdue = {overdue}")
    for word in ("STATES", "SET", "REFILL"):
        text = text.replace(word, "")
    return compile("a.rlg", text=text)


class Legible:
    """Stands in for a stream: a key is its iteration and its row."""

    def keys(self, iteration, rows):
        return np.uint64(iteration << 32) + rows.astype(np.uint64)


class Engine:
    """Draws as many tokens as `lengths` says of the responses to each prompt, which is its position alone. `keys` are
    those of each position's responses."""

    def __init__(self, lengths, keys):
        self.lengths = lengths
        self.keys = keys

    def generate(self, request):
        if request.stretch:
            yield from generate_in_segments(self.generate, request)
            return
        prompts = request.prompts
        keys = request.keys
        said = request.sampling
        begun = request.begun
        assert np.array_equal(said.joined, begun)  # so that stop strings are looked for across a cut
        numbers = keys.astype(np.int64) & 0xFFFFFFFF
        for i, (prompt, row, before, most) in enumerate(zip(prompts, numbers, begun, said.max_tokens, strict=True)):
            known = self.keys.setdefault((int(prompt[0]), int(row) % FAN), keys[i])
            assert known == keys[i], "a response that goes on has another key than it began with"
            assert len(prompt) == 1 + before and {*prompt[1:]} <= {100 + prompt[0]}
            whole = self.lengths[prompt[0]][row % FAN]
            count = min(whole, most) - before
            tokens = np.full(count, 100 + prompt[0], np.int32)
            if before + count == whole and whole < LONGEST:
                tokens[-1] = END
            yield Response(i, tokens, np.zeros(count, np.float32))


def rolled(plan, task, lengths, groups, left=(), keys=None):
    """An iteration that so many groups draw, each in a thread of its own: the responses that they take, by position,
    what they report, and the positions under way, of which some have `left` before. `keys` are those drawn by so far,
    by position and number."""
    node = plan.graph.node("actor.generate")
    told = []
    positions = [*(c.position for c in task.cut), *range(task.position, task.position + task.prompts - len(task.cut))]
    here = Barrier(groups, timeout=20)
    summed = Barrier(groups, told.clear, timeout=20)

    def together(of):
        told.append(of)
        here.wait()
        found = np.sum(told, axis=0)
        summed.wait()
        return found

    def group(number):
        rows = np.array([row for row in range(len(positions))[number::groups] if positions[row] not in left], np.int64)
        context = [np.array([positions[row]], np.int32) for row in rows]
        how = sampling(samples=FAN, max_tokens=LONGEST, ends=(END,))
        report = Report(f"rank {number}")
        prompts = Rollout(node, task, Batch(None, rows, {}), report, context, how, Legible())
        rollout = PartialRollout(prompts, TAKES, task.number, together)
        taken = rollout.run(Engine(lengths, {} if keys is None else keys))
        report.cut = rollout.cut_prompts(taken)
        return {positions[row]: rollout.responses[row] for row in taken}, report

    with ThreadPoolExecutor(groups) as threads:
        taken, reports = zip(*threads.map(group, range(groups)), strict=True)
    return {position: grown for some in taken for position, grown in some.items()}, [*reports], positions


def responses(shortest, longest):
    return st.lists(st.integers(shortest, longest), min_size=FAN, max_size=FAN)


@examples(60)
@given(
    lengths=st.lists(st.one_of(responses(1, 2), responses(1, LONGEST)), min_size=40, max_size=40),
    share=st.sampled_from([0.3, 0.6, 1.0]),
    cuts=st.integers(1, 3),
    overdue=st.sampled_from(["wait", "drop_group"]),
    groups=st.integers(1, 3),
    restored=st.integers(0, ITERATIONS),
)
def test_each_prompt_enters_an_update_once_or_leaves_overdue(lengths, share, cuts, overdue, groups, restored):
    plan = planned(share, cuts, overdue)
    said = GenerateAttributes.of(plan.graph.node("actor.generate"))
    carried = RunState(plan, 100)
    foreseen = simulation.SimulatedRollout(
        TAKES, said.under_way(TAKES), FAN, said.stretch(LONGEST), cuts, said.waits, lambda n: (1, lengths[n])
    )
    entered = set()
    left = set()
    begun = set()
    keys = {}
    for number in range(ITERATIONS):
        carried.groups = groups
        if number == restored:
            with TemporaryDirectory() as folder:
                path = saved(carried, Path(folder), number)
                carried = RunState(plan, 100)
                carried.groups = groups
                carried.restore(path, checkpoint.read_manifest(path))
        task = carried.task(number)
        taken, reports, positions = rolled(plan, task, lengths, groups, keys=keys)
        working = foreseen.begin(number)
        assert positions == [g.prompt for g in working]
        while not foreseen.is_done(working):
            foreseen.grow(working, [1.0] * FAN * len(working))
        assert sorted(taken) == sorted(g.prompt for g in foreseen.take(working)) and len(taken) == TAKES
        for position, responses in taken.items():
            assert [len(r.tokens) for r in responses] == lengths[position]
            for r in responses:
                assert r.versions.tolist() == sorted(r.versions) and r.versions[0] >= number - cuts
                assert r.versions[-1] <= number and len(r.versions) == len(r.logps) == len(r.tokens)
        carried.end_iteration(task, reports)
        going_on = {c.position for report in reports for c in report.cut}
        gone = {*positions} - {*taken} - going_on
        assert gone <= {c.position for c in task.cut if c.cuts == cuts} and not (gone and said.waits)
        assert not {*taken} & (entered | left) and not gone & entered
        entered, left, begun = entered | {*taken}, left | gone, begun | {*positions}
        assert len({*keys.values()}) == len(keys), "two responses are drawn by one key"
        assert begun == entered | left | going_on == {*range(len(begun))} and not going_on & (entered | left)


@pytest.mark.parametrize("overdue", ["wait", "drop_group"])
def test_of_prompts_that_have_left_before_none_is_waited_for(overdue):
    plan = planned(0.6, 1, overdue)
    carried = RunState(plan, 100)
    carried.groups = 2
    taken, reports, positions = rolled(plan, carried.task(0), [[5] * FAN] * 40, 2, left={0, 1, 3})
    assert len(positions) == 5 and taken.keys() == {2, 4} and not any(report.cut for report in reports)
