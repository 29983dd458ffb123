"""The folder of a run that holds results already: what is offered, what `--overwrite` removes, and what it never
does."""

import shutil
from pathlib import Path

import pytest
from place import EXAMPLE
from saved_checkpoints import save

from msrl_graph import Fault, compile, run
from msrl_graph.cli import run_main
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import supervisor
from msrl_graph.runtime.driver.run_folder import MADE, lock_folder
from msrl_graph.runtime.weights import checkpoint

PROGRAM = str(EXAMPLE / "grpo.rlg")
NOBODY = ("-c", "pass")  # a driver that does nothing


@pytest.fixture(scope="module")
def plan():
    return compile(PROGRAM)


@pytest.fixture
def ran(tmp_path, monkeypatch, plan):
    """What a run left in `ran`, with a file of somebody's own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("ran")
    for name in MADE:
        if name.endswith(("l", "n", "g")):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(name)
        else:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "driver.log").write_text(name)
    shutil.rmtree(folder / "checkpoints")
    (folder / "notes.md").write_text("mine")
    return folder


def attempted(plan, out, resume="", **options):
    """A run until its driver would have its turn."""
    prepared = supervisor.prepare(plan, RunOptions(out, resume=resume, overwrite=True, **options))
    with pytest.raises(supervisor.RunFailed):
        supervisor.Supervisor(prepared, None, NOBODY).run()


def test_a_folder_with_results_is_refused_with_what_may_be_done(ran, plan, capsys):
    assert run_main([PROGRAM, "--out", "ran"]) == 1
    told = "error[bad-value]: the output folder ran exists and is not empty\n  = help: name another with --out, "
    assert capsys.readouterr().err == f"{told}or replace the results in it: --overwrite\n"
    save(ran, plan, 2)
    assert run_main([PROGRAM, "--out", "ran"]) == 1
    assert capsys.readouterr().err == f"{told}resume the run in it: --resume ran, or replace its results: --overwrite\n"
    with pytest.raises(Fault) as fault:
        run(plan, out="ran")
    help = "name another with `out`, resume the run in it: resume=ran, or replace its results: `overwrite=True`"
    assert fault.value.diagnostics[0].help == help and str(fault.value).endswith(f"= help: {help}")
    assert run_main([PROGRAM, "--out", "ran", "--overwrite", "--dry-run"]) == 0
    assert run_main([PROGRAM, "--resume", "ran", "--dry-run"]) == 0
    run(plan, out="ran", overwrite=True, dry_run=True)
    assert {p.name for p in ran.iterdir()} == {*MADE, "notes.md"}


def test_overwrite_removes_what_a_run_made_and_nothing_else(ran, plan):
    save(ran, plan, 2)
    attempted(plan, ran)
    assert {p.name for p in ran.iterdir()} == {"logs", "inputs.json", "notes.md"}
    assert (ran / "inputs.json").read_text() != "inputs.json"
    assert (ran / "logs" / "driver.log").read_text() == ""


def test_what_is_no_runs_folder_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    Path("logs").mkdir()
    assert run_main([PROGRAM, "--out", ".", "--overwrite"]) == 1
    assert "; it holds no results of a run, which --overwrite would replace\n" in capsys.readouterr().err
    assert run_main([PROGRAM, "--overwrite"]) == 1
    told = (
        "error[bad-value]: --overwrite replaces the results in a folder, and none is named\n  = help: name it "
        "with --out\n"
    )
    assert capsys.readouterr().err == told
    assert {p.name for p in tmp_path.iterdir()} == {"weights", "logs"}


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path, monkeypatch, capsys):
    """Whatever the system says only as it is asked for the folder: a process file system seems to be one that can be
    written to."""
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("")
    long = "x" * 300
    for out, told in (
        ("/proc/x", "/proc/x cannot be made: "),
        (long, f"{long} cannot be made: File name too long\n"),
        ("afile", "afile is a file\n"),
        ("afile/x", "afile/x cannot be made: afile is not a writable folder\n"),
    ):
        assert run_main([PROGRAM, "--out", out]) == 1
        found = capsys.readouterr().err
        assert f"error[bad-value]: the output folder {told}" in found and found.endswith(
            "= help: name another with --out\n"
        )
    assert {p.name for p in tmp_path.iterdir()} == {"afile"}


def test_overwrite_leaves_what_the_run_reads(ran, plan, capsys):
    shutil.copytree(EXAMPLE / "model", ran / "weights" / "actor")
    text = Path(PROGRAM).read_text().replace('"./model"', '"ran/weights/actor"').replace('"train', f'"{EXAMPLE}/train')
    Path("second.rlg").write_text(text.replace('"test', f'"{EXAMPLE}/test'))
    assert run_main(["second.rlg", "--out", "ran", "--overwrite"]) == 1
    told = f"error[bad-value]: --overwrite would remove {Path.cwd()}/ran/weights/actor, which the run reads\n"
    assert told in capsys.readouterr().err
    (ran / "rows" / "000000.parquet").write_text("rows")
    with pytest.raises(Fault, match=f"`overwrite=True` would remove {Path.cwd()}/ran/rows, which the run reads"):
        run(plan, out="ran", overwrite=True, replay="ran", iterations=1)
    assert {p.name for p in ran.iterdir()} == {*MADE, "notes.md"} - {"checkpoints"}


def test_a_run_that_goes_on_from_an_older_checkpoint_replaces_the_newer_ones_where_it_is_asked_to(ran, plan):
    older, middle, newest = (save(ran, plan, i) for i in (2, 4, 6))
    (newest / "manifest.json").write_text("{")  # it need not be sound
    with pytest.raises(Fault) as fault:
        supervisor.prepare(plan, RunOptions(resume=older))
    assert (
        fault.value.diagnostics[0].help
        == "name another folder for the results with --out, or replace them: --overwrite"
    )
    attempted(plan, None, str(middle))
    assert [p.name for p in checkpoint.list_checkpoints(ran)] == ["000002", "000004"]
    attempted(plan, ran, str(older))  # its own folder, named
    assert [p.name for p in checkpoint.list_checkpoints(ran)] == ["000002"]
    assert {p.name for p in ran.iterdir()} == {*MADE, "notes.md"}


def test_results_that_a_run_is_writing_are_not_removed(ran, plan):
    made = supervisor.prepare(plan, RunOptions(ran, overwrite=True))
    with lock_folder(ran), pytest.raises(Fault, match="another run is writing into"):
        supervisor.Supervisor(made, None, NOBODY).run()
    assert {p.name for p in ran.iterdir()} == {*MADE, "notes.md"} - {"checkpoints"}
