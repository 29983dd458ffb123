"""`ray job submit`: of a job that Ray's dashboard starts, the exit status and the log come back, and nothing is left of
one that is stopped."""

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from hosts import RAY, Hosts, possible
from place import MINE, ONE_RANK, SMALL, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2"),
    pytest.mark.skipif(find_spec("opencensus") is None, reason="jobs need ray[default]: make test-jobs"),
]


def test_a_job_ends_as_its_run_does_and_leaves_nothing_when_it_is_stopped(place):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = Hosts(1, dashboard=port)
    address = {"RAY_ADDRESS": f"http://{made.ip(0)}:{port}", "TMPDIR": str(place.temporary)}
    main = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
    entry = [sys.executable, "-c", main, str(place.folder / "p.rlg"), *SMALL]

    def job(*words):
        done = subprocess.run(
            [*made.on(0), *RAY, "job", *words],
            env={**os.environ, **made.environment, **address},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    try:
        until = time.monotonic() + 60
        while job("list")[0] and time.monotonic() < until:
            time.sleep(1)
        place.write(*ONE_RANK, evaluated=False)
        code, said = job("submit", "--", *entry, "--iterations", "1", "--out", str(place.folder / "one"))
        assert code == 0 and "iteration 0 (1 of 1)  reward " in said and len(metrics(place.folder / "one")) == 1, said
        code, said = job("submit", "--", *entry, "--set", "promptz=8")
        assert code == 1 and "failed with exit code 1" in said and "error[unknown-name]" in said, said
        # It stands still, so that Ray has to kill it.
        place.function("time.sleep(600)")
        place.write(*ONE_RANK, MINE, evaluated=False)
        out = place.folder / "stopped"
        assert not job("submit", "--no-wait", "--submission-id", "s", "--", *entry, "--out", str(out))[0]
        until = time.monotonic() + 100
        while not (out / "plan.json").exists() and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(2)
        assert job("stop", "s")[0] == 0 and "STOPPED" in job("status", "s")[1].upper()
        assert not made.left()
        until = time.monotonic() + 20
        while (left := [*place.temporary.iterdir()]) and time.monotonic() < until:
            time.sleep(0.5)
        assert not left
    finally:
        made.close()
