"""Rows whose environment fails leave the iteration, alone or with their group; whatever stays is as if nothing had
happened beside it."""

import gc
import time

import numpy as np
import psutil
import pytest
from environment_stages import drawn, lists, tool
from failing_stages import begun, planned
from stage import Stage

from msrl_graph.runtime.functions.isolation import split_rows
from msrl_graph.runtime.metrics.row_failures import failures
from msrl_graph.runtime.process.processes import is_alive
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report, RunError

WAYS = {  # what an instance does, how its failure is counted, and what is told
    "raise ValueError('no')": ("raised", "turn 1: ValueError: no, at {path}:12"),
    "raise SystemExit(3)": ("raised", "turn 1: SystemExit: 3, at {path}:12"),
    "time.sleep(60)": ("timeout", "turn 1: TimeoutError: it took longer than its `timeout` of 8 s"),
    "raise TimeoutError('of a server')": ("raised", "turn 1: TimeoutError: of a server, at {path}:12"),
    "return 'x', 1.0": ("rubbish", "turn 1: BadResult: `step` returned tuple of 2, where a tuple of 4 belongs"),
    "__import__('os')._exit(3)": ("exited", "turn 1: it ended its process with status 3"),
    "__import__('os').abort()": ("exited", "turn 1: its process was killed by SIGABRT"),
    "__import__('os').kill(__import__('os').getpid(), 9)": ("memory", "turn 1: its process was killed by SIGKILL, as "),
    "bytearray(10**10)": ("memory", "turn 1: MemoryError: , at {path}:12"),
    "__import__('re').match('(a*)*b', 'a' * 40)": (  # C code that lets no other thread of its process run
        "timeout",
        "turn 1: TimeoutError: it took longer than its `timeout` of 8 s, and its process does not answer",
    ),
    "return 'x', lambda: 0, '', True": (
        "rubbish",
        "turn 1: BadResult: what `step` returned cannot leave its process: ",
    ),
    "return 'half \\ud83d', 1.0, '', True": (
        "rubbish",
        "turn 1: BadResult: it returned half a character (U+D83D), where text, messages or None belong",
    ),
    "return 'x', 1.0, 'half \\ud83d', True": (
        "rubbish",
        "the last turn: BadResult: it returned half a character (U+D83D) for `said`, where text belongs",
    ),
    "return 'x', 1 + 2j, '', True": (
        "rubbish",
        "the last turn: BadResult: it returned complex (1+2j) for `reward`, where f32 belongs",
    ),
    "return 'x', 'much', '', True": (
        "rubbish",
        "the last turn: BadResult: it returned str 'much' for `reward`, where f32 belongs",
    ),
}
BAD = "if self.answer == '181' and self.number < 50: {}"  # of the responses to the third prompt one


def stage(path, on_failure):
    return Stage(planned(path, on_failure))


# For a group only the set of dropped rows differs: one way for what ends a turn, a process and an episode, and text.
GROUPS = [way for way in WAYS if way.startswith(("raise V", "__import__('os')._", "return 'x', 'm", "return 'half"))]


@pytest.mark.parametrize(
    ("on_failure", "way"), [*(("drop_row", way) for way in WAYS), *(("drop_group", way) for way in GROUPS)]
)
def test_a_row_that_fails_leaves_and_the_others_are_what_they_were(way, on_failure, tmp_path):
    path = tool(tmp_path, step=BAD.format(way))
    failed = [4]  # of the third prompt's responses the one with a number below 50, by its generator
    gone = failed if on_failure == "drop_row" else [4, 5]
    reason, told = WAYS[way]
    alone = reason in ("raised", "rubbish") or "MemoryError" in told or told.endswith("`timeout`")
    episodes = begun(planned(path, on_failure))
    report = Report("rank")
    going = np.arange(8)
    assert [over for _, over in episodes.reset()] == [False] * 8
    for turn in (1, 2):
        said = episodes.step(going, [f"{i} in {turn}" for i in going], turn)
        late = failed if told.startswith("the last") else gone  # what no column holds is seen at the end of the episode
        assert [over for _, over in said] == [bool(i in late or (turn == 2 and i // 2 == 1)) for i in going]
        assert all(said[p][0].startswith("=6") for p, i in enumerate(going) if i not in gone)
        going = np.array([i for i in going if i not in late])
    stay = episodes.end({"response": np.full(8, 6)})
    assert np.flatnonzero(~stay).tolist() == gone
    assert len(episodes.columns()["reward"]) == len(episodes.columns()["said"]) == 8 - len(gone)
    verdicts = episodes.verdicts(report, "")["actor.generate.times"]
    assert verdicts.rows.tolist() == [*range(8)]
    assert verdicts.column.values.tolist() == stay.tolist()
    # What ends a process takes all rows that were in it, which under `drop_group` are those of the group.
    count = len(failed if alone else gone)
    assert report.sums["failed"] == report.sums[f"failed/{reason}"] == (count, 0)
    assert report.sums["kept/actor.generate"] == (8 - len(gone), 8)
    assert report.failed["actor.generate"][reason].startswith(f"row 4, {told.format(path=path)}")


@pytest.mark.parametrize("on_failure", ["drop_row", "drop_group"])
def test_responses_beside_one_that_fails_are_what_they_were(on_failure, alone, tmp_path):
    whole = drawn(stage(tool(tmp_path), on_failure))
    assert whole["actor.generate.times"].values.tolist() == [1] * 8
    here = stage(tool(tmp_path, step=BAD.format("__import__('os')._exit(3)")), on_failure)
    stay = np.array([r for r in range(8) if r != 4 and (r != 5 or on_failure == "drop_row")])
    written = drawn(here)
    assert written["actor.generate.times"].values.tolist() == [int(r in stay) for r in range(8)]
    for name in ("response", "mask", "said", "reward"):
        assert lists(written[name].take(np.arange(len(stay)))) == lists(whole[name].take(stay)), name
    sums = here.told.sums
    assert sums["reward"][1] == sums["turns"][1] == sums["response_length"][1] == len(stay)
    assert sums["response_tokens"] == (len(written["response"].values), 0)


def test_no_process_outlives_its_rows(tmp_path):
    """Not what it starts either, though it ignores being told to end."""
    step = "import subprocess; subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo $$ >> pids; sleep 300'], cwd=FOLDER)"
    path = tool(tmp_path, step=step.replace("FOLDER", repr(str(tmp_path))))
    episodes = begun(planned(path, "drop_row"))
    nest = episodes.environment.nest
    episodes.reset()
    processes = [p.pid for p in episodes.instances.processes]
    assert len(processes) == 8 and all(map(is_alive, processes))
    episodes.step(np.arange(8), ["1"] * 8, 1)
    while len(started := (tmp_path / "pids").read_text().split()) < 8:
        time.sleep(0.05)
    episodes.end({})
    assert not any(map(is_alive, processes))
    until = time.monotonic() + 10
    while any(map(is_alive, map(int, started))):  # whose parent is gone: the system ends them as it comes to it
        assert time.monotonic() < until
        time.sleep(0.05)
    episodes = nest = None  # and the one that forks them goes with its environment
    assert nest is None
    gc.collect()
    living = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    assert not [c for c in living if "fork_server" in " ".join(c.cmdline())]


def test_a_nest_that_somebody_kills_is_begun_again(tmp_path):
    episodes = begun(planned(tool(tmp_path), "drop_row"))
    episodes.environment.nest.process.kill()
    episodes.environment.nest.process.wait()
    assert [over for _, over in episodes.reset()] == [False] * 8
    episodes.step(np.arange(8), ["1"] * 8, 1)
    assert episodes.end({}).tolist() == [True] * 8


def test_a_file_that_cannot_be_imported_is_told_before_anything_is_generated(tmp_path):
    path = tool(tmp_path)
    plan = planned(path, "drop_row")
    path.write_text(path.read_text() + "\nraise ImportError('no such thing')\n")
    with pytest.raises(
        RunError, match=r"tool\.py \(line .*\) cannot be imported: ImportError: no such thing, at .*tool\.py:"
    ):
        begun(plan)


def test_rows_are_dealt_to_processes_such_that_groups_are_whole():
    assert split_rows(8, 1) == [range(i, i + 1) for i in range(8)]
    assert split_rows(8, 4) == [range(4), range(4, 8)]
    dealt = split_rows(600, 4)
    assert len(dealt) == 64 and [i for part in dealt for i in part] == [*range(600)]
    assert {len(part) for part in dealt} == {8, 12} and all(part.start % 4 == 0 for part in dealt)


def test_what_an_environment_says_first_and_no_response_holds_is_a_failure(alone, tmp_path):
    here = stage(tool(tmp_path, reset="if self.answer == '7': return '1' * 24"), "drop_group")
    assert drawn(here)["actor.generate.times"].values.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert here.told.sums["failed/rubbish"] == (2, 0)
    assert "the environment's first message has 24 tokens, but a response has room for 24" in str(here.told.failed)


def test_all_rows_may_fail_and_none_is_drawn_then(alone, tmp_path):
    here = stage(tool(tmp_path, reset="raise OSError('no such shop')"), "drop_row")
    written = drawn(here)
    assert written["actor.generate.times"].values.tolist() == [0] * 8
    assert all(len(written[name]) == 0 for name in ("response", "mask", "said", "reward"))
    assert "policy_tokens" in here.told.sums and here.told.sums["policy_tokens"][0] == 0
    with pytest.raises(RunError) as raised:
        failures(here.plan, Task("train", 3, 4, 2), [here.told])
    message = str(raised.value)
    assert "8 of 8 rows failed in iteration 3 (8 raised); nothing is left to train on\n  row 0, the beg" in message
    assert "OSError: no such shop" in message


def test_what_failed_is_told_of_all_ranks_together(alone, tmp_path):
    plan = stage(tool(tmp_path), "drop_row").plan
    reports = [Report("rank 0"), Report("rank 1"), Report("function")]
    for i, report in enumerate(reports[:2]):
        report.count("failed", i, 0)
        report.count("kept/actor.generate", 4 - i, 4)
    assert failures(plan, Task("train", 0, 4), reports[:1]) == []
    reports[1].count("failed/timeout", 1, 0)
    reports[1].failed["actor.generate"] = {"timeout": "row 7, turn 2: it hangs"}
    (told,) = failures(plan, Task("train", 5, 4), reports)
    place = plan.graph.node("actor.generate").span.place
    head = f"`actor.generate` ({place}): 1 of 8 rows failed in "
    assert told == f"{head}iteration 5 (1 timeout); 1 dropped, 7 remain\n  row 7, turn 2: it hangs"
    (told,) = failures(plan, Task("held_out", 5, 4), reports)
    assert told.startswith(
        f"{head}the evaluation of held_out after 5 iterations (1 timeout); its means are those of the "
    )
    assert "other 7" in told
