"""Resuming: lines of metrics that were lost come back, and folders that are no checkpoints are left alone."""

import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from place import EXAMPLE, MINE, ONE_RANK, SMALL, metrics
from saved_checkpoints import lines, save

from msrl_graph import compile
from msrl_graph.cli import run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import run_inputs, supervisor
from msrl_graph.runtime.driver.outcome import outcome_of
from msrl_graph.runtime.driver.resume import differences, program
from msrl_graph.runtime.metrics.metrics_file import restore_lines
from msrl_graph.runtime.metrics.recorder import Recorder
from msrl_graph.runtime.process import fault_points
from msrl_graph.runtime.weights import checkpoint, checkpoint_parts

PROGRAM = str(EXAMPLE / "grpo.rlg")


@pytest.fixture(scope="module")
def plan():
    return compile(PROGRAM)


# Folders in checkpoints/

FOREIGN = {
    "a number": lambda folder, ours: (folder / "999999999").mkdir(),
    "a number with notes in it": lambda folder, ours: note(folder / "20261127"),
    "a copy of a checkpoint": lambda folder, ours: shutil.copytree(ours, folder / "999999"),
    "digits of another script": lambda folder, ours: shutil.copytree(
        ours, folder / "\u0669\u0669\u0669\u0669\u0669\u0669"
    ),
    "a number that is written otherwise": lambda folder, ours: shutil.copytree(ours, folder / "0000099"),
    "a file of that name": lambda folder, ours: (folder / "999999").write_text("mine"),
    "a link": lambda folder, ours: (folder / "999999").symlink_to(ours),
    "somebody's partial": lambda folder, ours: note(folder / ".mine.partial"),
}


def note(folder):
    folder.mkdir()
    (folder / "notes.md").write_text("mine")


@pytest.mark.parametrize("what", FOREIGN)
def test_a_strange_folder_among_the_checkpoints_stays_and_costs_no_checkpoint(tmp_path, plan, what):
    ours = save(tmp_path, plan, 4)
    FOREIGN[what](ours.parent, ours)
    (foreign,) = {p.name for p in ours.parent.iterdir()} - {ours.name}
    for iteration in (5, 6, 7):
        assert save(tmp_path, plan, iteration, keep=2).is_dir()
    assert {p.name for p in ours.parent.iterdir()} == {"000006", "000007", foreign}
    assert checkpoint.find_newest(tmp_path)[0].name == "000007"


def test_a_strange_folder_among_a_hosts_parts_stays_and_costs_no_part(tmp_path, plan):
    save(tmp_path, plan, 4)
    ours = save(tmp_path, plan, 5)
    note(ours.with_name("20261127"))
    shutil.copytree(ours, ours.with_name("999999"))
    names = [p.name for p in checkpoint.list_up_to(ours)][-1:]
    content = {name: (ours / name).read_bytes() for name in (checkpoint.DIGEST, checkpoint.MANIFEST)}
    assert checkpoint_parts.keep(str(tmp_path), names, content) == ""
    assert {p.name for p in ours.parent.iterdir()} == {"000005", "20261127", "999999"}


def test_a_strange_folder_at_a_url_is_no_checkpoint(tmp_path, plan, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours = save(tmp_path / "run", plan, 4)
    url = f"file://{tmp_path / 'run'}"
    note(ours.with_name("20261127"))
    assert checkpoint.list_at_url(f"{url}/checkpoints") == ["000004"]
    assert run_main([PROGRAM, "--dry-run", "--resume", url]) == 0
    assert f"from iteration 4 ({url}/checkpoints/000004)" in capsys.readouterr().out


# Lines of metrics


@pytest.fixture
def recorded(tmp_path, plan):
    """The lines that a run wrote, and the copy that a checkpoint gets."""
    with closing(Recorder(tmp_path, plan, 0)) as recorder:
        for i in range(20):
            recorder.evaluation(Evaluation("test", 0, ("reward",), 1, 0.0), i, 0.5, [], {})
        copy = recorder.file.copy()
        recorder.evaluation(Evaluation("test", 0, ("reward",), 1, 0.0), 20, 0.5, [], {})  # after the checkpoint
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    partial = checkpoint.begin(tmp_path, 20)
    file = checkpoint.write_metrics(partial, copy, checkpoint.checkpoint_metadata(20, 20, 0, {}))
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 20, 20, {}, {}, (file,), 0)
    return path, whole, checkpoint.commit(partial, manifest, 2)


def wrote(path, content):
    path.write_bytes(content)


DAMAGE = {
    "is missing": lambda path, whole: path.unlink(),
    "ends after line 3 of 20": lambda path, whole: wrote(path, b"".join(whole.splitlines(keepends=True)[:3])),
    "ends after line 19 of 20": lambda path, whole: wrote(path, b"".join(whole.splitlines(keepends=True)[:20])[:-4]),
    "was cut or changed in line 8": lambda path, whole: wrote(
        path, whole.replace(b'"after_iterations": 7', b"\0" * 21)
    ),
    "was cut or changed in line 1": lambda path, whole: wrote(path, b"\xff\0[" + whole),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_lines_that_are_lost_come_back_from_the_checkpoint(recorded, plan, told):
    path, whole, folder = recorded
    copy = checkpoint.read_metrics_copy(folder, checkpoint.verify(folder))
    assert restore_lines(path, copy) == "" and path.read_bytes() == whole
    DAMAGE[told](path, whole)
    assert restore_lines(path, copy) == told
    assert path.read_bytes() == copy == b"".join(whole.splitlines(keepends=True)[:20])
    with closing(Recorder(path.parent, plan, 20)) as again:
        again.evaluation(Evaluation("test", 0, ("reward",), 1, 0.0), 20, 0.5, [], {})
    assert path.read_bytes() == whole and again.file.written == 21


@pytest.mark.parametrize("told", DAMAGE)
def test_damaged_lines_are_no_fault_of_ours(recorded, plan, told):
    """Where there is no copy of them, and where the run's outcome is read."""
    path, whole, _ = recorded
    DAMAGE[told](path, whole)
    outcome_of(plan, path.parent, False)
    with closing(Recorder(path.parent, plan, 20)) as again:
        pass
    assert again.file.written == len(path.read_bytes().splitlines())
    assert [json.loads(x) for x in path.read_bytes().splitlines()] == [json.loads(x) for x in whole.splitlines()][
        : again.file.written
    ]


def test_a_checkpoint_without_a_copy_of_the_lines_is_not_added_to_where_some_are_lost(tmp_path, plan, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ran", plan, 4, copy=False)
    for left, wrong in ((lines(4)[:-3], " (line 4 is cut)"), (lines(2), "")):
        (tmp_path / "ran" / "metrics.jsonl").write_bytes(left)
        with pytest.raises(Fault) as fault:
            supervisor.prepare(plan, RunOptions(resume="ran"))
        (told,) = fault.value.diagnostics
        some = left.count(b"\n")
        assert told.code == "bad-checkpoint" and told.message == (
            f"only {some} of the 4 lines of metrics.jsonl that belong to the checkpoint {path} are left in "
            f"{tmp_path}/ran{wrong}; the checkpoint was written by a version that kept no copy of them"
        )
        assert told.help == "put the file back, or continue with the remaining lines in another folder: --out"
    (warning,) = supervisor.prepare(plan, RunOptions("other", resume="ran")).warnings
    assert warning.severity == "warning" and warning.message == told.message
    (tmp_path / "ran" / "metrics.jsonl").write_bytes(lines(5))
    assert supervisor.prepare(plan, RunOptions(resume="ran")).warnings == []


# What has changed


def changed(plan, other):
    """What a resume of one plan from another one's checkpoint lists."""
    before, now = (json.loads(msgspec.json.encode(program(p))) for p in (plan, other))
    return differences(before, now)


def test_what_decides_a_result_is_compared(plan, tmp_path):
    def run(**stated):
        return replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, **stated)))

    assert changed(plan, run(iterations=7, save=3, keep=9, restarts=1)) == []
    assert changed(plan, run(on_nan="skip")) == ["on_nan was stop, is skip"]
    text = Path(PROGRAM).read_text().replace("lr = 2e-4", "lr = cosine(2e-4)").replace(", warmup = 20", "")
    longer = text.replace("iterations = 320", "iterations = 500")
    scheduled = [compile(EXAMPLE / "p.rlg", text=written) for written in (text, longer)]
    what = "iterations, which the learning rate of actor.update is scheduled over, was 320, is 500"
    assert changed(*scheduled) == [what]
    # A schedule that states its steps does not ask how many the run has.
    stated = [written.replace("cosine(2e-4)", "cosine(2e-4, steps = 90)") for written in (text, longer)]
    assert changed(*(compile(EXAMPLE / "p.rlg", text=written) for written in stated)) == []


def test_the_fields_of_preferences_being_exchanged_is_listed(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"p": "1+1=", "c": "2", "r": "3"}\n' * 2)
    fields = [{"prompt": "p", "chosen": "c", "rejected": "r"}, {"prompt": "p", "chosen": "r", "rejected": "c"}]
    plans = []
    for names in fields:
        stated = ", ".join(f'{column} = "{name}"' for column, name in names.items())
        text = f"""import dpo
            cluster c {{ device = "cpu", devices_per_node = 1 }}
            deploy dpo on c {{ model policy = "{EXAMPLE}/model"
              set pairs = 2
              set prompt_len = 8
              set response_len = 8
              data source = "{data}" {{ {stated} }}
              run {{ iterations = 2 }} }}"""
        plans.append(compile("p.rlg", text=text))
    assert changed(*plans) == ["data.source.fields.chosen was c, is r", "data.source.fields.rejected was r, is c"]


def test_a_function_that_was_moved_is_the_same_function(tmp_path):
    plans = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def score(response: str, answer: str) -> float:\n    return 1.0\n")
        text = Path(PROGRAM).read_text().replace(MINE[0], f'call = "{tmp_path / name}/mine.py:score"')
        plans.append(compile(EXAMPLE / "p.rlg", text=text))
    assert changed(*plans) == []


# On Ray

REWARD = """
from pathlib import Path

import worth


def score(response: str, answer: str) -> float:
    Path(__file__).with_name("worth.py").write_text("WORTH = 7.0\\n")
    return worth.WORTH
"""


@pytest.mark.slow
def test_a_run_uses_its_files_as_they_were_when_it_began(place):
    """Whatever is edited and whoever dies; a resume takes them as they are then."""
    (place.folder / "mine.py").write_text(REWARD)
    (place.folder / "worth.py").write_text("WORTH = 1.0\n")
    place.write(*ONE_RANK, MINE, ("run { iterations", "run { save = 2, iterations"), evaluated=False)
    (dying := place.folder / "points").mkdir()
    deaths = [
        fault_points.fault_file(dying, "functions of host 0", "share of host.reward in train/1"),
        fault_points.fault_file(dying, "driver", "opened train/3"),
    ]
    for death in deaths:
        death.touch()
    arguments = ["p.rlg", *SMALL, "--iterations", "5"]
    code, _, err = place.run(*arguments, "--out", "ran", MSRL_POINTS=str(dying))
    assert code == 0 and not any(death.exists() for death in deaths), err
    assert err.count("worth.py was edited after the run began") == 1, err
    assert [line["reward"] for line in metrics(place.folder / "ran")] == [1.0] * 5
    place.assert_clean()

    # Going on, it takes what is there, and says so in the warning and in the metrics; lines that were lost are back.
    before = metrics(place.folder / "ran")
    (place.folder / "ran" / "metrics.jsonl").unlink()
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "6", "--resume", "ran")
    assert code == 0 and "metrics.jsonl is missing: its 5 lines come from" in err, err
    (told,) = re.findall(
        r"warning\[changed-program\]: inputs that decide the result have changed since .* was written: (.*); ", err
    )
    assert told == "code worth.py has other content (12 bytes as before)"
    *again, last = metrics(place.folder / "ran")
    assert again == before and last["reward"] == 7.0 and last["changed"] == [told]
    kept = checkpoint.find_newest(place.folder / "ran")[1].inputs
    assert kept == run_inputs.read(place.folder / "ran") and all(entry["sha256"] for entry in kept["files"].values())
