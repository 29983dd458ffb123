"""Collectives cannot hang and sum up the same, however the rows of a mini-batch fall on ranks and micro-batches: on
real ranks."""

import numpy as np
import pytest
import ranks
import torch
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from sample import examples
from stage import Stage, limit_micro_batch, one_rank, share
from torch import distributed as dist

from msrl_graph.runtime.data.columns import ColumnData
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import NodeBatch

ROWS = 8
TASK = Task("train", 3, 4)
STILL = ("lr = 2e-4", "lr = 0")  # so that every case meets the same weights


def sharing(rank, *changes):
    """A rank that scores and learns its share of a mini-batch: (log-probabilities by row, norm of the gradient on rank
    0)."""
    stage = Stage(one_rank(STILL, *changes), rank)
    columns = stage.sampled()
    drawn = columns["response.logp"]
    columns |= {"old_logp": drawn, "ref_logp": ColumnData(drawn.values - np.float32(0.1), drawn.offsets)}

    def act(shares, micro, option):
        mine = np.array(shares[rank], np.int64)
        whole = np.concatenate([np.array(s, np.int64) for s in shares])
        report = Report("")
        elements = {c: int(column.lengths[whole].sum()) for c, column in columns.items()}
        part = share(mine, max(map(len, shares)), len(whole), elements)
        logp = {}
        for name in ("actor.infer", "actor.update"):
            node = stage.plan.graph.node(name)
            limit_micro_batch(stage.plan, name, micro, option)
            taken = {c: columns[c].take(mine) for c in (*node.reads, "response.logp")} if len(mine) else {}
            parts = stage.roles[node.verb].compute(NodeBatch(node, TASK, Batch(part, mine, taken), report))
            for made in (piece for part in parts for piece in part.values()):
                logp |= {int(row): made.column[i].tolist() for i, row in enumerate(made.rows)}
        return logp, report.sums.get("grad_norm", (0.0, 0))[0]

    return act


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same on one rank, in this process."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield sharing(0)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 3])
def pair(request):
    where = ("devices_per_node = 1", "devices_per_node = 2"), ("actor.generate { dp = 1 }", "actor.generate { dp = 2 }")
    team = ranks.Team(
        2, sharing, *where, ("actor.update   { dp = 1 }", f"actor.update   {{ dp = 2, zero = {request.param} }}")
    )
    yield team
    team.close()


def test_a_share_of_no_prompts_generates_nothing(alone):
    stage = Stage(one_rank())
    none = np.zeros(0, np.int64)
    batch = Batch(share(none, 1, 1, {"prompt": 6}), none, {})
    assert not [*stage.generation.compute(NodeBatch(stage.plan.graph.node("actor.generate"), TASK, batch, stage.told))]


# Which rank gets each row; None: another mini-batch has it.
PLACES = st.lists(st.sampled_from([0, 1, None]), min_size=ROWS, max_size=ROWS).filter(
    lambda places: any(p is not None for p in places)
)

# At most so many rows, or tokens.
LIMITS = st.tuples(st.integers(0, ROWS + 1), st.just("micro_batch")) | st.tuples(
    st.integers(1, 60), st.just("micro_batch_tokens")
)


@pytest.mark.slow
@example([0] * ROWS, (3, "micro_batch"))
@example([None] * 4 + [0, 1, 1, 1], (3, "micro_batch"))
@example([1] * ROWS, (0, "micro_batch"))
@example([None] * (ROWS - 1) + [1], (5, "micro_batch"))
@example([0] * ROWS, (20, "micro_batch_tokens"))
@example([0, 0, 0, 0, 0, 1, 1, 1], (1, "micro_batch_tokens"))
@given(PLACES, LIMITS)
@examples(25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_no_share_hangs_or_changes_the_gradient(alone, pair, places, limit):
    shares = [[row for row, place in enumerate(places) if place == rank] for rank in range(2)]
    logp, norm = alone([shares[0] + shares[1]], 0, "micro_batch")
    (first, told), (second, untold) = pair.ask(shares, *limit)
    assert (first.keys(), second.keys()) == tuple(dict.fromkeys(s).keys() for s in shares) and untold == 0
    for row, values in logp.items():
        assert (first | second)[row] == pytest.approx(values, abs=1e-5)
    # Rows whose gradients nearly cancel leave what rounding makes of gradients that are thousands of times larger.
    assert norm > 0 and told == pytest.approx(norm, rel=1e-5, abs=1e-5)
