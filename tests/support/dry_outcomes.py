"""Random programs that are run dry, and what becomes of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import dry
import pytest
from broken import compiled
from hypothesis import strategies as st

from msrl_graph.analysis.async_schedule import Sends, awaited_pools, pipelined_openings
from msrl_graph.analysis.rowsets import rowsets
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.ir.attributes import CallAttributes, GenerateAttributes, UpdateAttributes
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import RunError

KINDNESS = st.sampled_from((0.0, 0.4, 0.8, 1.0))  # the share of rows that filters keep


DATA = 7  # rows of each data file


def expected(found: dry.Dry, task: Task, node: str) -> Counter[object] | None:
    """The rows that a node is to be handed in a task, by key; None where prompts never suffice."""
    truth = found.truth(task)
    reader = found.readers[node]
    if not task.trains:
        numbers = reader.numbers(task)
        return Counter(truth.under(range(numbers.size[0]), reader.rows, reader.failing, numbers.fans))
    if truth.rounds(task.target, task.prompts) is None:
        return None
    once = Counter(truth.expected(node, task.target, task.prompts))
    return Counter({key: n * reader.epochs for key, n in once.items()})


class Outcome(NamedTuple):
    """How a program ended; of its iterations with staleness, how many there were, and how many versions old a row of
    them was at most; whether it was resumed from a checkpoint."""

    how: str
    stale: int = 0
    oldest: int = 0
    resumed: bool = False


def carried_on(plan: Plan, found: dry.Dry, node: str) -> None:
    """Of a partial rollout: each iteration has as many prompts as the source begins, and each prompt of the data comes
    once and in time, or leaves where it is overdue. Of prompts that others leave out before there may be fewer."""
    said = GenerateAttributes.of(plan.graph.node(node))
    takes = plan.graph.rows[0]
    end = 0
    leave = bool(rowsets(plan.graph).sieves.keys() & plan.graph.flow.before(node))
    for i in range(plan.deploy.run.iterations):
        rows = found.taken[i]
        task = found.begun[i]
        assert len(set(rows)) == len(rows) and task.position == end
        assert len(rows) == takes or (leave and len(rows) < takes)
        end += task.prompts - len(task.cut)
        overdue = {c.position for c in task.cut if c.cuts >= said.cuts}
        under_way = [*(c.position for c in task.cut), *range(task.position, end)]
        taken = {under_way[row] for row in rows}
        assert overdue <= taken or leave or not said.waits
        if (following := found.begun.get(i + 1)) is not None:
            cut = {c.position: c.cuts for c in following.cut}
            goes_on = {*under_way} - taken - overdue
            assert cut.keys() == goes_on or (leave and cut.keys() <= goes_on)
            assert max(cut.values(), default=0) <= said.cuts


def in_order(plan: Plan, found: dry.Dry) -> None:
    """Each state, which a node counts up, has in every iteration the value that the one before has left, whoever reads
    it, and however many iterations are under way."""
    for state in plan.graph.states:
        left = dict.fromkeys(range(DATA) if state.per else (0,), float(state.initial.literal()))
        for i in range(plan.deploy.run.iterations):
            chosen = [row for _, rows in sorted(found.chosen[i].items()) for row in rows]
            for key, values in found.seen[state.name, i].items():
                assert values == {left[chosen[key] if state.per else 0]}, (state.name, i, key)
            for key in {chosen[unit] if state.per else 0 for unit in found.counted[state.name, i]}:
                left[key] += 1


def resumed(plan: Plan, found: dry.Dry, growing: str) -> None:
    """A run that ended after a checkpoint, whenever it did, and goes on from it in another order: together they are as
    one run that was whole. Which prompts a partial rollout has to begin depends on the order, else all draw the same
    rows. `growing` is the generation of a partial rollout."""
    begin = found.world.random.choice([i for i in found.store.saved if i < plan.deploy.run.iterations])
    other = dry.Dry(plan, found.seed, found.kindness)
    other.world.random.seed(found.seed + 1)
    other.run(DATA, found.store.saved[begin])
    if not growing:
        assert other.chosen == {i: rounds for i, rounds in found.chosen.items() if i >= begin}
    for name in ("seen", "counted", "chosen", "taken", "begun"):  # by iteration, or by name and iteration
        first = getattr(found, name)
        for key in [key for key in first if (key[1] if isinstance(key, tuple) else key) >= begin]:
            del first[key]
        first |= getattr(other, name)
    in_order(plan, found)
    if growing:
        carried_on(plan, found, growing)
    if plan.deploy.run.deterministic:
        as_old_as_may_be(plan, other, begin)


def as_old_as_may_be(plan: Plan, found: dry.Dry, begin: int = 0) -> None:
    """With `deterministic` the weights that an iteration generates with follow from the program."""
    sends = Sends(plan)
    waits = awaited_pools(plan, sends.leads)
    growing = {plan.placement(node.name).pool for node in plan.graph.nodes if node.cuts}
    # A pool in step, or one that generates ahead of its own update, knows what it has cut when the iteration has ended.
    at_once = any(pool not in sends.leads or pool in pipelined_openings(plan) for pool in growing)
    for edge, versions in found.versions.items():
        pool = plan.placement(edge[1]).pool
        for i in range(begin, plan.deploy.run.iterations):
            if (version := versions.taken.get(f"train/{i}")) is not None:
                begins = i if at_once else max(sends.update_iteration(p, i) for p in (pool, *waits[pool]))
                assert version == sends.newest(edge, begins), (edge, i)


def run_dry(plan: Plan, seed: int, kindness: float) -> Outcome:
    """Runs a plan; fails where it does not end, or a row is not handed out once to each reader."""
    found = dry.Dry(plan, seed, kindness)
    prompts = plan.graph.rows[0]
    growing = ""
    for node in (n for n in plan.graph.verb("generate") if n.cuts):
        prompts = GenerateAttributes.of(node).under_way(prompts)
        growing = node.name
    iterations = plan.deploy.run.iterations
    adaptive = any(CallAttributes.of(n).adaptive for n in plan.graph.nodes)
    lacking = [i for i in range(iterations) if found.truth(Task("train", i, prompts)).rounds(prompts) is None]
    if adaptive:
        try:
            found.run(DATA)
        except RunError as error:
            number = int(str(error).partition("in iteration ")[2].partition(":")[0])
            truth = found.truth(Task("train", number, prompts))
            assert "raise `refill`" in str(error)
            assert truth.rounds(prompts, found.sizes[f"train/{number}"]) is None
            return Outcome("refill that does not suffice")
    elif lacking:
        with pytest.raises(RunError, match=f"in iteration {lacking[0]}: .*raise `refill`"):
            found.run(DATA)
        return Outcome("refill that does not suffice")
    else:
        found.run(DATA)
    sizes = [found.sizes[f"train/{i}"] for i in range(iterations)]
    assert adaptive or {*sizes} == {prompts}
    tasks = [Task("train", i, size, wanted=prompts) for i, size in enumerate(sizes)]
    for e in plan.deploy.evaluations:
        tasks += [
            Task(e.task, i, DATA, e.samples_of(plan.graph))
            for i in range(iterations + 1)
            if (e.task, i) in {_numbered(k) for k, _ in found.handed}
        ]
    for task in tasks:
        nodes = {i.node for s in plan.schedule if s.task == task.name for i in s.instructions if i.op == "RUN"} - {
            "source"
        }
        for name in nodes:
            reader = found.readers[name]
            shares = found.handed[task.key, name]
            if not UpdateAttributes.of(plan.graph.node(name)).due(task.number):
                assert not shares, (name, task.key)
                continue
            got = Counter(
                found.truth(task).key(reader.numbers(task), int(r), reader.rows) for _, s in shares for r in s.rows
            )
            assert got == expected(found, task, name), (name, task.key)
            for group in range(len(reader.group_warehouses)):
                assert [s.last for g, s in shares if g == group][-1], (name, task.key, group)
    in_order(plan, found)
    if plan.deploy.run.deterministic:
        as_old_as_may_be(plan, found)
    if growing:
        carried_on(plan, found, growing)
    goes_on = min(found.store.saved, default=iterations) < iterations
    if goes_on:
        resumed(plan, found, growing)
    several = ", rounds of several sizes" if len({*sizes}) > 1 else ""
    if not found.versions:
        how = "to its end, what was not whole in the next iteration" if growing else f"to its end{several}"
        return Outcome(how, resumed=goes_on)
    return Outcome(f"to its end, {found.oldest} versions behind{several}", iterations, found.oldest, goes_on)


def _numbered(key: str) -> tuple[str, int]:
    name, _, number = key.partition("/")
    return name, int(number)


def holds(text: str, folder: Path, seed: int, kindness: float) -> Outcome:
    """What became of a program; fails, with it, where it waits for ever."""
    made, _ = compiled(text, "a.rlg", folder)
    if made is None:
        return Outcome("refused")
    assert made.plan is not None
    if find_unsupported(made.plan):
        return Outcome("not yet")
    try:
        return run_dry(made.plan, seed, kindness)
    except (dry.Stuck, AssertionError) as error:
        raise AssertionError(f"{error}\n\nseed {seed}, kindness {kindness}, of\n{text}") from error
