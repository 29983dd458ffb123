"""Runs on a Ray cluster of several hosts, each with an address and a view of the disk of its own; and clusters that
cannot be joined."""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from hosts import Hosts, possible
from place import EXAMPLE, SMALL, metrics

from msrl_graph import compile
from msrl_graph.runtime.process import joining

TWO = [
    ("cluster laptop", "cluster two"),
    ("nodes = 1, devices_per_node = 2", "nodes = 2, devices_per_node = 1"),
    ("deploy grpo on laptop", "deploy grpo on two"),
    ("run { iterations", "run { save = 1, iterations"),
]


@pytest.fixture(scope="module")
def plan():
    return compile("grpo", model="tiny")


def refused(address, plan):
    with pytest.raises(joining.NoResources) as caught:
        joining.greet(address, plan)
    return caught.value.diagnostics[0].message


def test_an_address_where_nothing_listens_is_told_at_once(plan):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    begin = time.monotonic()
    assert (
        refused(f"127.0.0.1:{port}", plan)
        == f"no Ray cluster is at 127.0.0.1:{port}, which RAY_ADDRESS names: connection refused"
    )
    assert refused("no-such-host.invalid:6379", plan).startswith(
        "no Ray cluster is at no-such-host.invalid:6379, which RAY_ADDRESS names: "
    )
    assert (
        refused("ray://127.0.0.1:10001", plan)
        == "RAY_ADDRESS is ray://127.0.0.1:10001, and a run is driven from within the cluster"
    )
    assert time.monotonic() - begin < joining.CONNECT
    joining.greet("auto", plan)


def test_what_answers_and_is_no_ray_is_told(plan, monkeypatch):
    monkeypatch.setattr(joining, "GREET", 1.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert refused(address, plan) == f"what answers at {address}, which RAY_ADDRESS names, is no Ray cluster"
        server.shutdown()


def test_what_hosts_lack_is_told_with_the_host(plan, tmp_path):
    with joining.marked(tmp_path) as marker:
        assert joining.absent([str(marker), str(tmp_path / "none")]) == [str(tmp_path / "none")]
        wanted = joining.wanted(plan, marker)
    assert not marker.exists()
    (told,) = joining.differing(wanted, [("10.0.0.1", []), ("10.0.0.2", [next(iter(wanted))])])
    assert told.code == "host-differs" and told.message.startswith("the host 10.0.0.2 has no model folder ")


@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
def test_a_cluster_whose_hosts_names_have_the_address_of_the_loopback_trains_and_tells_what_a_host_lacks(place):
    shared, own = place.folder / "shared", place.folder / "own"
    shutil.copytree(EXAMPLE / "model", own / "model")
    place.write(*TWO, ('"./model"', '"./own/model"'), evaluated=False)
    made = Hosts(2, hidden=[own])

    def run(*arguments, **environment):
        main = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
        command = [*made.on(0), sys.executable, "-c", main, "p.rlg", *SMALL, "--iterations", "1", *arguments]
        variables = {**os.environ, "TMPDIR": str(place.temporary), "RAY_ADDRESS": made.address, **environment}
        done = subprocess.run(command, cwd=place.folder, env=variables, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stderr

    try:
        code, err = run("--out", str(shared), RAY_AUTH_MODE="disabled")
        assert (
            code == 3 and f"the Ray cluster at {made.address} asks for a token that this process does not give" in err
        ), err
        code, err = run("--out", str(own / "out"), **made.environment)
        told = f"error[host-differs]: the host {made.ip(1)} does not see the folder of the run, {own / 'out'}"
        assert code == 3 and told in err, err
        assert f"error[host-differs]: the host {made.ip(1)} has no model folder {own / 'model'}" in err, err
        assert not (own / "out").exists()
        place.write(*TWO, evaluated=False)
        code, err = run("--out", str(shared), **made.environment)
        assert code == 0, err
        assert metrics(shared)[0]["rows"] == 32 and (shared / "checkpoints" / "000001").is_dir()
        made.stop(1)
        code, err = run("--out", str(place.folder / "again"), **made.environment)
        assert code == 3 and "the plan asks for 2 hosts of 1 CPU; Ray has 1 host, 1 CPU in all" in err, err
    finally:
        made.close()
