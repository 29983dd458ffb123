"""The wheels for a machine without a network: what is downloaded, and Ray's wheel, which is packed again."""

import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from folders import ROOT
from packaging.requirements import Requirement

FOLDER = ROOT / "constraints"


@pytest.fixture(scope="module")
def wheels():
    """The module, by its path: it imports its neighbour."""
    sys.path.append(str(FOLDER))
    spec = spec_from_file_location("constraints_wheels", FOLDER / "wheels.py")
    spec.loader.exec_module(module := module_from_spec(spec))
    yield module
    sys.path.remove(str(FOLDER))


def write_wheel(folder, name, needs=(), files=()):
    """Write a wheel of version 1 with these requirements and files."""
    path = folder / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    content = {f"{name}/__init__.py": "VALUE = 1\n", **dict.fromkeys(files, "surplus" * 1000)}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{lines}"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*content, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
    return path


def test_what_the_machine_has_is_left_out(wheels, tmp_path, monkeypatch):
    needs = {
        "one": ["two>=2", "three", 'four; extra == "all"', "torch"],
        "two": ["five>=3", "six"],
        "three": [],
        "five": [],
    }
    asked = []

    def download(name, version, python, folder):
        asked.append((name, version))
        return write_wheel(tmp_path, name, needs[name]) if name in needs else None

    monkeypatch.setattr(wheels, "download", download)
    have = {"three": "", "two": "1.9", "five": "3.1"}
    missing = wheels.collect([Requirement("one")], have, {"one": "1.0", "two": "2.0"}, "3.12", tmp_path)
    assert sorted(asked) == [("one", "1.0"), ("six", ""), ("two", "2.0")]
    assert missing == ["six"]


def test_rays_wheel_is_smaller_and_pip_installs_it(wheels, tmp_path):
    files = ("ray/jars/ray_dist.jar", "ray/dashboard/client/index.html")
    path = write_wheel(tmp_path, "ray", files=files)
    before = path.stat().st_size
    wheels.pack_again(path)
    assert path.stat().st_size < before / 5
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        tmp_path / "site",
    ]
    subprocess.run([*install, path], check=True, timeout=120)
    assert (tmp_path / "site" / "ray" / "__init__.py").read_text() == "VALUE = 1\n"
    assert not (tmp_path / "site" / "ray" / "jars").exists()
