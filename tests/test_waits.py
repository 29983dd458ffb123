"""Processes that wait for an answer of the dock's controllers, on Ray: however many there are, and whoever was answered before."""

import numpy as np
import pytest
from test_dock import reader

from msrl_graph.ir.rowsets import Sieve
from msrl_graph.runtime.dock.actors import ControllerHost, DockTimeout
from msrl_graph.runtime.process.task import Task

pytestmark = pytest.mark.slow
TASK = Task("train", 0, 2)


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield ray
    ray.shutdown()


def board(ray, deadline):
    """The controllers of a host: of a filter that may ask three times for two more prompts with four responses each."""
    made = ControllerHost.remote([reader(node="filter", refilling=Sieve("filter", 1, 1, 3), loops=True)], deadline, "near", [])
    ray.get(made.open.remote(TASK))
    return made


def verdicts(made, round, times):
    rows = np.arange(8 * round, 8 * round + 8)
    return made.heard.remote(TASK.key, 0, {"filter.times": (rows, np.full(8, times))})


def test_news_get_past_more_waits_than_a_cluster_has_processes(ray):
    made = board(ray, 60.0)
    asked = [made.again.remote("filter", TASK.key, 1) for _ in range(3000)]
    ray.get(verdicts(made, 0, 0), timeout=30)
    assert all(ray.get(asked, timeout=30))


def test_a_wait_is_told_though_another_process_was_answered_about_an_earlier_round(ray):
    made = board(ray, 3.0)
    late = made.again.remote("filter", TASK.key, 2)
    ray.get(verdicts(made, 0, 0))
    assert ray.get(made.again.remote("filter", TASK.key, 1))
    with pytest.raises(DockTimeout, match=r"`filter` has waited \d s in train/0 for .*and for 3 s no row has moved"):
        ray.get(late)
