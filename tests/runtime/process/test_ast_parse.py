"""Threads of a run's processes may parse Python at once, whatever the version of Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

from msrl_graph.runtime.process.ast_parse import FIXED_IN

PARSE = """
import ast, gc, inspect, os, sys, threading
{first}
text = inspect.getsource(inspect)
gc.set_threshold(50)
gc.callbacks.append(lambda phase, facts: None)  # Python's own code, in which another thread gets its turn
sys.setswitchinterval(1e-5)
failed = []

def parse():
    for _ in range(4):
        try:
            ast.parse(text)
        except SystemError as error:
            failed.append(error)

threads = [threading.Thread(target=parse) for _ in range(4)]
for thread in threads:
    thread.start()
{meanwhile}
for thread in threads:
    thread.join()
print(len(failed))
"""
FORKS = """
for _ in range(3):
    if not (child := os.fork()):
        ast.parse("1")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def failed(first: str, meanwhile: str = "") -> int:
    program = PARSE.format(first=first, meanwhile=meanwhile)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.version_info >= FIXED_IN, reason="this Python keeps threads apart itself")
def test_threads_that_parse_at_once_get_in_each_others_way_in_an_old_python() -> None:
    assert any(failed("") for _ in range(5))


def test_threads_of_a_run_parse_one_at_a_time() -> None:
    assert not any(failed("import msrl_graph.runtime.process") for _ in range(3))


def test_a_process_that_is_forked_while_a_thread_parses_can_parse() -> None:
    assert failed("import msrl_graph.runtime.process", FORKS) == 0
