"""`--evaluate`: the evaluations of a program alone. Nothing is trained, and the evaluated run is not touched."""

import hashlib
import re

import pytest
from place import EXAMPLE, ONE_RANK, SMALL, metrics
from saved_checkpoints import save
from stale_runs import APART, stale

from msrl_graph import compile, run
from msrl_graph.cli import run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.driver.supervisor import Outcome

PROGRAM = (EXAMPLE / "grpo.rlg").read_text()


def without_evaluations():
    return re.sub(r"\n  evaluate .*", "", PROGRAM)


def test_what_would_be_evaluated(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ran", compile(EXAMPLE / "grpo.rlg"), 400)  # of more iterations than the program has
    assert run_main([str(EXAMPLE / "grpo.rlg"), "--evaluate", "--resume", "ran", "--dry-run"]) == 0
    first, *_, saved, last = capsys.readouterr().out.splitlines()
    assert first == f"arithmetic: evaluates held_out, trains nothing, from iteration 400 ({path}), seed 0"
    assert saved.startswith("no checkpoints;") and last == "results would be in runs/arithmetic-1; nothing was started"
    assert run_main([str(EXAMPLE / "grpo.rlg"), "--evaluate", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("arithmetic: evaluates held_out, trains nothing, from the beginning, ")
    assert not (tmp_path / "runs").exists()


def test_a_program_without_evaluations_is_refused_and_the_help_is_a_way_out(capsys):
    plan = compile(EXAMPLE / "p.rlg", text=without_evaluations())
    with pytest.raises(Fault) as fault:
        run(plan, evaluate=True, dry_run=True)
    (told,) = fault.value.diagnostics
    assert told.message == "`arithmetic` has no `evaluate`, so there is nothing to do without training"
    stated = told.help.partition(": ")[2].replace("DATA", "held_out").replace("COLUMN", "reward")
    text = without_evaluations().replace("  run {", f"  {stated}\n  run {{")
    run(compile(EXAMPLE / "p.rlg", text=text), evaluate=True, dry_run=True)
    assert "evaluates held_out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_an_evaluation_is_not_written_into_its_run(tmp_path, capsys, overwrite):
    path = save(tmp_path / "ran", compile(EXAMPLE / "grpo.rlg"), 4)
    before = sorted(tmp_path.rglob("*"))
    for target in (tmp_path / "ran", path):
        for out in (str(tmp_path / "ran"), f"file://{tmp_path}/ran"):
            arguments = ["--evaluate", "--resume", str(target), "--out", out, *overwrite]
            assert run_main([str(EXAMPLE / "grpo.rlg"), *arguments]) == 1
            told = "cannot write an evaluation into the folder of the run that it evaluates"
            assert told in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("more", [["--iterations", "1"], ["--replay", "x"], ["--measure-memory"]])
def test_flags_of_training_do_not_go_with_it(more, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(["a.rlg", "--evaluate", *more])
    assert ended.value.code == 2 and f"leave out `{more[0]}`" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"iterations": 0}, {"replay": "x"}, {"measure_memory": True}])
def test_arguments_of_training_do_not_go_with_it(more):
    with pytest.raises(Fault, match=f"`{next(iter(more))}` does not go with it"):
        run(compile(EXAMPLE / "grpo.rlg"), evaluate=True, dry_run=True, **more)


def test_one_evaluation_is_one_number():
    assert Outcome("a", {"accuracy": (0.5, 0.5)}, evaluated=True).lines() == ["accuracy 0.500"]
    assert Outcome("a", {"accuracy": (0.5, 0.6)}).lines() == ["accuracy 0.500 -> 0.600"]


def untouched(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def numbers(folder):
    """Of each evaluation its data, when it was, and its numbers."""
    lines = [line for line in metrics(folder) if "evaluation" in line]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


SAVED = (("run { iterations", "run { save = 1, keep = 9, iterations"), ("every = 40", "every = 1"))
SAMPLED = ("samples = 1, temperature = 0", "samples = 2, temperature = 0.7")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["two ranks", "stale"])
def test_a_checkpoint_is_evaluated_as_the_run_evaluated_it(place, how):
    changes = (*APART, stale(1)) if how == "stale" else ()
    place.write(*changes, *SAVED, SAMPLED)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", "ran")
    assert code == 0, err
    told = numbers(place.folder / "ran")
    before = untouched(place.folder / "ran")
    assert [line["after_iterations"] for line in told] == [0, 1, 2]
    code, out, err = place.run("p.rlg", *SMALL, "--evaluate", "--resume", "ran/checkpoints/000001", "--out", "one")
    assert code == 0, err
    assert numbers(place.folder / "one") == [told[1]] and len(metrics(place.folder / "one")) == 1
    assert out.splitlines() == ["results in one", f"held-out accuracy {told[1]['reward']:.3f}"]
    assert not {"weights", "checkpoints"} & {p.name for p in (place.folder / "one").iterdir()}
    if how == "two ranks":  # on another layout, and of the last
        place.write(*ONE_RANK, *SAVED, SAMPLED)
        code, _, err = place.run("p.rlg", *SMALL, "--evaluate", "--resume", "ran", "--out", "two")
        assert code == 0, err
        assert numbers(place.folder / "two") == [told[2]]
    assert untouched(place.folder / "ran") == before
    place.assert_clean()
