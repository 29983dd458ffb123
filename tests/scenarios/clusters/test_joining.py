"""Runs on a Ray cluster of several hosts, each with an address and a view of the disk of its own; and clusters that
cannot be joined."""

import http.server
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from hosts import Hosts, inner, possible
from place import EXAMPLE, ONE_RANK, SMALL, metrics
from two_hosts import TWO

from msrl_graph import compile
from msrl_graph.runtime.driver import dock_monitor
from msrl_graph.runtime.process import cluster_join
from msrl_graph.runtime.weights.checkpoint import verify


@pytest.fixture(scope="module")
def plan():
    return compile("grpo", model="tiny")


def refused(address, plan):
    with pytest.raises(cluster_join.NoResources) as caught:
        cluster_join.check_cluster(address, plan.cluster.span)
    return caught.value.diagnostics[0].message


def test_an_address_where_nothing_listens_is_told_at_once(plan):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    begin = time.monotonic()
    assert refused(f"127.0.0.1:{port}", plan) == f"no Ray cluster at 127.0.0.1:{port} (RAY_ADDRESS): connection refused"
    assert refused("no-such-host.invalid:6379", plan).startswith(
        "no Ray cluster at no-such-host.invalid:6379 (RAY_ADDRESS): "
    )
    assert (
        refused("ray://127.0.0.1:10001", plan)
        == "RAY_ADDRESS is ray://127.0.0.1:10001, but a run must be started on a machine of the cluster"
    )
    assert time.monotonic() - begin < cluster_join.CONNECT
    cluster_join.check_cluster("auto", plan.cluster.span)


def test_what_answers_and_is_no_ray_is_told(plan, monkeypatch):
    monkeypatch.setattr(cluster_join, "GREET", 1.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert refused(address, plan) == f"the server at {address} (RAY_ADDRESS) is not a Ray cluster"
        server.shutdown()


@pytest.fixture
def command(place):
    """The start of a run of the place's program on a host."""

    def start(made, host, *arguments, **environment):
        main = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
        words = [*made.on(host, place.folder), sys.executable, "-c", main, "p.rlg", *SMALL, *arguments]
        variables = {**os.environ, "TMPDIR": str(place.temporary), "RAY_ADDRESS": made.address, **environment}
        heed = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # whatever nohup has the tests ignore
        return subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True, preexec_fn=heed)

    return start


def ended(process):
    _, err = process.communicate(timeout=200)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
def test_a_host_that_lacks_what_cannot_be_shipped_is_told_and_what_can_be_is(place, command):
    """Of a cluster whose hosts' names have the address of the loopback, and whose ranks speak by an interface that the
    program states."""
    shared = place.folder / "shared"
    own = place.folder / "own"
    shutil.copytree(EXAMPLE / "model", own / "model")
    place.function("import beside\n    return beside.score(response, answer)")
    (place.folder / "mine.py").rename(own / "mine.py")
    (own / "beside.py").write_text("def score(response, answer):\n    return float(response == answer)\n")
    once = ["--iterations", "1"]
    mine = ("call = exact_match()", 'call = "own/mine.py:score"')
    place.write(*TWO, ('"./model"', '"./own/model"'), evaluated=False)
    made = Hosts(2, hidden=[own], twice=True)
    try:
        code, err = ended(command(made, 0, *once, "--out", str(shared), RAY_AUTH_MODE="disabled"))
        assert (
            code == 3 and f"the Ray cluster at {made.address} requires a token that this process does not have" in err
        ), err
        code, err = ended(command(made, 0, *once, "--out", str(own / "out"), **made.environment))
        told, *table = err[err.index("error[") :].splitlines()[:4]
        assert (
            code == 3
            and told
            == "error[host-differs]: model policy differs from this machine's, or is missing, on a host that reads it"
        ), err
        assert [line.split() for line in table] == [
            ["host", "model", "policy"],
            [made.ip(0), "present"],
            [made.ip(1), "none", "!"],
        ]
        assert not (own / "out").exists()
        place.write(*TWO, mine, ("cluster two {", 'cluster two { interface = "eth1",'), evaluated=False)
        before = made.wire("eth1")
        code, err = ended(command(made, 0, *once, "--out", str(shared), **made.environment))
        assert code == 0, err
        assert metrics(shared)[0]["rows"] == 32 and not verify(shared / "checkpoints" / "000001").hosts
        away = sum(v for k, v in metrics(shared)[0]["dock_bytes"].items() if k.endswith(" get away"))
        trace = json.loads((shared / "trace.json").read_text())["traceEvents"]
        fetched = [e for e in trace if e["name"].startswith("rows from host ")]
        assert sum(e["args"]["bytes"] for e in fetched) == away > 0
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
        assert all(lanes[e["pid"], e["tid"]] == f"dock, host {e['args']['host']}" for e in fetched)
        # A gradient of the model has some 100 kB, which each sends to the other.
        assert all(b > a + 100_000 for a, b in zip(before, made.wire("eth1"), strict=True))
        assert not made.left()
        made.stop(1)
        code, err = ended(command(made, 0, *once, "--out", str(place.folder / "again"), **made.environment))
        assert code == 3 and "the plan asks for 2 hosts of 1 CPU; Ray has 1 host, 1 CPU in all" in err, err
    finally:
        made.close()


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
@pytest.mark.long
def test_two_runs_on_a_cluster_do_not_meet_and_who_finds_no_devices_is_told_who_has_them(place, command):
    """One is driven from a host that has no devices, the other from a host that is not the head."""
    place.write(*ONE_RANK, evaluated=False)
    made = Hosts(3, cpus=(1, 1, 0), preloaded=True)
    long = place.folder / "long"
    short = place.folder / "short"
    try:
        first = command(made, 2, "--iterations", "100000", "--out", str(long), **made.environment)
        place.wait_for_lines("long", 2)
        code, err = ended(command(made, 1, "--iterations", "2", "--out", str(short), **made.environment))
        assert code == 0 and len(metrics(short)) == 2, err
        place.write(*TWO, evaluated=False)
        code, err = ended(command(made, 0, "--out", str(place.folder / "none"), **made.environment))
        assert code == 3, err
        told = err[err.index("error[") :].splitlines()
        assert told[0] == (
            "error[no-resources]: the plan asks for 2 hosts of 1 CPU; Ray has 3 hosts, 2 CPU in all, 1 of them free"
        )
        assert f"  msrl-run arithmetic, into {long} has 1 CPU" in told[1:5]
        assert f"  {made.ip(2)} has 0 of 0 CPU free" in told[1:5]
        assert "= help: wait for the end of the run that has them, or end it" in err
        assert first.poll() is None
        os.kill(inner(first.pid), signal.SIGHUP)
        assert ended(first)[0] == 129
        assert not made.left()
    finally:
        made.close()


@pytest.mark.parametrize("begun", [[3], [3, 9], [3, 9, 20]])
def test_a_process_of_which_ray_hears_nothing_more_is_not_waited_for_long(monkeypatch, begun):
    """As after a link was cut while it began. Processes that begin one after the other are waited for."""
    clock = SimpleNamespace(now=0.0)

    def wait(asked, num_returns, timeout):
        clock.now = max(clock.now, min(max(asked), clock.now + timeout))
        assert clock.now < 1000, "it waits for ever"
        return [a for a in asked if a <= clock.now], [a for a in asked if a > clock.now]

    monkeypatch.setattr(dock_monitor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ray = SimpleNamespace(wait=wait)
    asked = {f"rank {i}": took for i, took in enumerate(begun)}
    dock_monitor.wait_until_begun(ray, asked, [])
    assert clock.now == begun[-1]
    clock.now = 0.0
    with pytest.raises(dock_monitor.HostLost) as caught:
        dock_monitor.wait_until_begun(ray, asked | {"dock of host 1": math.inf}, [])
    told = 10 * math.ceil(begun[-1] / 10)  # the driver looks as often
    since = max(dock_monitor.BEGIN, 3 * told)
    assert since < clock.now <= since + dock_monitor.SILENT
    assert str(caught.value) == f"dock of host 1 has not begun in {clock.now:.0f} s; all others had in {told} s"


@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
@pytest.mark.parametrize(
    "when",
    [
        *(pytest.param(x, marks=pytest.mark.long) for x in ("probed", "ranks start", "ranks start, and it is back")),
        "checkpoint",
    ],
)
def test_a_run_goes_on_with_the_hosts_that_are_left(place, command, when):
    """A host is killed while it is asked what it has, or its link is cut later: it is missed long before Ray misses it,
    and the program, which states no layout, is planned anew for one host. One that is killed and has Ray again at once
    is missed too, and the ranks that wait for its own do not wait on. Each row enters the update once."""
    out = place.folder / "out"
    open_ = [("  layout actor.update   { dp = 2, zero = 3 }\n", ""), ("  layout actor.generate { tp = 2 }\n", "")]
    place.write(
        *TWO, *open_, ("run { save = 1, iterations", "run { save = 1, restarts = 1, iterations"), evaluated=False
    )
    made = Hosts(2, preloaded=True)
    try:
        process = command(made, 0, "--iterations", "6", "--out", str(out), **made.environment)
        comes = {
            "probed": lambda: made.runs(1, "ray::Host"),
            "ranks start": lambda: made.runs(1, "RankHost"),
            "ranks start, and it is back": lambda: made.runs(1, "RankHost"),
            "checkpoint": lambda: (out / "checkpoints" / "000002").is_dir(),
        }[when]
        until = time.monotonic() + 100
        while not comes():
            assert process.poll() is None and time.monotonic() < until, ended(process)
            time.sleep(0.01)
        back = when.endswith("back")
        (made.stop if when == "probed" or back else made.cut)(1)
        if back:
            made._start(1, ())
        code, err = ended(process)
        assert code == 0, err
        begins = "from the checkpoint after" if when == "checkpoint" else "from the beginning"
        # Where Ray misses it first, the line begins with who died.
        assert f"the host {made.ip(1)} does not answer any more; restarting {begins}" in err, err
        assert back or f"\nthe host {made.ip(1)}" in f"\n{err}", err
        assert back or "1 host of 2 left: replanned for 1 host\n" in err, err
        assert [line["rows"] for line in metrics(out)] == [32] * 6
    finally:
        made.close()
