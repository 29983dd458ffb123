"""Stacks: what is locked is what they say, what this package asks for is what pyproject.toml says, and what cannot be
in one environment."""

import os
import socket
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from folders import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from msrl_graph.backends import ENGINES
from msrl_graph.hardware.device_kinds import DEVICE_KINDS
from msrl_graph.hardware.stacks import PYTHON, RELEASES, STACKS, find_conflict

OF_ENGINES = [release for spec in ENGINES.values() for release in spec.packages.releases]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
sys.path.insert(0, str(ROOT / "constraints"))
import resolve  # noqa: E402


@pytest.mark.parametrize("stack", STACKS.values(), ids=str)
def test_a_lock_has_the_pins_of_its_stack(stack):
    held = resolve.locked(ROOT / "constraints" / f"{stack.name}.txt")
    assert stack.pins.items() <= held.items()
    assert set(stack.kinds) <= set(DEVICE_KINDS)
    assert set(stack.extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("stack", STACKS.values(), ids=str)
def test_a_lock_has_what_the_project_asks_for(stack):
    held = resolve.locked(ROOT / "constraints" / f"{stack.name}.txt")
    asked = PROJECT["dependencies"] + [r for extra in stack.extras for r in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, asked):
        version = held.get(canonicalize_name(requirement.name), "none, see make resolve")
        assert version in requirement.specifier, requirement


def test_what_this_package_wants_is_what_pyproject_says():
    stated = {r.name: r.specifier for r in map(Requirement, PROJECT["optional-dependencies"]["run"])}
    (own,) = (r for r in RELEASES if r.package == PROJECT["name"])
    stated[PYTHON] = SpecifierSet(PROJECT["requires-python"])
    assert {package: SpecifierSet(wanted) for package, wanted in own.wants.items()} == {p: stated[p] for p in own.wants}


def test_the_lowest_stack_has_the_lowest_versions():
    held = resolve.locked(ROOT / "constraints" / "torch210.txt")
    for requirement in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["run"]):
        version = held[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
        (least,) = (specifier.version for specifier in requirement.specifier)
        # transformers asks for a later one
        assert version.startswith(least) or requirement.name in {"tokenizers"}, requirement


def test_what_a_release_wants_can_be_had():
    wanted = [text for release in (*RELEASES, *OF_ENGINES) for text in release.wants.values()]
    assert not [text for text in wanted if SpecifierSet(text).is_unsatisfiable()]


def test_what_cannot_be_in_one_environment():
    engines = ["msrl-graph", "torch", "vllm", "vllm-ascend", "mindspeed", "ray-ascend"]
    assert find_conflict(engines, OF_ENGINES) is None
    # Each two of these go together, by one release of Megatron-Bridge or the other, and all three do not.
    three = ["msrl-graph", "ray-ascend", "megatron-bridge"]
    assert all(find_conflict([p for p in three if p != left], OF_ENGINES) is None for left in three)
    assert str(find_conflict(three, OF_ENGINES)) == (
        "Python: ray-ascend 0.1 wants >= 3.10, < 3.12 (ray-ascend, README) and megatron-bridge 0.6.0 wants >= 3.12, "
        "< 3.13 (Megatron-Bridge 0.6.0, pyproject.toml)"
    )
    assert find_conflict([]) is find_conflict(["ray-ascend"]) is find_conflict(["unknown", "msrl-graph"]) is None


def test_the_releases_of_a_stack_go_together():
    for stack in STACKS.values():
        assert find_conflict(["msrl-graph", *stack.pins, *stack.elsewhere], OF_ENGINES) is None


class EmptyIndex(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)

    def log_message(self, *given):
        pass


def resolve_by(index, folder):
    """Resolve a stack with uv from an index; return the exit status and the output."""
    settings = {"UV_DEFAULT_INDEX": index, "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(folder), "NO_PROXY": "127.0.0.1"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    command = [sys.executable, str(ROOT / "constraints" / "resolve.py"), "cuda"]
    done = subprocess.run(command, env=others | settings, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def test_packages_that_do_not_resolve_are_an_error(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyIndex) as server:
        Thread(target=server.serve_forever).start()
        status, output = resolve_by(f"http://127.0.0.1:{server.server_port}/simple", tmp_path)
        server.shutdown()
    assert status == 1 and "cuda, Python 3.11, x86_64-manylinux_2_28: does not resolve" in output
    assert "torch was not found" in output


def test_an_index_out_of_reach_is_no_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    status, output = resolve_by(f"http://127.0.0.1:{port}/simple", tmp_path)
    assert status == 0 and output.startswith("cuda: not resolved, since the index cannot be reached\n"), output


def test_a_package_that_is_not_locked_is_told(monkeypatch, capsys, tmp_path):
    lock = tmp_path / "cpu.txt"
    lock.write_text("# words\nJinja2==3.1.6\nast_serialize==0.1\n")
    monkeypatch.setattr(resolve, "HERE", tmp_path)
    found = {"jinja2": "3.1.6", "ast-serialize": "0.1"}
    monkeypatch.setattr(resolve, "resolved", lambda *of: found)
    assert resolve.look(STACKS["cpu"])
    found["six"] = "1.17.0"
    assert not resolve.look(STACKS["cpu"])
    assert "not locked: six" in capsys.readouterr().out
