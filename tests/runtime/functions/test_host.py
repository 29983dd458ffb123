"""Function hosts: calls in their order whoever dies when, and what a process leaves for the one that takes its
place."""

import subprocess
import sys
import textwrap
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.runtime.driver.function_hosts import FunctionHosts


class Gone(Exception):
    """What Ray would raise for a call of a process that died."""


class Process:
    """A process that does one call after the other, those of one that died no more."""

    def __init__(self, world, again):
        self.world = world
        self.again = again
        self.queue = deque()
        self.dead = False

    def __getattr__(self, method):
        return self if method == "run" else super().__getattribute__(method)

    def remote(self, task):
        self.world.calls += 1
        reference = self.world.calls
        if self.dead:
            self.world.ended[reference] = Gone()
        else:
            self.queue.append((reference, task))
        return reference

    def step(self):
        """Does a task. It waits for ever for rows of an earlier one that was never done."""
        reference, task = self.queue[0]
        if all(earlier in self.world.done for earlier in range(task)):
            self.queue.popleft()
            self.world.done.append(task)
            self.world.ended[reference] = None

    def die(self):
        self.dead = True
        self.world.ended |= {reference: Gone() for reference, _ in self.queue}
        self.queue.clear()


class World:
    def __init__(self, restarts=1000, hosts=1):
        self.calls = 0
        self.ended = {}
        self.done = []
        self.processes = []
        self.hosts = FunctionHosts(
            hosts, restarts, self.start, lambda asked: {r: self.ended[r] for r in asked if r in self.ended}
        )

    def start(self, host, lane, again):
        self.processes.append(Process(self, again))
        return self.processes[-1]


@given(st.lists(st.sampled_from(["ask", "step", "die", "mend"]), max_size=60))
@examples(300)
def test_whenever_a_process_dies_tasks_are_done_in_their_order(events):
    """Each task needs those before it, as an iteration's rows need the last one's weights: one before its turn would
    wait for ever."""
    world = World()
    asked = []
    for event in events:
        if event == "ask":
            asked.append(world.hosts.ask(0, "run", len(asked)))
        elif event == "step" and world.processes[-1].queue:
            world.processes[-1].step()
        elif event == "die":
            world.processes[-1].die()
        elif event == "mend":
            world.hosts.replace_dead()
    world.hosts.replace_dead()
    while world.processes[-1].queue:
        left = len(world.processes[-1].queue)
        world.processes[-1].step()
        assert len(world.processes[-1].queue) < left, "a task stands before its turn"
    world.hosts.replace_dead()
    assert sorted(set(world.done)) == list(range(len(asked)))
    assert all(world.ended[call.reference] is None for call in asked)
    assert [p.again for p in world.processes] == [False] + [True] * (len(world.processes) - 1)
    assert world.hosts.open_calls == [[]]


def test_a_process_that_died_once_too_often_is_told_and_only_its_own_calls_are_made_again():
    world = World(restarts=1, hosts=2)
    other = world.hosts.ask(0, "run", 0)
    mine = world.hosts.ask(1, "run", 0)
    kept = other.reference
    world.processes[1].die()
    assert world.hosts.replace_dead() == ["functions of host 1"] and other.reference == kept and mine.reference == 3
    world.processes[2].die()
    with pytest.raises(Gone):
        world.hosts.replace_dead()


CHILD = "(os.waitpid(pid, 0), os.kill(os.getpid(), 9)) if (pid := os.fork()) else {}"


def left(folder, *deaths):
    """What the last of some processes says, each in the place of the one before, that make the calls `a` and `b`, and
    die in `b`."""
    script = """
        import ctypes, os, pathlib, signal, sys
        from msrl_graph.runtime.functions.crash_journal import CrashJournal, ProcessDied
        note = CrashJournal(pathlib.Path("note"), again=bool(int(sys.argv[1])))
        with note.record_call("a"):
            pass
        try:
            with note.record_call("b"):
                {}
        except ProcessDied as died:
            print(died, *(f"{{f.name}} {{f.lineno}}" for f in died.frames[-1:]), sep=" | ")
    """
    for i, death in enumerate(deaths):
        code = textwrap.dedent(script).format(death)
        done = subprocess.run(
            [sys.executable, "-c", code, str(int(i > 0))], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode or i + 1 == len(deaths), done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("deaths", "said"),
    [
        (["ctypes.string_at(0)", "pass"], "it ended its process: Segmentation fault | string_at "),
        (["os.abort()", "pass"], "it ended its process: Aborted | <module> 9"),
        (["os._exit(3)", "pass"], "it ended its process with status 3"),
        (["os.kill(os.getpid(), 9)", "pass"], ""),  # once may be anybody's doing
        (
            ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 9)", "pass"],
            "its process was killed in it 2 times",
        ),
        (["os.kill(os.getpid(), 9)", "sys.exit(1)", "pass"], ""),  # it was well the second time
        ([CHILD.format("os._exit(1)"), "pass"], ""),  # a function's own children end as they like
        ([CHILD.format("os.abort()"), "pass"], ""),
    ],
)
def test_a_call_that_ends_its_process_is_not_made_again(tmp_path, deaths, said):
    found = left(tmp_path, *deaths)
    assert found.startswith(said) and bool(found) == bool(said)
