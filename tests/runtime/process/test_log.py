"""Lines of logs begin with their process and node, in whatever pieces they are written."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.runtime.process.log import PrefixedStream


@given(st.lists(st.text(alphabet="ab\n", max_size=6), max_size=8))
def test_each_line_has_one_head(pieces):
    read, write = os.pipe()
    lines = PrefixedStream(write, "rank 0")
    lines.node = "RUN actor.update in train/3"
    for piece in pieces:
        assert lines.write(piece) == len(piece)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        written = file.read().decode()
    text = "".join(pieces)
    assert [line.split(" | ", 1)[1] for line in written.splitlines()] == text.splitlines()
    assert all(line[8:].startswith(" rank 0 RUN actor.update in train/3 | ") for line in written.splitlines())
    assert written.endswith("\n") == text.endswith("\n")


def test_all_that_a_process_prints_goes_to_its_file(tmp_path):
    script = (
        "import os, sys, warnings\n"
        "from msrl_graph.runtime.process import log\n"
        f"log.redirect_output({str(tmp_path / 'logs' / 'x.log')!r}, 'functions of host 0')\n"
        "print('before'); log.set_node('host.reward in train/1'); print('mine'); warnings.warn('careful'); os.write(2, "
        "b'from C\\n')\n"
        "raise SystemExit('end')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
    lines = (tmp_path / "logs" / "x.log").read_text().splitlines()
    assert lines[0].endswith("functions of host 0 | before") and lines[1].endswith(
        "functions of host 0 host.reward in train/1 | mine"
    )
    assert any("careful" in line for line in lines) and "from C" in lines
