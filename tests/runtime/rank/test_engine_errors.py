"""Whether a rank's error may be of another process's death, so that the run goes on without it."""

import pytest
from stage import one_rank
from torch import distributed as dist

from msrl_graph.runtime.process.task_report import RankFailed
from msrl_graph.runtime.rank.context import RankContext
from msrl_graph.runtime.rank.engine_errors import report_engine_errors


def alone():
    raise RuntimeError("shapes differ")


def of_a_collective():
    dist.barrier()  # there is no process group


def in_another_thread():
    """What a thread that sends weights has met, as the thread that computes tells it."""
    try:
        of_a_collective()
    except ValueError as error:
        raise RuntimeError("version 6 of the weights was not sent") from error


def of_the_store():
    raise dist.DistNetworkError("Connection reset by peer")


def of_the_store_in_another_thread():
    try:
        of_the_store()
    except dist.DistError as error:
        raise RuntimeError("version 6 of the weights was not sent") from error


@pytest.mark.parametrize(
    ("fails", "joint"),
    [(alone, False), (in_another_thread, True), (of_the_store, True), (of_the_store_in_another_thread, True)],
)
def test_what_follows_from_a_collective_may_be_of_another_ones_death(fails, joint):
    plan = one_rank()
    node = plan.graph.node("actor.update")
    with pytest.raises(RankFailed) as found, report_engine_errors(RankContext(plan, 0), node, "in train/1"):
        fails()
    assert found.value.joint is joint
