"""Nothing that is shown moves a terminal's cursor or turns text around, whatever names and messages hold: in no
output."""

import io
import os

import pytest
from language import TESTS

from msrl_graph import compile
from msrl_graph.cli import compile_main, run_main
from msrl_graph.diagnostics import Diagnostic, Span, render
from msrl_graph.diagnostics.terminal_text import SIGNS, make_printable
from msrl_graph.emit.dot import dot_text
from msrl_graph.emit.html import plan_html
from msrl_graph.emit.picture import plan_picture
from msrl_graph.emit.text import plan_text
from msrl_graph.ir.plan import from_json
from msrl_graph.runtime.metrics.display import Display, Screen
from msrl_graph.runtime.process.log import PrefixedStream

BAD = "a\x1b[31m\x07\x7f\u202eb"
UNSAFE = {chr(c) for c in SIGNS} - {"\n"}
PAGE = TESTS / "programs" / "grpo_page.rlg"


def safe(text):
    found = UNSAFE & {*text}
    assert not found, (found, text[:500])
    return text


def test_text_of_several_lines_keeps_them():
    assert (
        make_printable("one\n\ttwo \x1b[2J\r\n") == "one\n\ttwo ␛[2J␍\n" and safe(make_printable(BAD)) == "a␛[31m␇␡�b"
    )


@pytest.mark.parametrize("style", ["full", "concise"])
def test_diagnostics(style):
    span = Span(f"{BAD}.rlg", 1, 1, 1, 4)
    found = Diagnostic("bad-value", f"`{BAD}` is wrong", span, f"say {BAD}\nor not", related=((span, BAD),))
    text = safe(render(found, {span.file: f"x {BAD}"}, style))
    assert (text.count("␛[31m") >= 3 and "\n" in text.replace("\n", "", 1)) or style == "concise"


def test_a_plan_whose_names_hold_anything(tmp_path):
    text = (
        compile(str(PAGE))
        .to_json()
        .replace("actor.", f"{BAD}.")
        .replace('"grpo"', '"gr\\u001b[2Jpo"')
        .replace("math_verify", BAD)
    )
    plan = from_json(text.replace("\x1b", "\\u001b").replace("\x07", "\\u0007"))
    assert "␛" in safe(plan_text(plan))
    safe(dot_text(plan_picture(plan)))
    safe(plan_html(plan))


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"{BAD}.rlg"
    (tmp_path / name).write_text(
        PAGE.read_text().replace("train.jsonl", f"{BAD}.jsonl").replace("math_verify()", f'"{BAD}.py:score"')
    )
    assert compile_main([name]) == 1
    assert compile_main([f"{BAD}/none.rlg"]) == 1 and compile_main(["--explain", BAD]) != 0
    assert run_main([f"{BAD}.json", "--dry-run"]) == 1 and compile_main([str(PAGE), "-o", f"no/{BAD}"]) != 0
    out, err = capsys.readouterr()
    safe(out)
    assert "␛" in safe(err)


def test_what_a_run_says_and_logs():
    out = io.StringIO()
    display = Display(compile(str(PAGE)), Screen(file=out, width=120))
    display.say(f"`host.x` failed on {BAD}\n  more")
    assert "␛[31m" in safe(out.getvalue()) and "\n  more" in out.getvalue()
    read, write = os.pipe()
    PrefixedStream(write, f"rank {BAD}").write(f"one {BAD}\ntwo\r\n")
    os.close(write)
    with os.fdopen(read, newline="") as file:
        text = file.read()
    assert "two\r\n" in text and "␛" in safe(text.replace("\r\n", "\n"))


def test_an_iteration_is_called_by_its_number_in_the_progress_as_in_its_metrics():
    out = io.StringIO()
    display = Display(compile(str(PAGE)), Screen(file=out, width=120))
    display.resume(1)
    for number in (1, 2):
        display.add({"iteration": number, "reward": 0.5, "tokens_per_second": 10.0, "seconds": 1.0})
    total = display.total
    lines = [
        "resumed after 1 iteration",
        *(f"iteration {n} ({n + 1} of {total})  reward 0.500  10 tokens/s  1.00 s" for n in (1, 2)),
    ]
    assert out.getvalue().splitlines() == lines
