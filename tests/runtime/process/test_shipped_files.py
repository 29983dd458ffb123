"""The user's Python files: which ones a run takes, and that every process goes on with them as they were."""

import os
import subprocess
import sys
import textwrap

import pytest
from folders import ROOT

from msrl_graph.cli import compile_main
from msrl_graph.runtime.driver import user_modules
from msrl_graph.runtime.driver.changed_files import ChangedFiles
from msrl_graph.runtime.process import shipped_files
from msrl_graph.runtime.process.shipped_files import ShippedFile

WRITTEN = {
    "mine/reward.py": """
        import importlib.resources
        import json
        import lib.deep.scale
        import numpy
        from lib import offset
        from shared.scores import best
        chosen = importlib.import_module("chosen")

        def score(response: str) -> float:
            computed = importlib.import_module("comp" + "uted")
            words = importlib.resources.files("pack").joinpath("words.txt").read_text()
            return (lib.deep.scale.BY, offset.ADD, best(), chosen.ONE, computed.TWO, len(words))
    """,
    "mine/chosen.py": "import pack\nONE = pack.ONE\n",
    "mine/computed.py": "TWO = 2\n",
    "mine/unasked.py": "raise SystemExit\n",
    "mine/pack/__init__.py": "ONE = 1\n",
    "mine/pack/by_any_name.py": "",
    "mine/lib/deep/scale.py": "from ..offset import ADD\nBY = 10 * ADD\n",  # folders without __init__.py
    "mine/lib/offset.py": "ADD = 1\n",
    "mine/lib/unasked.py": "raise SystemExit\n",
    "elsewhere/shared/__init__.py": "",
    "elsewhere/shared/scores.py": "from . import table\n\n\ndef best():\n    return 6 / table.SIX\n",
    "elsewhere/shared/table.py": "SIX = 6\n",
    "elsewhere/shared/unasked.py": "raise SystemExit\n",
    "elsewhere/json.py": "raise SystemExit\n",
}
TAKEN = {name for name in WRITTEN if name.rpartition("/")[2] not in ("unasked.py", "computed.py", "json.py")}


@pytest.fixture
def reward(tmp_path, monkeypatch):
    for name, text in WRITTEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "mine" / "pack" / "words.txt").write_text("words")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    return tmp_path / "mine" / "reward.py"


def test_a_run_takes_what_a_file_imports_from_the_users_folders(reward, tmp_path):
    assert {p.relative_to(tmp_path).as_posix() for p in user_modules.modules(reward)} == TAKEN


def test_a_process_uses_the_files_as_they_were_taken(reward, tmp_path):
    """Whatever was written into them since, and though some are gone."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    shipped_files.write_files(
        run, {str(p): ShippedFile(p.read_bytes(), p.stat().st_mtime_ns) for p in user_modules.modules(reward)}
    )
    for name in TAKEN:
        (tmp_path / name).write_text("raise RuntimeError('this was written later')\n")
    (tmp_path / "mine" / "chosen.py").unlink()
    (tmp_path / "elsewhere" / "json.py").unlink()
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT)])
    code = f"""
        import traceback
        from msrl_graph.runtime.process import shipped_files
        shipped_files.use_folder({str(run)!r})
        module = shipped_files.import_file({str(reward)!r})
        print(module.score(""))
        module.lib.deep.scale.BY = None
        __import__("sys").modules["shared.table"].SIX = 0
        try:
            module.score("")
        except ZeroDivisionError:
            traceback.print_exc(file=__import__("sys").stdout)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, cwd="/",
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, _, trace = done.stdout.partition("\n")
    assert first == "(10, 1, 1.0, 1, 2, 5)"
    assert f'File "{tmp_path}/elsewhere/shared/scores.py", line 5, in best\n    return 6 / table.SIX' in trace
    assert str(run) not in trace and "later" not in trace


def test_an_edited_file_is_told_of_once_whoever_drives(reward, tmp_path):
    helper = reward.with_name("chosen.py")
    folder = tmp_path / "attempt"
    files = {str(p): ShippedFile(p.read_bytes(), p.stat().st_mtime_ns) for p in (reward, helper)}
    shipped_files.write_files(folder, files)
    assert shipped_files.read_shipped(folder) == files
    edited = ChangedFiles(folder, ())
    os.utime(reward)  # written, and the same
    assert list(edited.look()) == []
    helper.write_text("ONE = 7\n")
    what = "after the run began; the run keeps using the original, --resume will use the new state"
    assert list(edited.look()) == [f"{helper} was edited {what}"] and list(edited.look()) == []
    told = ChangedFiles.list_reported(folder, ())
    assert told == (str(helper),)
    shipped_files.write_files(tmp_path / "next", files)
    after = ChangedFiles(tmp_path / "next", told)
    assert list(after.look()) == []
    reward.unlink()
    assert list(after.look()) == [f"{reward} was removed {what}"]
    assert ChangedFiles.list_reported(tmp_path / "next", told) == (str(helper), str(reward))


POOL = """
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

def one(x):
    return x + 1

class Item:
    pass

def forked():
    with multiprocessing.Pool(1) as pool:
        return sum(pool.map(one, [1, 2]))

def spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return sum(pool.map(one, [1, 2]))

def executed():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(one, [1, 2]))

def pickled():
    return 5 * isinstance(pickle.loads(pickle.dumps(Item())), Item)
"""


@pytest.mark.parametrize("taken", [False, True])
def test_what_a_file_defines_can_be_pickled(taken, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(POOL)
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    shipped_files.write_files(run, {str(path): ShippedFile(path.read_bytes(), path.stat().st_mtime_ns)})
    (tmp_path / "main.py").write_text(
        textwrap.dedent(f"""
        from msrl_graph.runtime.process import shipped_files
        if __name__ == "__main__":
            if {taken}:
                shipped_files.use_folder({str(run)!r})
            mine = shipped_files.import_file({str(path)!r})
            print(mine.forked(), mine.spawned(), mine.executed(), mine.pickled())
        """)
    )
    command = [sys.executable, str(tmp_path / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["5"] * 4, done.stderr


def test_a_file_of_a_package_may_import_beside_it(tmp_path):
    """What the package begins with is run first, as Python does."""
    for name, text in {
        "judges/__init__.py": "BASE = 1\n",
        "judges/table.py": "TWO = 2\n",
        "judges/deep/__init__.py": "",
        "judges/deep/reward.py": "from .. import BASE\nfrom ..table import TWO\nfrom . import near\n"
        "def score(): return BASE + TWO + near.THREE\n",
        "judges/deep/near.py": "THREE = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / "judges" / "deep" / "reward.py"
    taken = {p.relative_to(tmp_path / "judges").as_posix() for p in user_modules.modules(path)}
    assert taken == {"__init__.py", "table.py", "deep/__init__.py", "deep/reward.py", "deep/near.py"}
    code = f"""
        import sys
        from msrl_graph.runtime.process import shipped_files
        if sys.argv[1]:
            shipped_files.use_folder(sys.argv[1])
        module = shipped_files.import_file({str(path)!r})
        print(module.score(), module.__name__, module.__file__)
    """
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    shipped_files.write_files(
        run, {str(p): ShippedFile(p.read_bytes(), p.stat().st_mtime_ns) for p in user_modules.modules(path)}
    )
    for folder in ("", str(run)):
        command = [sys.executable, "-c", textwrap.dedent(code), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split() == ["6", "judges.deep.reward", str(path)], done.stderr


def test_two_files_of_one_name_are_two_modules_and_one_file_is_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "judge_of_two.py").write_text(f"NAME = {name!r}\n")
    a, b = (shipped_files.import_file(str(tmp_path / name / "judge_of_two.py")) for name in ("a", "b"))
    assert (a.NAME, b.NAME) == ("a", "b") and sys.modules[a.__name__] is a and sys.modules[b.__name__] is b
    assert shipped_files.import_file(str(tmp_path / "a" / "judge_of_two.py")) is a


def test_an_edit_that_bytecode_files_cannot_tell_is_seen(tmp_path, monkeypatch):
    """Of the same size and in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "judge_of_a_moment.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1e9, 1e9))
        assert value == shipped_files.import_file(str(file)).VALUE
    assert not (tmp_path / "__pycache__").exists()


def test_a_path_relative_to_a_package_is_found_there(tmp_path, monkeypatch):
    package = tmp_path / "judges_of_three"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scores.py").write_text("THREE = 3\n")
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = shipped_files.import_file("scores.py")
    assert (module.THREE, module.__name__) == (3, "judges_of_three.scores")
    assert shipped_files.import_file(str(package / "scores.py")) is module


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("from functools import partial\nscore = partial(max, 1)", "assigned"),
        ("class score:\n    def __call__(self): ...", "a class"),
        ("from elsewhere import best as score", "imported"),
        ("a, score = 1, 2", "assigned"),
    ],
)
def test_what_is_no_function_is_told_as_what_it_is_and_the_fix_helps(source, kind, tmp_path, capsys):
    example = ROOT / "examples" / "arithmetic"
    text = (example / "grpo.rlg").read_text().replace("exact_match()", '"mine.py:score"')
    (tmp_path / "p.rlg").write_text(text.replace('"./model"', f'"{example}/model"').replace('"t', f'"{example}/t'))
    (tmp_path / "mine.py").write_text(source)
    assert compile_main([str(tmp_path / "p.rlg"), "--check"]) == 1
    told = capsys.readouterr().err
    assert f"`score` is {kind} in `mine.py`, but files are only parsed, not run, before a run starts" in told
    assert "write `def score(…)` there, with the columns as parameters, that returns the result" in told
    (tmp_path / "mine.py").write_text(f"{source}\nother = score\ndef score(response, answer): return 1.0\n")
    assert compile_main([str(tmp_path / "p.rlg"), "--check"]) == 0
