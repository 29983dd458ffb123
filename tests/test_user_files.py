"""The user's Python files: which ones a run takes, and that every process goes on with them as they were."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from msrl_graph.runtime.driver import user_modules
from msrl_graph.runtime.driver.edited import Edited
from msrl_graph.runtime.process import shipped
from msrl_graph.runtime.process.shipped import File

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
    shipped.lay_in(run, {str(p): File(p.read_bytes(), p.stat().st_mtime_ns) for p in user_modules.modules(reward)})
    for name in TAKEN:
        (tmp_path / name).write_text("raise RuntimeError('this was written later')\n")
    (tmp_path / "mine" / "chosen.py").unlink()
    (tmp_path / "elsewhere" / "json.py").unlink()
    path = os.pathsep.join([str(tmp_path / "elsewhere"), str(Path(__file__).parent.parent)])
    code = f"""
        import traceback
        from msrl_graph.runtime.process import shipped
        shipped.use({str(run)!r})
        module = shipped.module({str(reward)!r})
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
    helper, folder = reward.with_name("chosen.py"), tmp_path / "attempt"
    files = {str(p): File(p.read_bytes(), p.stat().st_mtime_ns) for p in (reward, helper)}
    shipped.lay_in(folder, files)
    assert shipped.laid(folder) == files
    edited = Edited(folder, ())
    os.utime(reward)  # written, and the same
    assert list(edited.look()) == []
    helper.write_text("ONE = 7\n")
    what = "after the run began; the run keeps using it as it was, --resume takes it as it is then"
    assert list(edited.look()) == [f"{helper} was edited {what}"] and list(edited.look()) == []
    told = Edited.told(folder, ())
    assert told == (str(helper),)
    shipped.lay_in(tmp_path / "next", files)
    after = Edited(tmp_path / "next", told)
    assert list(after.look()) == []
    reward.unlink()
    assert list(after.look()) == [f"{reward} was removed {what}"]
    assert Edited.told(tmp_path / "next", told) == (str(helper), str(reward))
