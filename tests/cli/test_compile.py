"""msrl-compile as its user meets it: exit codes, what is on stdout and what on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.cli import compile_main
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.plan import from_json
from msrl_graph.passes.order import ORDER

HERE = TESTS
PAGE = HERE / "programs" / "grpo_page.rlg"
Capture = pytest.CaptureFixture[str]


def process(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "msrl_graph.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload, no-any-return]


def wrong(tmp_path: Path, old: str = "ref_logp, advantage) {", new: str = "ref_logb, advantage) {") -> Path:
    path = tmp_path / "wrong.rlg"
    text = PAGE.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_a_plan_on_stdout_and_warnings_on_stderr(capsys: Capture) -> None:
    assert compile_main([str(PAGE)]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("1 reshard (8.19 GB released a device).")
    assert "warning[missing-file]" in err
    assert "\x1b" not in out + err


def test_check_prints_nothing_on_stdout(capsys: Capture) -> None:
    assert compile_main([str(PAGE), "--check"]) == 0
    assert capsys.readouterr().out == ""


def test_a_fault_is_1_with_the_span_underlined(tmp_path: Path, capsys: Capture) -> None:
    assert compile_main([str(wrong(tmp_path))]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error[unknown-column]" in err
    assert "^^^^^^^^" in err
    assert "did you mean `ref_logp`" in err


def test_diagnostics_as_json_and_concise(tmp_path: Path, capsys: Capture) -> None:
    path = wrong(tmp_path)
    assert compile_main([str(path), "--diagnostics", "json"]) == 1
    told = json.loads(capsys.readouterr().err)
    assert told[0]["code"] == "unknown-column"
    assert told[0]["span"]["file"] == str(path)
    assert compile_main([str(path), "--diagnostics", "concise"]) == 1
    first = capsys.readouterr().err.split("\n")[0]
    assert first.startswith(f"{path}:{told[0]['span']['start']['line']}:")


@pytest.mark.parametrize(
    ("old", "new", "code", "under"),
    [
        (
            "layout actor.update   { tp = 8, dp = 2 }",
            "layout actor.update   { tp = 8, dp = 4 }",
            "layout-size",
            "layout actor.update",
        ),
        (
            "layout actor.generate { tp = 4, dp = 4 }",
            "layout actor.generate { tp = 16 }",
            "layout-divide",
            "layout actor.generate",
        ),
        ('"ascend-910c"', '"ascend-910c", memory = 20 GB', "out-of-memory", "layout actor.update"),
    ],
)
def test_faults_that_only_placing_brings_to_light(
    tmp_path: Path, capsys: Capture, old: str, new: str, code: str, under: str
) -> None:
    assert compile_main([str(wrong(tmp_path, old, new)), "--check"]) == 1
    err = capsys.readouterr().err
    assert f"error[{code}]" in err
    assert under in err


def test_too_much_memory_names_the_nearest_layout_that_fits(tmp_path: Path, capsys: Capture) -> None:
    text = (
        PAGE.read_text(encoding="utf-8")
        .replace("tp = 8, dp = 2", "tp = 2, dp = 8")
        .replace("ascend-910c", "ascend-910b")
    )
    path = tmp_path / "large.rlg"
    path.write_text(text.replace("run {", "engine actor.update = fsdp { recompute = full }\n  run {"), encoding="utf-8")
    assert compile_main([str(path), "--check"]) == 1
    err = capsys.readouterr().err
    fits = "{ tp = 2, dp = 8, zero = 2 }"
    assert f"the nearest layout that fits: `layout actor.update {fits}`" in err
    path.write_text(path.read_text().replace("{ tp = 2, dp = 8 }", fits))
    assert compile_main([str(path), "--check"]) == 0


def test_emits_and_formats(tmp_path: Path, capsys: Capture) -> None:
    for stage, start in (
        ("ast", "File"),
        ("graph", "Algorithm grpo"),
        ("placed", "Placed graph"),
        ("plan", "Plan of grpo"),
        ("ray", "#!"),
    ):
        assert compile_main([str(PAGE), "--emit", stage]) == 0
        assert capsys.readouterr().out.startswith(start)
    for stage in ("ast", "graph", "placed", "plan"):
        assert compile_main([str(PAGE), "--emit", stage, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["format_version"] == 1
    target = tmp_path / "plan.json"
    assert compile_main([str(PAGE), "--format", "json", "-o", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert from_json(target.read_text()).graph.name == "grpo"


def test_a_name_stands_for_an_algorithm_of_the_package(capsys: Capture) -> None:
    assert compile_main(["grpo"]) == 0
    why = "No deploy, so no plan: add one, or `--model PRESET` plans for the machine at hand."
    assert capsys.readouterr().out.splitlines()[-2:] == ["Graph: 7 states, 8 sample edges, 1 reshard.", why]
    assert compile_main(["grpo", "--emit", "graph"]) == 0
    assert why not in capsys.readouterr().out
    assert compile_main(["grpo", "--model", "tiny"]) == 0
    assert "Plan: 7 states on 1 device" in capsys.readouterr().out
    assert compile_main(["grpo", "--emit", "plan"]) == 1
    assert "error[no-deploy]" in capsys.readouterr().err
    assert compile_main(["grpoo"]) == 1
    assert "did you mean `grpo`?" in capsys.readouterr().err


def test_params_are_set(capsys: Capture) -> None:
    assert compile_main(["grpo", "--set", "prompts=8", "--set", "group = 4"]) == 0
    assert "8 prompts x 4 responses an iteration" in capsys.readouterr().out
    assert compile_main(["grpo", "--set", "promts=8"]) == 1
    assert "did you mean `prompts`?" in capsys.readouterr().err


def test_what_is_wrong_with_a_flag_is_underlined_in_it(capsys: Capture) -> None:
    assert compile_main(["grpo", "--set", "prompts=", "--set", "group=-4"]) == 1
    err = capsys.readouterr().err
    assert (
        "error[syntax]: expected a value, found the end\n --> --set prompts=:1:15\n  |\n1 | --set prompts=\n  |  "
        "             ^\n"
    ) in err
    assert (
        "not `-4`\n  --> --set group=-4:1:13\n   |\n 1 | --set group=-4\n   |             ^^\n   = note: it is "
        "used here\n"
    ) in err


def test_a_plan_is_no_program(capsys: Capture, tmp_path: Path) -> None:
    assert compile_main([str(PAGE), "--format", "json", "-o", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    assert compile_main([str(tmp_path / "plan.json")]) == 1
    err = capsys.readouterr().err
    assert "error[syntax]: this is a plan, not a program\n" in err and "= help: run it with `msrl-run`\n" in err


def test_a_byte_order_mark_is_skipped(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "mark.rlg").write_text("clustre pod { }\n", encoding="utf-8-sig")
    assert compile_main([str(tmp_path / "mark.rlg")]) == 1
    assert "1 | clustre pod { }\n  | ^^^^^^^\n" in capsys.readouterr().err


def test_passes_are_listed_timed_and_shown(capsys: Capture) -> None:
    assert compile_main(["--list-passes"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [step.name for step in ORDER]
    assert compile_main([str(PAGE), "--check", "--time-passes", "--print-after", "dock"]) == 0
    err = capsys.readouterr().err
    assert all(f"\n{n} " in err for n in names)
    assert "--- after dock\nPlan of grpo" in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.rlg", "--print-after", "x"],
        ["a.rlg", "--set", "x"],
        ["--bogus"],
        ["a", "--emit", "ray", "--format", "json"],
    ],
)
def test_bad_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compile_main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("name", ["nowhere.rlg", "/dev/null/x.rlg", ".", "no/such/thing"])
def test_a_file_that_cannot_be_read(name: str, capsys: Capture) -> None:
    assert compile_main([name]) == 1
    assert "error[missing-file]" in capsys.readouterr().err


def test_what_is_not_text_is_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.rlg").write_bytes(b"\xff\xfe\x00")
    assert compile_main([str(tmp_path / "a.rlg")]) == 1
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_stdin_and_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    done = process("-", "--check", "--diagnostics", "concise", input="algorithm {")
    assert done.returncode == 1
    assert done.stderr.startswith("<stdin>:1:")
    assert process(str(PAGE), "-o", str(tmp_path / "no" / "x")).returncode == 2


def test_our_own_mistake_is_one_line_and_a_reproducer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("msrl_graph.compiler.pipeline.translate", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert compile_main([str(PAGE)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: ZeroDivisionError: oops" in err
    folder = Path(err.strip().rsplit(" ", 1)[1])
    assert {p.name for p in folder.iterdir()} == {"command.txt", "traceback.txt", "grpo_page.rlg"}
    monkeypatch.setenv("MSRL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        compile_main([str(PAGE)])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = (
        f"{sys.executable} -m msrl_graph.cli {PAGE} --format json | head -1; {sys.executable} -m msrl_graph.cli "
        f"{PAGE} | head -1"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2].startswith("Plan of grpo")
    assert "Traceback" not in done.stdout + done.stderr
    assert "BrokenPipe" not in done.stdout + done.stderr


def test_colour_when_asked_for(tmp_path: Path, capsys: Capture) -> None:
    assert compile_main([str(wrong(tmp_path)), "--color", "always"]) == 1
    assert "\x1b[1;31merror[unknown-column]\x1b[0m" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--check"], ["--emit", "plan"], ["--emit", "ray"], ["--format", "json"]])
def test_compiling_loads_neither_torch_nor_ray_nor_numpy(arguments: list[str]) -> None:
    code = (
        "import sys; from msrl_graph.cli import compile_main\n"
        f"assert compile_main([{str(PAGE)!r}, *{arguments!r}]) == 0\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'scipy', 'pandas', 'networkx'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        f"assert '--check' not in {arguments!r} or not {{'rich', 'jinja2'}} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_python_interface() -> None:
    assert compile(PAGE).reshards[0].released_bytes_per_device == pytest.approx(8.19e9, rel=1e-3)
    with pytest.raises(Fault) as caught:
        compile("grpo")
    assert caught.value.diagnostics[0].code == "no-deploy"
    import msrl_graph

    with pytest.raises(AttributeError):
        msrl_graph.nothing  # noqa: B018


def test_recomputation_is_advised_where_no_layout_helps_and_it_fits(tmp_path: Path, capsys: Capture) -> None:
    program = tmp_path / "h100.rlg"
    text = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
    text = text.replace('"ascend-910c"', '"h100", memory = 40 GB')
    program.write_text(
        text.replace("  run {", "  engine actor.update = fsdp { recompute = none }\n  run {"), encoding="utf-8"
    )
    assert compile_main([str(program), "--check"]) == 1
    help = "this fits: `engine actor.update = fsdp { recompute = full }`"
    assert capsys.readouterr().err.rstrip().endswith(help)
    program.write_text(
        text.replace("  run {", "  engine actor.update = fsdp { recompute = full }\n  run {"), encoding="utf-8"
    )
    assert compile_main([str(program), "--check"]) == 0


def test_where_no_near_layout_fits_the_search_is_asked(tmp_path: Path, capsys: Capture) -> None:
    """On stages of a pipeline the model fits, which another engine has, and that is what is advised."""
    program = tmp_path / "stages.rlg"
    text = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
    text = text.replace('"ascend-910c"', '"h100", memory = 70 GB')
    text = text.replace("nodes            = 2", "nodes            = 1")
    program.write_text(text.replace("tp = 8, dp = 2", "dp = 8").replace("tp = 4, dp = 4", "tp = 8"), encoding="utf-8")
    assert compile_main([str(program), "--check"]) == 1
    help = capsys.readouterr().err.rstrip().split("\n")[-1].strip()
    assert help.startswith("this fits: `layout actor.update {")
    said = "\n  ".join(help.split("`")[1::2])
    text = text.replace("layout actor.update   { tp = 8, dp = 2 }", said).replace("tp = 4, dp = 4", "tp = 8")
    program.write_text(text, encoding="utf-8")
    assert compile_main([str(program), "--check"]) == 0


def test_why_and_budget(capsys: Capture, tmp_path: Path) -> None:
    (open_ := tmp_path / "open.rlg").write_text(
        "\n".join(x for x in PAGE.read_text(encoding="utf-8").split("\n") if "layout " not in x)
    )
    for budget, told in (
        ([], "is the simplest within 10 % of the fastest"),
        (["--budget", "60"], "is the simplest within 10 % of the fastest"),
        (["--budget", "0"], "the budget of 0 s ended the search at"),
    ):
        assert compile_main([str(open_), "--why", *budget]) == 0
        assert told in capsys.readouterr().out
    assert compile_main([str(PAGE), "--why"]) == 0
    assert "the file states every layout" in capsys.readouterr().out
    for arguments in (["--why", "--format", "json"], ["--why", "--check"], ["--budget", "soon"]):
        with pytest.raises(SystemExit) as ended:
            compile_main([str(PAGE), *arguments])
        assert ended.value.code == 2


def test_a_file_beside_the_program_is_imported_in_quotes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ranked.rlg").write_text("import grpo\nalgorithm ranked extends grpo { param more = 1 }\n")
    Path("main.rlg").write_text("import ranked\n")
    assert compile_main(["main.rlg", "--diagnostics", "concise"]) == 1
    assert capsys.readouterr().err == (
        "main.rlg:1:1: error[unknown-name]: no algorithm of the package is called `ranked` "
        '(help: for the file next to this one, write `import "ranked.rlg"`)\n'
    )
