"""Filters, repeats, refills and levels in the dock: which rows reach which node, in any order of arrival.

The rows that are expected are found row by row from what filters say of each; a controller's news come late, early and
twice.
"""

import itertools
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from truth import Truth

from msrl_graph import Fault, compile
from msrl_graph.diagnostics import ProgramWarning
from msrl_graph.runtime.data.numerics import sampled_columns
from msrl_graph.runtime.dock.controller import Controller
from msrl_graph.runtime.dock.messages import RowLocation, RowsReady
from msrl_graph.runtime.dock.readers import list_node_reads
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import RunError

EXAMPLE = ROOT / "examples" / "arithmetic"
HEAD = """
algorithm a {
  param prompts = 5
  columns { prompt : i32[<= 8]
            answer : text
            response : i32[<= 8]
            old_logp : f32[response]
            reward : f32
            advantage : f32[response]
            question : text
            verdict : i32[<= 4]
            vote : f32 per response }
  worker actor : policy
  worker judge : policy frozen { model = judge }
  worker host : function
  source(prompts) -> prompt, answer
"""
NODES = {
    "generate": "node actor.generate(prompt) -> response { samples = 3 }",
    "reward": "node host.reward(response, answer) -> reward { call = exact_match() }",
    "infer": "node actor.infer(prompt, response) -> old_logp",
    "advantage": 'node host.advantage(response, reward) -> advantage { call = "FILE:adv", per = prompt }',
    "update": (
        "node actor.update(prompt, response, old_logp, advantage) { loss = clip(), optimizer = adamw(lr = "
        "1e-6), mini_batch = 4 }"
    ),
}
TAIL = """
  actor.update => actor.generate
}
cluster c { device = "cpu", nodes = 2, devices_per_node = 1 }
deploy a on c { model policy = "tiny"
  model judge = "tiny"
  data source = "tiny.jsonl" { prompt = "problem", answer = "answer" }
  layout actor.update, actor.infer, actor.generate { dp = 2 }
  actor.generate -> actor.infer, host.reward { stream = 2 }
  run { iterations = 1 } }
"""
SPINE = "source -> actor.generate -> host.reward, actor.infer\n"
PROGRAMS = {
    "groups that are mixed, refilled": [
        "node host.keep(reward) { keep = mixed(), per = prompt, refill = 3 }",
        "source -> actor.generate -> host.reward -> host.keep -> actor.infer, host.advantage -> actor.update",
        "actor.generate -> actor.infer",
    ],
    "the best and worst of each group, then the batch drawn anew": [
        "node host.keep(reward) { select = best_worst(), per = prompt }",
        "node host.draw(reward) { select = resample(), per = batch }",
        SPINE + "host.reward -> host.keep -> host.draw -> host.advantage -> actor.update",
        "actor.infer -> actor.update",
    ],
    "single rows and groups, side by side": [
        "node host.keep(reward) { keep = reward > 0.5 }",
        "node host.draw(reward) { keep = mixed(), per = prompt }",
        SPINE + "host.reward -> host.keep, host.draw -> host.advantage -> actor.update",
        "actor.infer -> actor.update",
    ],
    "prompts, before anything is generated": [
        'node host.keep(answer) { select = "FILE:places" }',
        "node host.draw(reward) { keep = reward > 0.5, refill = 2 }",
        "source -> host.keep -> actor.generate -> host.reward -> host.draw -> host.advantage -> actor.update",
        "actor.generate -> actor.infer -> actor.update",
    ],
    "responses repeated, each judged, and judgements dropped": [
        "node host.keep(reward) { select = best_worst(), per = prompt }",
        'node host.ask(prompt, response, answer) -> question { call = "FILE:ask" }',
        "node judge.generate(question) -> verdict { samples = 2 }",
        'node host.draw(verdict) { keep = "FILE:good" }',
        'node host.vote(verdict) -> vote { call = "FILE:vote", per = response }',
        SPINE
        + (
            "host.reward -> host.keep -> host.ask -> judge.generate -> host.draw -> host.vote -> host.advantage -> "
            "actor.update"
        ),
        "actor.infer -> actor.update",
    ],
}
FUNCTIONS = """
def places(answer: str) -> list[int]: ...
def ask(prompt, response, answer): ...
def good(verdict) -> bool: ...
def vote(verdict): ...
def adv(response, reward): ...
"""


@cache
def planned(name, folder):
    text = HEAD + "\n".join([*NODES.values(), *PROGRAMS[name]]).replace("FILE", "judge.py") + TAIL
    (folder / "judge.py").write_text(FUNCTIONS)
    return compile(str(folder / "a.rlg"), text=text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("filters")


class Flow:
    """Every node of a plan, each group of its processes: takes shares as they come, and writes what they write."""

    def __init__(self, plan, truth, random, size=0):
        self.plan = plan
        self.truth = truth
        self.random = random
        self.task = Task("train", 7, size or plan.graph.rows[0], wanted=plan.graph.rows[0])
        self.readers = {r.node: r for r in list_node_reads(plan)}
        self.controllers = {n: Controller(r) for n, r in self.readers.items()}
        for c in self.controllers.values():
            assert not c.open(self.task)  # all of them read rows
        self.numbers = next(iter(self.readers.values())).numbers(self.task)
        self.news = []  # (node, column, rows, lengths)
        self.told = {n: [] for n in self.readers}
        self.kept = {n: [] for n in self.readers}  # what was decided by arrival
        self.taken = {(n, g): 0 for n, r in self.readers.items() for g in range(len(r.group_warehouses))}
        self.ended = dict.fromkeys(self.taken, 0)
        self.handed = {n: [] for n in self.readers}  # shares
        self.parts = {n: {} for n in self.readers}  # by round: its shares
        self.rounds = 0

    def write(self, column, rows, lengths):
        cells = list(zip(rows, lengths, strict=True))
        self.random.shuffle(cells)
        for node, reader in self.readers.items():
            if column in reader.needed_columns:
                cut = self.random.randint(0, len(cells))
                some = [cells[:cut], cells[cut:], cells[: self.random.randint(0, 2) // 2]]  # some are told twice
                self.news += [(node, column, part) for part in some if part]

    def source(self):
        rows = np.arange(self.rounds * self.task.prompts, (self.rounds + 1) * self.task.prompts)
        for column in self.plan.graph.node("source").writes:
            self.write(column, rows, np.ones(len(rows), int))
        self.rounds += 1

    def work(self, name, share):
        """What a process does with a share."""
        node = self.plan.graph.node(name)
        reader = self.readers[name]
        sets = self.truth.rows
        self.handed[name].append(share)
        if not len(share.rows):
            return
        for column in sampled_columns(self.plan.graph, node) if node.verb == "generate" else node.writes:
            if node.verb == "generate":
                fan = sets.sets[sets.columns[node.writes[0]]].fan
                rows = (share.rows[:, None] * fan + np.arange(fan)).reshape(-1)
            else:
                rows = np.unique(self.numbers.above(share.rows, reader.rows, sets.columns[column]))
            self.write(column, rows, rows % 5 + 1)
        if node.filters:
            times = [self.truth.verdict(name, self.truth.key(self.numbers, int(r), reader.rows)) for r in share.rows]
            self.write(sets.sieves[name].column, share.rows, np.array(times))

    def hear(self, node, column, part):
        rows, lengths = (np.array(x) for x in zip(*part, strict=True))
        self.told[node].append(RowsReady(column, rows, lengths, RowLocation(0, "some")))
        controller = self.controllers[node]
        if self.random.random() < 0.03:  # it dies, and another takes its place
            controller = self.controllers[node] = Controller(controller.reader)
            rounds = controller.restore(self.task, self.told[node], self.kept[node])
        else:
            rounds = controller.take_in_news(self.task.key, self.told[node][-1:])
        for r in rounds:
            self.kept[node] += [r] if controller.keeps else []
            controller.hand_out(self.task.key, r)

    def run(self):
        """Until nothing moves any more."""
        self.source()
        while True:
            acts = []
            for (name, group), index in self.taken.items():
                looping = self.readers[name].loops
                if self.ended[name, group] < (self.rounds if looping else 1):
                    shares = self.controllers[name].decided_shares(self.task.key, group)[index:]
                    acts += [(name, group, share) for share in shares[:1]]
            if self.news and (not acts or self.random.random() < 0.7):
                self.hear(*self.news.pop(self.random.randrange(len(self.news))))
            elif acts:
                name, group, share = self.random.choice(acts)
                self.parts[name].setdefault(self.taken[name, group], []).append(share)
                self.taken[name, group] += 1
                self.ended[name, group] += share.last
                self.work(name, share)
            elif (filter := self.truth.rows.refilling) and self.controllers[filter.node].needs_refill(
                self.task.key, self.rounds
            ):
                self.source()
            else:
                return


@pytest.mark.parametrize("name", PROGRAMS)
@given(
    seed=st.integers(0, 10**6),
    kindness=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    arrival=st.integers(0, 10**6),
    more=st.sampled_from([0, 0, 1, 2, 5]),
)
@examples(30)
def test_every_node_gets_the_rows_that_filters_leave(name, folder, seed, kindness, arrival, more):
    """With rounds of as many prompts as are to go on, and where a refill is adaptive of `more`."""
    plan = planned(name, folder)
    truth = Truth(plan, seed, kindness)
    count = plan.graph.rows[0]
    size = count + more if truth.rows.refilling else 0
    flow = Flow(plan, truth, random.Random(arrival), size)
    if truth.rounds(count, size) is None:
        with pytest.raises(RunError, match="raise `refill`"):
            flow.run()
        return
    flow.run()
    assert flow.rounds == truth.rounds(count, size)[0]
    for node, reader in flow.readers.items():
        shares = flow.handed[node]
        got = Counter(truth.key(flow.numbers, int(r), reader.rows) for s in shares for r in s.rows)
        assert got == Counter(truth.expected(node, count, size)), node
        assert all(
            flow.ended[node, g] == (flow.rounds if reader.loops else 1) for g in range(len(reader.group_warehouses))
        ), node
        for s in shares:  # a group is whole, and its rows are together
            above = (
                np.zeros(len(s.rows), int)
                if reader.whole_batch
                else flow.numbers.above(s.rows, reader.rows, reader.unit)
            )
            assert [len(list(g)) for _, g in itertools.groupby(above)] == [n for n in s.sizes if n]
            units = {u for u, n in zip(s.units, s.sizes, strict=True) if n}
            assert len(units) == sum(1 for _ in itertools.groupby(above))
        for parts in flow.parts[node].values():  # what each share tells of its round: rows and tokens of all groups
            rows = np.concatenate([s.rows for s in parts])
            elements = {}
            for r in reader.reads:
                above = flow.numbers.above(rows, reader.rows, r.rows)
                elements[r.column] = len(rows) if r.writer == "source" else int((above % 5 + 1).sum())
            told = (max(len(s.rows) for s in parts), len(rows), elements)
            assert len(parts) == len(reader.group_warehouses) and all(
                (s.largest_share_rows, s.round_rows, s.elements) == told for s in parts
            ), node
    assert all(
        c.describe_missing_rows(flow.task.key).startswith("nothing")
        for c in flow.controllers.values()
        if not c.reader.loops
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_mini_batches_are_the_same_in_any_order_of_arrival(name, folder):
    plan = planned(name, folder)
    found = []
    for seed in range(4):
        flow = Flow(plan, Truth(plan, 3, 0.9), random.Random(seed))
        flow.run()
        rounds = {}
        for share in flow.handed["actor.update"]:
            rounds.setdefault((share.epoch, share.round_rows, tuple(sorted(share.elements.items()))), []).extend(
                share.rows
            )
        found.append({k: sorted(v) for k, v in rounds.items()})
    assert found[0] and all(other == found[0] for other in found)


@pytest.mark.parametrize("per", ["problem", "prompt"])
def test_groups_of_rows_that_a_filter_keeps_are_whole(per, tmp_path):
    """Problems leave with all their solutions; of the solutions to a prompt some leave then."""
    import generations

    text = generations.PROGRAM.replace("RANKS", "1").replace("LAYOUT", "")
    old = """node host.advantage(solution, right, baseline) -> advantage { call = "generations.py:over" }"""
    assert old in text
    call = "group_norm(response = solution, reward = right)"
    text = text.replace(old, f"node host.advantage(solution, right) -> advantage {{ call = {call}, per = {per} }}")
    path = generations.program(tmp_path)
    (tmp_path / "model").symlink_to(EXAMPLE / "model")
    (tmp_path / "train.jsonl").symlink_to(EXAMPLE / "train.jsonl")
    if per == "prompt":
        with pytest.raises(Fault, match=r"needs whole groups, and `host\.posed` before it drops single rows"):
            compile(path, text=text)
    else:
        with pytest.warns(ProgramWarning, match="`baseline`"):  # which nobody reads any more
            compile(path, text=text)
