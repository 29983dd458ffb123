"""What a run tells of its resharding edges: each beside its own prediction, whoever else moves weights in the same
iteration."""

import io
import json
import tracemalloc

import pytest
from folders import ROOT
from rich.console import Console
from stage import Stage, one_rank

from msrl_graph import compile
from msrl_graph.analysis.async_schedule import Sends
from msrl_graph.cost import transfers as costs
from msrl_graph.ir.metrics import RESERVED
from msrl_graph.runtime.metrics.display import comparison_table
from msrl_graph.runtime.metrics.recorder import Recorder, imbalances
from msrl_graph.runtime.metrics.trace import Trace
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Event, Report

EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "arithmetic" / "grpo.rlg"
COUNTDOWN = EXAMPLES / "countdown" / "countdown.rlg"
AGAIN = (
    "node second: actor.generate(prompt, response) -> again { temperature = 0 }",
    "source -> actor.generate -> second",
)
TWICE = (
    ("  columns {", "  columns {\n    again : i32[<= 5]"),
    ("  source -> actor.generate", f"  {AGAIN[0]}\n  {AGAIN[1]}"),
    ("actor.update => actor.generate", "actor.update => actor.generate, second"),
    ("layout actor.generate { tp = 2 }", "layout actor.generate { tp = 2 }\n  layout second { dp = 2 }"),
)
ONE = "actor.update => actor.generate"
TWO = "actor.update => second"


@pytest.fixture(scope="module")
def plan():
    text = EXAMPLE.read_text()
    for old, new in TWICE:
        assert old in text
        text = text.replace(old, new)
    return compile(EXAMPLE, text=text)


def test_what_each_of_two_edges_received(plan, tmp_path):
    first = Report("rank 0")
    second = Report("rank 1")
    first.bytes = {ONE: 300, TWO: 50}
    second.bytes = {ONE: 280, TWO: 90}
    first.count("reward", 1.0, 2)
    recorder = Recorder(tmp_path, plan, 0)
    line = recorder.training(0, 1.0, [first, second], {}, 3)
    assert {key for key in line if "/" not in key} - {"reward"} <= RESERVED  # what no column may be called
    assert (line["reshard_bytes"], line["actor.generate/reshard_bytes"], line["second/reshard_bytes"]) == (370, 300, 90)
    gathered = {e.dst: next(s.bytes for s in e.steps if s.name.endswith("by bucket")) for e in plan.reshards}
    table = {what: (predicted, measured) for what, _, predicted, measured, _ in recorder.table()}
    recorder.close()
    assert table[f"{ONE}, received a device"] == (gathered["actor.generate"], 300)
    assert table[f"{TWO}, received a device"] == (gathered["second"], 90)


def test_staleness_and_seconds_with_pools_ahead_stand_beside_those_that_were_foreseen(tmp_path):
    """Of an iteration what the slowest pool takes; of what it would take in step nothing is told, since nothing of that
    was measured."""
    plan = compile(COUNTDOWN)
    recorder = Recorder(tmp_path, plan, 0)
    for number, old in enumerate((0, 1, 1, 1, 0)):
        report = Report("rank 1")
        report.count("staleness", 512.0 * old, 512)
        report.peak("staleness_max", old)
        recorder.training(number, 20.0, [report], {}, 0)
    table = {what: (unit, *figures) for what, unit, *figures, _ in recorder.table()}
    recorder.close()
    assert table["staleness"] == ("versions", 1.0, 0.75)
    assert table["staleness, at most"] == ("versions", 1, 1)
    assert table["iteration"] == ("s", plan.estimate.iteration_seconds.value, 20.0)
    shown = io.StringIO()
    Console(width=120, file=shown).print(comparison_table(recorder.table()))
    (line,) = (line.split() for line in shown.getvalue().splitlines() if line.startswith("staleness  "))
    assert line == ["staleness", "1.00", "0.75", "1.33", "assumed"]


def test_weights_that_are_not_sent_each_time_are_compared_on_average(tmp_path):
    plan = compile(COUNTDOWN, text=COUNTDOWN.read_text().replace("staleness = behind", "staleness = behind, every = 2"))
    recorder, (edge,) = Recorder(tmp_path, plan, 0), plan.reshards
    for number in range(5):
        report = Report("rank 1")
        report.count("staleness", 512.0 * (number % 2), 512)
        report.peak("staleness_max", number % 2)
        if number % 2 == 0:
            report.add_seconds("reshard", 4.0)
            report.bytes[edge.name] = 300
        recorder.training(number, 20.0, [report], {}, 0)
    table = {what: (predicted, measured) for what, _, predicted, measured, _ in recorder.table()}
    recorder.close()
    share = Sends(plan).share((edge.src, edge.dst))
    assert table["reshard"][1] == 2.0
    assert table[f"{edge.name}, received a device"] == (share * edge.received_bytes_per_device, 150)


@pytest.mark.usefixtures("alone")
def test_steps_of_two_edges_add_up():
    changes = [(old, new) for old, new in TWICE if not old.startswith("layout")]
    stage = Stage(one_rank(*changes))
    stage.told = Report("rank 0")
    doing = stage.runner(stage, Task("train", 0, 4), stage.told)
    for edge in stage.plan.reshards:
        doing.reshard(("devices",), edge.src, edge.dst)
    edges = [*stage.engines.resharders.values()]
    assert len(edges) == 2
    for step in edges[0].seconds:
        assert stage.told.seconds[f"reshard {step}"] == sum(edge.seconds[step] for edge in edges), step


def test_seconds_of_two_edges_on_the_same_ranks_are_their_sum(plan):
    (whole,) = (p for p in plan.estimate.phases if p.name == "reshard")
    assert whole.seconds.value == pytest.approx(sum(costs.reshard(plan, edge).value for edge in plan.reshards))


def test_seconds_of_edges_of_other_ranks_are_the_slowest_ones():
    """Two policies, each on a device of its own: neither waits for the other's weights."""
    text = """
algorithm talk {
  columns {
    prompt : i32[<= 6]
    answer : text
    said   : i32[<= 5]
    reply  : i32[<= 5]
    right  : f32
    one    : f32[said]
    two    : f32[reply]
  }
  worker asker : policy
  worker other : policy
  worker host  : function
  source(4) -> prompt, answer
  node asker.generate(prompt) -> said { samples = 2 }
  node other.generate(prompt, said) -> reply
  node host.right(reply, answer) -> right { call = exact_match(response = reply) }
  node host.one(said, right) -> one { call = group_norm(response = said, reward = right), per = prompt }
  node host.two(reply, right) -> two { call = group_norm(response = reply, reward = right), per = prompt }
  node asker.update(prompt, said, one) { loss = clip(0.2, advantage = one), optimizer = adamw(lr = 1e-4) }
  node other.update(prompt, said, reply, two) { loss = clip(0.2, advantage = two), optimizer = adamw(lr = 1e-4) }
  source -> asker.generate -> other.generate -> host.right -> host.one -> asker.update
  host.right -> host.two -> other.update
  asker.update => asker.generate
  other.update => other.generate
}
cluster laptop { device = "cpu", devices_per_node = 2 }
deploy talk on laptop {
  model policy = "./model"
  data source = "train.jsonl"
  apart asker, other
}
"""
    plan = compile(EXAMPLE, text=text)
    (whole,) = (p for p in plan.estimate.phases if p.name == "reshard")
    assert len(plan.pools) == 2 and whole.seconds == max(
        (costs.reshard(plan, edge) for edge in plan.reshards), key=lambda f: f.value
    )


def test_imbalance_is_that_of_each_round() -> None:
    """Two rounds that are uneven the other way round do not make up for each other."""
    reports = [Report("rank 0"), Report("rank 1"), Report("host 0")]
    reports[0].loads = {"actor.update": [30, 10], "actor.infer": [5]}
    reports[1].loads = {"actor.update": [10, 30], "actor.infer": [5]}
    reports[2].loads = {"host.reward": [40]}
    assert imbalances(reports) == {"actor.update": 1.5, "actor.infer": 1.0}


def test_rows_of_evaluations_that_the_lines_do_not_tell_of_go(plan, tmp_path):
    """Those after the end of a run, where a resumed one goes on for longer."""
    lines = [{"evaluation": "held_out", "after_iterations": 20}, {"iteration": 20}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = ("held_out/000020.parquet", "held_out/mine.parquet")
    gone = ("held_out/000030.parquet", "last/again/000020.parquet")
    for name in (*kept, *gone):
        (tmp_path / "evaluation_rows" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "evaluation_rows" / name).touch()
    Recorder(tmp_path, plan, 2).close()
    there = {str(p.relative_to(tmp_path / "evaluation_rows")) for p in tmp_path.rglob("*.parquet")}
    assert there == {*kept}


def test_the_trace_takes_no_more_of_a_long_run_than_of_a_short_one(tmp_path):
    """Tasks from the beginning and from the end, as docs/guides/watching.md says."""

    def task(number):
        reports = [Report("rank 0"), Report("rank 1")]
        for report in reports:
            report.events += [Event(f"phase {i}", number + i / 100, 0.005, {"group": i}, "dock") for i in range(50)]
        return reports

    trace = Trace(lambda process: f"{process} on host 0")
    tracemalloc.start()
    for number in range(250):
        trace.add(number, task(number))
    before = tracemalloc.get_traced_memory()[0]
    for number in range(250, 500):
        trace.add(number, task(number))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000  # bytes, of 250 tasks
    trace.write(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in written["traceEvents"] if e["ph"] == "X"]
    kept = sorted({e["args"]["iteration"] for e in events})
    assert kept == [*range(20), *range(320, 500)] and written["otherData"] == {"tasks left out": 300}
    assert len(events) == 200 * 100 and events[0]["ts"] == 0 and events[0]["args"] == {"iteration": 0, "group": 0}
    names = [e["args"]["name"] for e in written["traceEvents"] if e["ph"] == "M"]
    assert names == ["rank 0 on host 0", "work", "dock", "rank 1 on host 0", "work", "dock"]
