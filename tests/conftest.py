"""What tests share: golden text (`pytest --update` writes what it would have compared with), and a place to run
programs in."""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path

import pytest
import sample
from place import ONE_RANK, THRICE, TRAINED, Place

# What is planned for this machine must not depend on what somebody measured of it.
os.environ["MSRL_HERE"] = ""
# Functions that are kept by value, too, lie in a folder of the tests.
os.environ["XDG_CACHE_HOME"] = _CACHE = tempfile.mkdtemp(prefix="msrl-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

_entry_points = importlib.metadata.entry_points


@wraps(_entry_points)
def _list_entry_points(**chosen: str) -> importlib.metadata.EntryPoints:
    """Without plug-ins: what tests expect must not depend on the packages that somebody has installed beside."""
    is_ours = chosen.get("group", "").startswith("msrl_graph.")
    return importlib.metadata.EntryPoints() if is_ours else _entry_points(**chosen)


importlib.metadata.entry_points = _list_entry_points

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite expected texts")
    parser.addoption("--sample", action="store_true", help="run every test function with a few of its cases")


def pytest_configure(config: pytest.Config) -> None:
    sample.begin(config.getoption("sample"))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests one worker runs under `--dist loadgroup`: those that share what takes long to start; a run of its own
    goes anywhere."""
    if config.getoption("sample"):
        items[:], others = sample.choose(items)
        config.hook.pytest_deselected(items=others)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "reference" in fixtures or "place" not in fixtures:
            group = "reference" if "reference" in fixtures else str(item.path.relative_to(TESTS).with_suffix(""))
            item.add_marker(pytest.mark.xdist_group(group))
            # xdist 3.8 writes the group where pytest 9.2 does not look any more: there each test was a group.
            if config.getoption("loadgroup", False) and hasattr(item, "_id"):
                item._id = type(item._id).parse(f"{item.nodeid}@{group}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The scheduler goes by the ends of ids. And the thousands of tests, and what they import, stay to the end: no
    collection need look through them."""
    gc.collect()
    gc.freeze()
    if session.config.getoption("loadgroup", False):
        for item in session.items:
            for mark in item.iter_markers("xdist_group"):
                assert item.nodeid.endswith(f"@{mark.args[0]}"), f"{item.nodeid} is in no group"


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update"))


@pytest.fixture
def golden(update: bool) -> Callable[[str, str], None]:
    """Compares a text with the golden file of that name."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden text {name}: run pytest --update"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _cleared(place: Place) -> None:
    for pid in place.processes():
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(place.temporary, ignore_errors=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    _cleared(place)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a recorded run on one rank, which others are compared with."""
    place = Place(tmp_path_factory.mktemp("one"))
    place.write(*ONE_RANK, *TRAINED)
    code, _, err = place.run("p.rlg", *THRICE, "--out", "one", "--record", "--measure-memory")
    assert code == 0, err
    place.assert_clean()
    yield place.folder / "one"
    _cleared(place)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models are small here, and workers are as many as cores: threads of torch would wait for each other's."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_stay() -> Iterator[None]:
    """Ranks that wait for another case keep memory that the next module's runs want."""
    yield
    if ranks := sys.modules.get("ranks"):
        ranks.end()
