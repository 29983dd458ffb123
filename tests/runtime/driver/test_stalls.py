"""What stands still in a run: bytes and rows decide, each fate is told once, and the user's code is told from ours."""

import os
import signal

import pytest
from folders import ROOT

from msrl_graph import compile
from msrl_graph.runtime.dock.messages import CurrentActivity, Status, Wait
from msrl_graph.runtime.driver import stalls
from msrl_graph.runtime.driver.signals import Signals
from msrl_graph.runtime.driver.stalls import DeathReports, StallClock, processes_in_user_code
from msrl_graph.runtime.process import heartbeat
from msrl_graph.runtime.process.heartbeat import RATE

EXAMPLE = ROOT / "examples" / "arithmetic" / "grpo.rlg"


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])
    return now


def status(moves=0, moved=0, **more):
    return Status("", moves, more.pop("waits", ()), more.pop("doing", {}), None, more.pop("ended", {}), moved)


def test_a_disk_that_moves_is_waited_for_and_one_that_does_not_is_not(clock):
    """For an hour, however slow, as long as it is faster than what processes write of themselves."""
    disk = StallClock(disk=True)
    rows = StallClock(disk=False)
    moved = 0
    for still in (disk, rows):
        still.hear([status()])
    for _ in range(720):
        clock[0] += 5
        moved += 6 * RATE
        for still in (disk, rows):
            still.hear([status(moved=moved)])
    assert disk.seconds() == 0 and rows.seconds() == 3600
    for _ in range(12):
        clock[0] += 5
        moved += RATE
        disk.hear([status(moved=moved)])
    assert disk.seconds() == 60 and disk.seconds(since=clock[0] - 20) == 20
    rows.hear([status(moves=1)])
    assert rows.seconds() == 0


def test_each_fate_is_told_once(tmp_path):
    home = tmp_path / heartbeat.FOLDER
    home.mkdir()
    (home / f"{heartbeat.NOTE}12").write_text("rank 0\nrank 0 does not move; killed")
    fates = DeathReports(str(tmp_path))
    fates.hear([status(ended={7: ("functions of host 1", "why")}), status(ended={12: ("dock of host 1", "other")})])
    assert fates.take_reasons(["rank 0", "rank 1"]) == {"rank 0": "rank 0 does not move; killed"}
    assert fates.take_reasons_by_prefix("dock", "a process of") == {"dock of host 1": "other"}
    fates.hear([])
    assert fates.take_reasons(["rank 0", "dock of host 1"]) == {}
    (home / f"{heartbeat.NOTE}13").write_text("rank 0\nagain")
    fates.hear([])
    assert fates.take_reasons(["rank 0"]) == {"rank 0": "again"}


def test_who_is_in_the_users_code_and_who_waits():
    plan = compile(EXAMPLE)
    doing = {
        "functions of host 0": CurrentActivity("host.reward in train/3", 9.0),
        "rank 0": CurrentActivity("RUN actor.infer in train/3", 9.0),
    }
    everybody = {"functions of host 0", "rank 0"}
    waits = (Wait("`host.reward` (group 0)", "train/3", 9.0, "rows"),)
    assert processes_in_user_code(plan, [status(doing=doing)], everybody) == ["functions of host 0"]
    assert processes_in_user_code(plan, [status(doing=doing, waits=waits)], everybody) == []
    assert (
        processes_in_user_code(plan, [status(doing=doing)], {"rank 0"}) == []
    )  # it has ended its task, and told of nothing else


def test_a_signal_is_answered_while_a_checkpoint_is_written():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        said = []
        signals = Signals(said.append)
        signals.training = signals.saving = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == ["ending when the checkpoint is written; repeat the signal to end at once"]
        signals.since -= 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
