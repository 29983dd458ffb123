"""Processes that wait for an answer of the dock's controllers, on Ray: however many there are, and whoever was answered
before."""

import inspect
import os
import sys
import time
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from dock_readers import reader

from msrl_graph.analysis.rowsets import Sieve
from msrl_graph.runtime.dock import controller
from msrl_graph.runtime.dock.controller import ControllerRequest, RefillRequest
from msrl_graph.runtime.dock.host import DockHost
from msrl_graph.runtime.dock.messages import DockAddress, DockFull, DockTimeout, Member, RowLocation, RowsReady
from msrl_graph.runtime.dock.methods import DOCK_METHODS
from msrl_graph.runtime.dock.segments import Activity, Room
from msrl_graph.runtime.process.run_key import new_key
from msrl_graph.runtime.process.task import Task

pytestmark = pytest.mark.slow
TASK = Task("train", 0, 2)
PLACE = RowLocation(0, "some")


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield ray
    ray.shutdown()


def controllers(ray, deadline, capacity=0):
    """The controllers of a host: of a filter that may ask three times for two more prompts with four responses each."""
    (made,) = docks(ray, 1, deadline, capacity)
    return made


def docks(ray, hosts, deadline, capacity=0):
    """As `controllers`, of several hosts, the first of which has the controllers."""
    found = reader(node="filter", refilling=Sieve("filter", 1, 1, 3), loops=True)
    hears = frozenset(found.needed_columns)
    members = [Member(f"dock {host}", host, host, hears if host == 0 else frozenset()) for host in range(hosts)]
    way = DockAddress({}, [], [], new_key() if hosts > 1 else b"", b"", capacity)
    made = []
    for host, member in enumerate(members):
        of = (members, host, [found] if host == 0 else [], deadline, way, f"msrl-test-{os.getpid()}-{host}", 0)
        made.append(DockHost.options(name=member.name).remote(*of))
    ray.get([dock.open.remote(TASK) for dock in made])
    return made


@dataclass(frozen=True)
class Rows(ControllerRequest[int]):
    """How many rows of a column have come, once there are so many: what a controller was never asked before."""

    column: str
    least: int

    def answer(self, controller):
        count = int((controller.states[self.key].progress.where[self.column].get(np.arange(16)) >= 0).sum())
        return count if count >= self.least else None


def verdicts(made, round, times):
    rows = np.arange(8 * round, 8 * round + 8)
    return made.heard.remote(TASK.key, [RowsReady("filter.times", rows, np.full(8, times), PLACE, verdicts=True)])


def responses(made, prompt):
    """News by which nothing is decided."""
    rows = np.arange(4 * prompt, 4 * prompt + 4)
    return made.heard.remote(TASK.key, [RowsReady("response", rows, np.ones(4, int), PLACE)])


def test_news_get_past_more_waits_than_a_cluster_has_processes(ray):
    made = controllers(ray, 60.0)
    asked = [made.ask.remote(RefillRequest("filter", TASK.key, 1)) for _ in range(3000)]
    ray.get(verdicts(made, 0, 0), timeout=30)
    assert all(ray.get(asked, timeout=30))


def test_a_wait_is_told_though_another_process_was_answered_about_an_earlier_round(ray):
    made = controllers(ray, 3.0)
    late = made.ask.remote(RefillRequest("filter", TASK.key, 2))
    ray.get(verdicts(made, 0, 0))
    assert ray.get(made.ask.remote(RefillRequest("filter", TASK.key, 1)))
    with pytest.raises(DockTimeout, match=r"`filter` has waited \d s in train/0 for .*and for 3 s no row has moved"):
        ray.get(late)


def test_a_row_that_is_computed_on_another_host_moves(ray):
    """Whoever waits does so for as long as rows are done, though none is written, and hears then how far it came."""
    made, other = docks(ray, 2, 3.0)
    activity = Activity(Room(Path(ray.get(other.folder.remote()))), "functions of host 1")
    activity.set_activity("host.reward in train/0")
    late = made.ask.remote(RefillRequest("filter", TASK.key, 1))
    begin = time.monotonic()
    moves = ray.get(other.status.remote()).moves
    for row in range(8):
        time.sleep(0.75)
        activity.set_computed_rows(row, 24)
    assert not ray.wait([late], timeout=0)[0] and ray.get(other.status.remote()).moves == moves + 7
    where = (
        r"and for 3 s no row has moved\n  functions of host 1 in host\.reward in train/0: 7 of 24 rows are done, the "
    )
    fix = r"last \d s ago\n  if a row may take that long, raise the deadline: `dock \{ deadline = 6 s \}`"
    with pytest.raises(DockTimeout, match=where + fix):
        ray.get(late)
    assert time.monotonic() - begin > 8.5


def test_a_question_of_ones_own_is_passed_on_and_waits_like_those_that_there_are(ray):
    """Whoever adds one writes its class, and asks it."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = controllers(ray, 60.0)
    asked = made.ask.remote(Rows("filter", TASK.key, "response", 5))
    ray.get(responses(made, 0))
    status = ray.get(made.status.remote())
    assert [w.who for w in status.waits] == ["`filter`"] and status.moves == 1
    ray.get(responses(made, 1))
    assert ray.get(asked, timeout=30) == 8


def test_who_waits_for_a_place_that_nobody_leaves_is_told(ray):
    """At once where nothing ends before; else at the deadline, as of devices that are ahead of themselves."""
    made = controllers(ray, 2.0, 100)
    ahead = Task("train", 1, 2)
    ray.get(made.open.remote(ahead))
    assert ray.get(made.place.remote(TASK.key, "source", "a.0", 100, True)) == 0
    full = "has 1 more bytes of rows in train/{}, and the dock's `capacity` of 100 bytes is full on every host"
    with pytest.raises(DockFull, match=full.format(0)):
        ray.get(made.place.remote(TASK.key, "source", "b.0", 1, True), timeout=30)
    with pytest.raises(DockTimeout, match=full.format(1) + "; no task has ended within 2 s"):
        ray.get(made.place.remote(ahead.key, "source", "c.0", 1, True), timeout=30)


def test_what_others_call_is_what_a_dock_has():
    served = DockHost.__ray_metadata__.modified_class
    for name, method in DOCK_METHODS.methods.items():
        taken = [*inspect.signature(getattr(served, method.name)).parameters][1:]
        parameters = [parameter for parameter in taken if not parameter.startswith("_ray")]  # Ray adds one
        assert len(typing.get_args(method.arguments)) == len(parameters), name
    questions = [
        kind for kind in vars(controller).values() if inspect.isclass(kind) and issubclass(kind, ControllerRequest)
    ]
    assert {kind.__name__ for kind in questions if not inspect.isabstract(kind)} <= DOCK_METHODS.methods.keys()
