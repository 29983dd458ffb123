"""msrl-fmt as its user meets it: exit codes, what is written and what is not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from msrl_graph.cli.fmt import main

Capture = pytest.CaptureFixture[str]
OLD = 'cluster pod{device="cpu"   # ünicode\n}\n'
NEW = 'cluster pod {\n  device = "cpu"  # ünicode\n}\n'
WRONG = "cluster pod { device = }\n"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.rlg"
    path.write_bytes(OLD.encode())
    return path


def stdin(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_a_file_is_rewritten_in_place_with_its_mode(old: Path, capsys: Capture) -> None:
    old.chmod(0o640)
    link = old.with_name("link.rlg")
    link.symlink_to(old.name)
    assert main([str(link)]) == 0
    assert old.read_bytes() == NEW.encode() and old.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink() and sorted(p.name for p in old.parent.iterdir()) == ["link.rlg", "old.rlg"]
    assert capsys.readouterr() == ("", "")


def test_a_file_that_has_its_layout_is_not_touched(old: Path) -> None:
    old.write_bytes(NEW.encode())
    before = old.stat()
    assert main([str(old)]) == 0
    after = old.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("text", ["\ufeff" + NEW, NEW.replace("\n", "\r\n"), NEW.replace("\n", "\r"), NEW.rstrip("\n")])
def test_marks_and_line_ends_are_part_of_the_layout(old: Path, capsys: Capture, text: str) -> None:
    old.write_bytes(text.encode())
    assert main(["--check", str(old)]) == 1
    assert old.read_bytes() == text.encode() and capsys.readouterr().out == f"{old}\n"
    assert main([str(old)]) == 0
    assert old.read_bytes() == NEW.encode()
    assert main(["--check", str(old)]) == 0


def test_check_lists_what_would_change_and_writes_nothing(old: Path, capsys: Capture) -> None:
    new = old.with_name("new.rlg")
    new.write_text(NEW, encoding="utf-8")
    assert main(["--check", str(new), str(old)]) == 1
    assert capsys.readouterr() == (f"{old}\n", "")
    assert main(["--check", str(new)]) == 0
    assert old.read_bytes() == OLD.encode()


def test_a_diff_shows_what_would_change(old: Path, capsys: Capture) -> None:
    old.write_bytes(OLD.rstrip("\n").encode())
    assert main(["--diff", str(old)]) == 1
    assert old.read_bytes() == OLD.rstrip("\n").encode()
    assert capsys.readouterr().out == (
        f"--- {old}\n+++ {old}\n@@ -1,2 +1,3 @@\n"
        '-cluster pod{device="cpu"   # ünicode\n-}\n\\ No newline at end of file\n'
        '+cluster pod {\n+  device = "cpu"  # ünicode\n+}\n'
    )
    old.write_bytes(NEW.encode())
    assert main(["--diff", str(old)]) == 0
    assert capsys.readouterr().out == ""


def test_a_mistake_is_told_and_the_file_stays_while_others_are_written(old: Path, capsys: Capture) -> None:
    wrong = old.with_name("wrong.rlg")
    wrong.write_text(WRONG, encoding="utf-8")
    assert main([str(wrong), str(old)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and wrong.read_text(encoding="utf-8") == WRONG and old.read_bytes() == NEW.encode()
    assert err.startswith(
        f"error[syntax]: expected a value, found `}}`\n --> {wrong}:1:24\n  |\n1 | {WRONG}  |                   "
        "     ^\n"
    )


def test_stdin_goes_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    stdin(monkeypatch, OLD.replace("\n", "\r\n").encode())
    assert main(["-"]) == 0
    assert capsys.readouterr() == (NEW, "")
    stdin(monkeypatch, OLD.encode())
    assert main(["-", "--check"]) == 1
    assert capsys.readouterr() == ("<stdin>\n", "")
    stdin(monkeypatch, WRONG.encode())
    assert main(["-", "--diagnostics", "json"]) == 1
    out, err = capsys.readouterr()
    (told,) = json.loads(err)
    assert out == "" and told["code"] == "syntax" and told["span"]["file"] == "<stdin>"
    stdin(monkeypatch, b"\xff")
    assert main(["-"]) == 1
    assert "`<stdin>` is not UTF-8 text" in capsys.readouterr().err


def test_what_cannot_be_read_is_a_fault(tmp_path: Path, capsys: Capture) -> None:
    # An algorithm of the package is no file to rewrite.
    assert main([str(tmp_path), str(tmp_path / "missing.rlg"), "grpo"]) == 1
    err = capsys.readouterr().err
    assert f"`{tmp_path}` cannot be read: is a directory" in err and err.count("cannot be read: no such file") == 2


def test_a_file_that_cannot_be_written_is_2_and_stays(
    old: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main([str(old)]) == 2
    assert capsys.readouterr().err == f"msrl-fmt: cannot write `{old}`: No space left on device\n"
    assert old.read_bytes() == OLD.encode() and list(old.parent.iterdir()) == [old]


def test_bad_usage_is_2() -> None:
    for arguments in ([], ["--chek", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
