"""Which runs fork their ranks from a process that has imported what they need, and that they do."""

import pytest
from patched import patched
from place import EXAMPLE, SMALL

from msrl_graph.compiler.pipeline import compile
from msrl_graph.runtime.driver import preloading

LOADED = """
import os
with open({file!r}, "a") as loads:
    loads.write(f"{{os.getpid()}}\\n")
"""


def test_the_modules_of_the_example_are_those_of_its_engines_and_its_models():
    assert preloading.modules(compile(EXAMPLE / "grpo.rlg")) == [
        "msrl_graph.runtime.rank.rank",
        "msrl_graph.backends.fsdp",
        "msrl_graph.backends.hf",
        "transformers.models.qwen2.modeling_qwen2",
    ]


@pytest.mark.slow
def test_two_ranks_load_their_modules_once(place):
    place.write(evaluated=False)
    file = place.folder / "loads.txt"
    variables = patched(place, preloading.RANK, LOADED.format(file=str(file)))
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out", **variables)
    assert code == 0, err
    assert len(file.read_text().split()) == 1
    place.assert_clean()


@pytest.mark.slow
def test_a_run_whose_server_is_killed_at_once_goes_on_as_if_there_were_none(place):
    place.write(evaluated=False)
    file = place.folder / "loads.txt"
    killed = LOADED + "os.kill(os.getpid(), 9) if 'MSRL_PRELOAD' not in os.environ else None\n"
    variables = patched(place, preloading.RANK, killed.format(file=str(file)))
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out", **variables)
    assert code == 0, err
    assert len(file.read_text().split()) == 3
    place.assert_clean()
