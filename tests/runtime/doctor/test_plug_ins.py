"""The plug-ins of installed packages, and what is said of those that cannot be used."""

import importlib.metadata
import json
import os
import subprocess
import sys

from folders import ROOT
from machines import cpu

from msrl_graph.files import plugins
from msrl_graph.runtime.doctor.examine import judge
from msrl_graph.runtime.doctor.plug_ins import COMMAND

LINE = " ".join(COMMAND)


def told(said):
    return [(f.state, f.told, f.next) for f in judge([cpu(said={LINE: said}).host()]) if f.check == "plug-ins"]


def install(tmp_path, **entries):
    """A package with these entry points, by group."""
    installed = tmp_path / "other_plug_ins-2.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plug-ins\nVersion: 2.1\n")
    (installed / "entry_points.txt").write_text(
        "".join(f"[msrl_graph.{group}]\n{line}\n" for group, line in entries.items())
    )


def listed(tmp_path):
    """What the command prints of the package that is installed there; the environment may have others."""
    command = [sys.executable, *COMMAND[1:]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *before, last = done.stdout.splitlines()
    own = [entry for entry in json.loads(last) if entry["source"] == "other-plug-ins 2.1"]
    return "\n".join((*before, json.dumps(own)))


def test_a_machine_without_plug_ins_is_told_nothing():
    assert told("\n[]\n") == []


def test_plug_ins_are_listed_by_package_and_others_with_their_error(tmp_path):
    (tmp_path / "other_engine.py").write_text("print('loading')\nraise RuntimeError('no such device')\n")
    (tmp_path / "other_functions.py").write_text("")
    install(
        tmp_path,
        engines="hf = other_engine:SPEC\nother = other_engine:SPEC",
        functions="other = other_functions",
        devices="other = other_functions:DEVICE",
    )
    printed = listed(tmp_path)
    assert told(printed) == [
        ("warning", "the plug-in `hf` of the package other-plug-ins 2.1 is not used: the name is taken",
         "report it to the authors of other-plug-ins"),
        ("warning", "the plug-in `other` of the package other-plug-ins 2.1 cannot be loaded: RuntimeError: no such "
         "device", "install the package again, or remove it: pip uninstall other-plug-ins"),
        ("warning", "the plug-in `other` of the package other-plug-ins 2.1 cannot be loaded: AttributeError: module "
         "'other_functions' has no attribute 'DEVICE'",
         "install the package again, or remove it: pip uninstall other-plug-ins"),
        ("ok", "other-plug-ins 2.1 has functions other", ""),
    ]  # fmt: skip
    entry = json.loads(printed.splitlines()[-1])[0]
    assert (entry["kind"], entry["name"]) == ("engines", "hf")


def test_what_tests_find_does_not_depend_on_installed_plug_ins(tmp_path, monkeypatch):
    install(tmp_path, engines="other = other_engine:SPEC")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("other-plug-ins") == "2.1"
    assert plugins.find_entry_points.__wrapped__("msrl_graph.engines") == {}
    assert importlib.metadata.entry_points(group="pytest11")


def test_a_plug_in_that_hangs_or_ends_its_process_is_reported():
    command = f"python {' '.join(COMMAND[1:])}"
    look = f"see its output: {command}"
    assert told(("hung", "")) == [("warning", f"`{command}` did not end within 30 s", look)]
    assert told((7, "bye\n")) == [("warning", f"`{command}` reports: bye", look)]
