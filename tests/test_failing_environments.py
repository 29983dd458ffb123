"""Rows whose environment fails leave the iteration, alone or with their group; whatever stays is as if nothing had
happened beside it."""

import numpy as np
import pytest
from stage import Stage
from test_environments import alone, drawn, lists, program, tool

from msrl_graph.runtime.metrics.failures import failures
from msrl_graph.runtime.process.report import Report, RunError
from msrl_graph.runtime.process.task import Task

__all__ = ["alone"]
WAYS = {  # what an instance does, how its failure is counted, and what is told
    "raise ValueError('no')": ("raised", "turn 1: ValueError: no, at {path}:12"),
    "raise SystemExit(3)": ("raised", "turn 1: SystemExit: 3, at {path}:12"),
    "time.sleep(3)": ("timeout", "turn 1: TimeoutError: it takes longer than 1 s, its `timeout`"),
    "raise TimeoutError('of a server')": ("raised", "turn 1: TimeoutError: of a server, at {path}:12"),
    "return 'x', 1.0": ("rubbish", "turn 1: BadResult: `step` returned tuple of 2, where a tuple of 4 belongs"),
    "__import__('os')._exit(3)": ("exited", "turn 1: it ended its process with status 3"),
    "__import__('os').abort()": ("exited", "turn 1: its process was ended by SIGABRT"),
    "__import__('os').kill(__import__('os').getpid(), 9)": ("memory", "turn 1: its process was ended by SIGKILL, as "),
    "bytearray(10**10)": ("memory", "turn 1: MemoryError: , at {path}:12"),
    "__import__('re').match('(a*)*b', 'a' * 40)": (  # C code that lets no other thread of its process run
        "timeout",
        "turn 1: TimeoutError: it takes longer than 1 s, its `timeout`, and its process does not answer",
    ),
    "return 'x', lambda: 0, '', True": (
        "rubbish",
        "turn 1: BadResult: what `step` returned cannot leave its process: ",
    ),
    "return 'x', 'much', '', True": (
        "rubbish",
        "the last turn: BadResult: it returned str 'much' for `reward`, where f32 belongs",
    ),
}
BAD = "if self.answer == '181' and self.number % 2: {}"  # of the responses to the third prompt some


def stage(path, on_failure, *changes):
    """`drop_row` breaks groups: there advantages are each row's own."""
    (path.parent / "own.py").write_text("def own(response, reward): ...")
    rows = ("call = group_norm(), per = prompt", f'call = "{path.parent}/own.py:own"')
    changes = (*changes, rows) if on_failure == "drop_row" else changes
    return Stage(program(path, *changes, more=f"timeout = 1 s, on_failure = {on_failure},"))


def odd(path):
    """The rows whose environment fails in BAD: those to the third prompt with an odd number, by its generator."""
    from zlib import crc32

    from msrl_graph import noise

    numbers = {r: noise.generator(0, 3, crc32(b"actor.generate"), r).integers(100) for r in (4, 5)}
    return [r for r, n in numbers.items() if n % 2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_failure", ["drop_row", "drop_group"])
def test_a_row_that_fails_leaves_and_the_others_are_what_they_were(way, on_failure, alone, tmp_path):
    path = tool(tmp_path, step="pass")
    whole = drawn(stage(path, on_failure))
    assert whole["actor.generate.times"].values.tolist() == [1] * 8
    path = tool(tmp_path, step=BAD.format(way))
    failed = odd(path)
    assert len(failed) == 1  # so that both ways of dropping differ
    gone = failed if on_failure == "drop_row" else [4, 5]
    stay = np.array([r for r in range(8) if r not in gone])
    here = stage(path, on_failure)
    written = drawn(here)
    assert written["actor.generate.times"].values.tolist() == [int(r in stay) for r in range(8)]
    for name in ("response", "mask", "said", "reward"):
        assert lists(written[name]) == lists(whole[name].take(stay)), name
    reason, told = WAYS[way]
    sums = here.told.sums
    # Of what harms a process all rows have failed that were in it: under `drop_group` those of the group.
    count = len(gone if reason in ("exited", "memory") or "does not answer" in WAYS[way][1] else failed)
    assert sums["failed"] == sums[f"failed/{reason}"] == (count if "MemoryError" not in WAYS[way][1] else 1, 0)
    assert sums["kept/actor.generate"] == (len(stay), 8)
    assert sums["reward"][1] == sums["turns"][1] == len(stay)
    words = here.told.failed["actor.generate"]
    assert any(w.startswith(f"row {failed[0]}, {told.format(path=path)}") for w in words)


def test_what_an_environment_says_first_and_no_response_holds_is_a_failure(alone, tmp_path):
    here = stage(tool(tmp_path, reset="if self.answer == '7': return '1' * 24"), "drop_group")
    assert drawn(here)["actor.generate.times"].values.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert here.told.sums["failed/rubbish"] == (2, 0)
    assert "what the environment says first takes 24 tokens, and a response holds 24" in str(here.told.failed)


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
    assert "OSError: no such shop" in message and message.endswith("…")


def test_what_failed_is_told_of_all_ranks_together(alone, tmp_path):
    plan, reports = stage(tool(tmp_path), "drop_row").plan, [Report("rank 0"), Report("rank 1"), Report("function")]
    for i, report in enumerate(reports[:2]):
        report.count("failed", i, 0)
        report.count("kept/actor.generate", 4 - i, 4)
    assert failures(plan, Task("train", 0, 4), reports[:1]) == []
    reports[1].count("failed/timeout", 1, 0)
    reports[1].failed["actor.generate"] = ["row 7, turn 2: it hangs"]
    (told,) = failures(plan, Task("train", 5, 4), reports)
    place = plan.graph.node("actor.generate").span.place
    head = f"`actor.generate` ({place}): 1 of 8 rows failed in "
    assert told == f"{head}iteration 5 (1 timeout); 1 left it and 7 stay\n  row 7, turn 2: it hangs"
    (told,) = failures(plan, Task("held_out", 5, 4), reports)
    assert told.startswith(
        f"{head}the evaluation of held_out after 5 iterations (1 timeout); its means are those of the "
    )
    assert "other 7" in told
