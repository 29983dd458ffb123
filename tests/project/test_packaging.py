"""What pyproject.toml declares: a wheel has all files of the package, and its entry points exist."""

import re
import tomllib
from importlib import import_module

import pytest
from folders import ROOT

from msrl_graph.hardware.stacks import STACKS

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = DECLARED["project"]
LEXERS = PROJECT["entry-points"]["pygments.lexers"]


def test_a_wheel_has_all_files_of_the_package():
    """`make test-wheel` builds one; here it is read from the patterns, which name each kind of file."""
    patterns = DECLARED["tool"]["setuptools"]["package-data"]["msrl_graph"]
    packed = {path for pattern in patterns for path in (ROOT / "msrl_graph").glob(pattern)}
    files = [path for path in (ROOT / "msrl_graph").rglob("*.*") if "__pycache__" not in path.parts]
    missing = [str(path.relative_to(ROOT)) for path in files if path.suffix != ".py" and path not in packed]
    assert not missing, f"add patterns to `package-data` in pyproject.toml for {missing}"
    bare = {path.parent for path in files if path.suffix == ".py" and not (path.parent / "__init__.py").is_file()}
    assert not bare, "setuptools finds only folders with an __init__.py"


@pytest.mark.parametrize("target", [*PROJECT["scripts"].values(), *LEXERS.values()])
def test_an_entry_point_exists(target):
    module, _, name = target.partition(":")
    assert callable(getattr(import_module(module), name))


def test_versions_of_python_are_those_that_are_tried():
    """`make test-wheel` tries each classifier's version; the CPU stack is locked for them; the README names them."""
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert tuple(versions) == STACKS["cpu"].pythons
    assert PROJECT["requires-python"] == f">={versions[0]}"
    listed = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    assert listed in (ROOT / "README.md").read_text(encoding="utf-8")
