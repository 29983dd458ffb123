"""Neither micro-batches nor how rows and weights fall on ranks change what infers and updates of any kind give: on real
ranks."""

from functools import cache

import numpy as np
import pytest
import ranks
import torch
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from sample import examples
from stage import limit_micro_batch, share
from tiny import PAIRS, ROLLOUT, SCORES, built, scoring, staged
from torch import distributed as dist

from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import NodeBatch

ROWS = 8
# The limit of a micro-batch: its rows, or its tokens.
ROW_LIMITS = [(rows, "micro_batch") for rows in range(ROWS + 2)]
TOKEN_LIMITS = [(tokens, "micro_batch_tokens") for tokens in (1, 14, 31)]
ALL = ROW_LIMITS[0]
TASK = Task("train", 3, 4, {"actor.generate": 2})
STILL = ("adamw(lr = 1e-3)", "adamw(lr = 0)")  # so that every case meets the same weights
BY_ROWS = ("optimizer", "reduce = sequences, optimizer")
# Terms of the whole mini-batch, beside others: one token has the largest covariance, and of several that may one is
# drawn.
WHOLE = ("clip(0.2, ratio = sequence)", "kl_cov(0.05) + clip_cov(share = 0.1, least = 0)")
# The numbers of a reward model, next to its update.
INFERRED = (
    ("  }\n", "    better : f32[chosen]\n    worse : f32[rejected]\n  }\n"),
    ("node", "node judge.infer(prompt, chosen, rejected) -> better, worse\n  node"),
    ("source ->", "source -> judge.infer\n  source ->"),
)
PROGRAMS = {
    "rollout": (ROLLOUT, STILL),
    "sequences": (ROLLOUT, STILL, BY_ROWS),
    "whole": (ROLLOUT, STILL, WHOLE),
    "pairs": (PAIRS, STILL),
    "scores": (SCORES, STILL, *INFERRED),
}
TRAINED = dict.fromkeys(PROGRAMS, ("actor.update", "critic.update")) | {
    "pairs": ("actor.update",),
    "scores": ("judge.update",),
}
FROZEN = dict.fromkeys(PROGRAMS, ("teacher.infer", "judge.infer")) | {"pairs": ("reference.infer",), "scores": ()}


def laid(program, layout):
    """The same layout for all that infers and updates."""
    return f"layout {', '.join(TRAINED[program] + FROZEN[program])} {{ {layout} }}"


def working(rank, judge):
    """A rank that infers and learns its share of eight rows: by column what it wrote, and sums of metrics."""

    @cache
    def stage(program, layout):
        text, *changes = PROGRAMS[program]
        return staged(text, *changes, rank=rank, ranks=dist.get_world_size(), judge=judge, more=laid(program, layout))

    def act(program, layout, columns, shares, limit):
        here = stage(program, layout)
        report = Report("")
        written = {}
        whole = np.concatenate([np.array(s, np.int64) for s in shares])
        placement = here.plan.placement(TRAINED[program][0])
        mine = np.array(shares[placement.layout.coordinates(rank).dp], np.int64)
        elements = {c: int(column.lengths[whole].sum()) for c, column in columns.items()}
        part = share(mine, max(map(len, shares)), len(whole), elements)
        for node in (n for n in here.plan.graph.nodes if n.verb in ("infer", "update")):
            limit_micro_batch(here.plan, node.name, *limit)
            taken = {c: columns[c].take(mine) for c in node.reads} if len(mine) else {}
            parts = here.roles[node.verb].compute(NodeBatch(node, TASK, Batch(part, mine, taken), report))
            for name, made in (item for part in parts for item in part.items()):
                written |= {(name, int(row)): np.asarray(made.column[i]) for i, row in enumerate(made.rows)}
        return written, report.sums

    return act


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return str(scoring(tmp_path_factory.mktemp("judge") / "model"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, judge):
    """The same on one rank, in this process; and the columns of each program."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    columns = {program: built(*how, judge=judge)[1] for program, how in PROGRAMS.items()}
    yield working(0, judge), columns
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(judge):
    team = ranks.Team(2, working, judge)
    yield team
    team.close()


def check(alone, answers, program, shares):
    act, columns = alone
    expected, sums = act(program, "dp = 1", columns[program], [[row for share in shares for row in share]], ALL)
    found = {key: value for written, _ in answers for key, value in written.items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.allclose(found[key], value, rtol=1e-4, atol=1e-5), key
    totals = {name: sum(told[name][0] for _, told in answers if name in told) for name in sums}
    for name, (value, weight) in sums.items():
        # Rows whose gradients nearly cancel leave what rounding makes of gradients that are thousands of times larger;
        # of a sum over tokens the mean is what is told.
        assert totals[name] == pytest.approx(value, rel=1e-5, abs=1e-5 * max(1, weight)), name


# Which data-parallel group gets each row; None: another mini-batch has it.
PLACES = st.lists(st.sampled_from([0, 1, None]), min_size=ROWS, max_size=ROWS).filter(
    lambda places: any(p is not None for p in places)
)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("limit", [*ROW_LIMITS[1:4:2], *TOKEN_LIMITS], ids=str)
def test_micro_batches_change_nothing(alone, program, limit):
    act, columns = alone
    answer = act(program, "dp = 1", columns[program], [list(range(ROWS))], limit)
    check(alone, [answer], program, [list(range(ROWS))])


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@example(1, [0] * ROWS, ROW_LIMITS[3])
@example(3, [None] * 4 + [0, 1, 1, 1], ROW_LIMITS[3])
@example(3, [None] * 4 + [0, 1, 1, 1], TOKEN_LIMITS[0])
@example(0, [0] + [1] * (ROWS - 1), TOKEN_LIMITS[1])  # alone, the ranks would pack into different numbers
@example(3, [1] * ROWS, ALL)
@example(0, [0] + [None] * (ROWS - 1), ROW_LIMITS[5])  # the row that the mask leaves nothing of
@given(st.integers(0, 3), PLACES, st.sampled_from(ROW_LIMITS + TOKEN_LIMITS))
@examples(6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_no_share_changes_loss_or_gradient(alone, pair, program, zero, places, limit):
    shares = [[row for row, place in enumerate(places) if place == rank] for rank in range(2)]
    answers = pair.ask(program, f"dp = 2, zero = {zero}", alone[1][program], shares, limit)
    check(alone, answers, program, shares)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("layout", ["tp = 2", "cp = 2", "cp = 2, cp_kind = ulysses"])
@pytest.mark.parametrize("limit", [ROW_LIMITS[3], TOKEN_LIMITS[1]], ids=str)
def test_dividing_tensors_or_sequences_changes_nothing(alone, pair, program, layout, limit):
    shares = [list(range(ROWS))]
    answers = pair.ask(program, layout, alone[1][program], shares, limit)
    assert answers[0][1].keys() - {"loss"} >= answers[1][1].keys() - {"loss"}
    check(alone, answers[:1], program, shares)
