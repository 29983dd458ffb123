"""What those who watch a run are told, and at which addresses: the same facts on the terminal, the page and for
Prometheus."""

import http.client
import io
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from place import EXAMPLE, SMALL
from rich.console import Console

from msrl_graph import compile
from msrl_graph.cli import run_main
from msrl_graph.emit.run_page import watch_html
from msrl_graph.runtime.dock.messages import CurrentActivity, DockSnapshot, Status, Wait
from msrl_graph.runtime.metrics import prometheus
from msrl_graph.runtime.metrics.http_server import StatusServer
from msrl_graph.runtime.metrics.ports import ListeningSockets
from msrl_graph.runtime.metrics.run_status import POINTS, RunFacts
from msrl_graph.runtime.metrics.terminal_panel import _sparks, panel
from msrl_graph.runtime.process.fault_points import fault_file as points_file
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report

DOCS = ROOT / "docs"
LINE = {
    "iteration": 3,
    "seconds": 2.0,
    "reward": 0.5,
    "prompt_tokens": 300,
    "response_tokens": 100,
    "tokens_per_second": 200.0,
    "rows": 512,
    "dock_bytes": {"actor.infer get away": 70, "actor.infer get": 30, "host.reward put": 8},
    "dock_messages": 17,
    "phases": {"actor.generate": 0.5},
}


@pytest.fixture(scope="module")
def plan():
    return compile(EXAMPLE / "grpo.rlg")


def status(pid=7, host=0):
    """Generation is done, the update has trained on the first of two mini-batches, the next iteration waits."""
    rows = dict.fromkeys(
        ("actor.infer", "reference.infer", "host.reward", "host.advantage", "actor.update"), (512, 512)
    )
    done = dict.fromkeys(("actor.generate", *list(rows)[:-1]), 512) | {"source": 64, "actor.update": 256}
    seen = DockSnapshot(
        host,
        {"train/3": {"actor.generate": (64, 64), **rows}, "train/4": {"host.reward": (0, 512)}},
        {"train/3": done},
        9000,
        {"dock of host 0": 1, "rank 0": 500, "rank 1": 400},
        5,
        10,
        pid,
    )
    doing = {
        "rank 0": CurrentActivity("RUN actor.update in train/3", 0.2),
        "functions of host 0": CurrentActivity("source in train/4", 1),
    }
    return Status("actor.update", 1, (Wait("`host.reward` (group 0)", "train/4", 1.5, "`response`"),), doing, seen)


@pytest.fixture
def facts(plan):
    found = RunFacts(plan)
    found.set_lines([{"evaluation": "held_out", "after_iterations": 0, "reward": 0.25}])
    found.add(LINE)
    found.count_waits([Report("rank 0", seconds={"dock wait": 0.25})])
    found.begin(Task("train", 3, 64))
    found.look([status()])
    return found


def test_rows_are_those_that_a_state_makes(facts):
    now = facts.now()
    assert {s.node: (s.done, s.handed, s.of) for s in now.states} == {
        "source": (64, 64, 64),
        **dict.fromkeys([s.node for s in now.states[1:-1]], (512, 512, 512)),
        "actor.update": (256, 512, 512),
    }
    assert [s.node for s in now.states if s.runs] == ["actor.update"] and now.phase == "actor.update"
    (host,) = now.hosts
    assert (host.held, [p.name for p in host.processes][-2:]) == (9000, ["rank 0", "rank 1"])


PANEL = """\
the bar
reward 0.500  200 tokens/s  2.00 s

train/3                                      done  handed  rows
  source           ━━━━━━━━━━━━━━━━━━━━━━━━    64      64    64
  actor.generate   ━━━━━━━━━━━━━━━━━━━━━━━━   512     512   512
  actor.infer      ━━━━━━━━━━━━━━━━━━━━━━━━   512     512   512
  host.reward      ━━━━━━━━━━━━━━━━━━━━━━━━   512     512   512
  host.advantage   ━━━━━━━━━━━━━━━━━━━━━━━━   512     512   512
  reference.infer  ━━━━━━━━━━━━━━━━━━━━━━━━   512     512   512
▸ actor.update     ━━━━━━━━━━━━╺━━━━━━━━━━━   256     512   512

hosts     warehouse       memory  of processes
  host 0       9 kB  5 B of 10 B  dock of host 0 1 B, rank 0 500 B, rank 1 400 B
`host.reward` (group 0) waits 1.5 s in train/4 for `response`
"""


def test_a_terminal_shows_the_same(facts):
    console = Console(width=110, file=io.StringIO(), force_terminal=True)
    console.print(panel(facts.now(), "the bar", facts.curve, 110))
    assert "\n".join(line.rstrip() for line in plain(console.file.getvalue()).split("\n")) == PANEL
    curve = panel(replace(facts.now(), curves=("reward",)), "", lambda _: {"points": [(n, n) for n in range(8)]}, 110)
    console.print(curve)
    assert "▁▂▃▄▅▆▇█  0 to 7" in plain(console.file.getvalue())


def plain(text):
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_the_docks_are_looked_at_only_when_somebody_asks(facts):
    assert not facts.wanted
    asked = threading.Thread(target=facts.fresh, args=(20.0,))
    asked.start()
    until = time.monotonic() + 10
    while not facts.wanted:
        assert time.monotonic() < until
        time.sleep(0.01)
    facts.look([status()])
    asked.join(10)
    assert not asked.is_alive() and not facts.wanted


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5 * POINTS), st.integers(1, 60))
def test_a_curve_has_few_points_that_are_means(values, width):
    facts = RunFacts.__new__(RunFacts)
    facts.lines = [{"iteration": i, "x": v} for i, v in enumerate(values)]
    facts.evaluations = []
    points = facts.curve("x")["points"]
    assert len(points) <= POINTS and points[-1][0] == len(values)
    weights = [b - a for (a, _), (b, _) in zip([(0, 0), *points], points, strict=False)]
    assert sum(w * v for w, (_, v) in zip(weights, points, strict=True)) == pytest.approx(sum(values), abs=1e-3)
    assert len(_sparks(values, width)) == min(width, len(values))


def test_every_metric_of_prometheus_is_in_the_docs_and_no_other(facts, monkeypatch):
    monkeypatch.setattr(prometheus, "PATIENCE", 0.0)
    found = list(prometheus.Collector(facts).collect())
    samples = {(s.name, *s.labels.values()): s.value for m in found for s in m.samples}
    assert samples["msrl_tokens_total", "response"] == 100 and samples["msrl_warehouse_bytes", "0"] == 9000
    assert samples["msrl_dock_moved_bytes_total", "actor.infer", "get away"] == 70
    assert samples["msrl_wait_seconds_total", "rank 0"] == 0.25 and samples["msrl_restarts_total", "run"] == 0
    names = {name for name, *_ in samples}
    section = (DOCS / "reference" / "metrics.md").read_text().partition("## Prometheus")[2].partition("\n## ")[0]
    assert names == set(re.findall(r"^\| `(msrl_\w+)`", section, re.MULTILINE))
    facts.look([status(pid=8)])
    assert facts.restarts == {"dock of host 0": 1}


def ask(address, path):
    connection = http.client.HTTPConnection(address, timeout=100)
    connection.request("GET", path)
    return connection.getresponse()


def events(answer):
    """What a stream tells until it ends."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_the_page_is_for_those_who_know_its_token_and_hears_how_a_run_ended(plan, facts):
    doors = ListeningSockets(True, 0)
    ports, (metrics, page) = doors.ports, doors.lines
    watching = StatusServer(plan, facts, type(ports)(os.dup(ports.page), os.dup(ports.metrics), ports.token))
    address, token = re.search(r"http://([\d.:]+)/\?token=(.+)", page).groups()
    assert [ask(address, p).status for p in ("/", "/facts?token=", f"/curve?key=reward&token={token}x")] == [403] * 3
    answer = ask(address, f"/?token={token}")
    assert answer.status == 200 and b"actor.generate" in answer.read()
    curve = json.loads(ask(address, f"/curve?key=reward&token={token}").read())
    assert curve == {"reward": {"points": [[4, 0.5]], "evaluations": [["held_out", 0, 0.25]]}}
    told = events(ask(address, f"/facts?token={token}"))
    first = next(told)
    assert (first["done"], first["ended"], first["states"][-1]["done"]) == (4, "", 256)
    assert b"msrl_iterations_done 4.0" in ask(re.search(r"http://([\d.:]+)/", metrics)[1], "/metrics").read()
    watching.end("done", "")
    assert [now["ended"] for now in told][-1] == "done"
    doors.close()


def test_text_of_a_program_is_text_in_the_page(plan):
    page = watch_html(compile(EXAMPLE / "grpo.rlg", text=(EXAMPLE / "grpo.rlg").read_text()))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)[1]
    assert policy.startswith("default-src 'none'") and page.count("<script") == 2 and f'nonce="{nonce}"' in page
    assert "innerHTML" not in page and "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run_main([str(EXAMPLE / "grpo.rlg"), "--metrics-port", str(port), "--watch"]) == 3
        assert run_main([str(EXAMPLE / "grpo.rlg"), "--metrics-port", "65536"]) == 3
        assert run_main([str(EXAMPLE / "grpo.rlg"), "--metrics-port", str(port), "--dry-run"]) == 0
    told = "error[port-taken]: cannot use port {} of 127.0.0.1 for the metrics: {}\n"
    help = "  = help: {}\n"
    help = help.format("name another with --metrics-port, or 0 for a free one")
    expected = told.format(port, "Address already in use") + help + told.format(65536, "ports end at 65535") + help
    assert capsys.readouterr().err == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_is_watched_at_one_address_through_a_restart_until_it_is_ended(place):
    place.write(("iterations = 320", "save = 1, iterations = 320"), evaluated=False)
    deaths = place.folder / "points"
    deaths.mkdir()
    points_file(deaths, "rank 0", "share of actor.infer in train/2").touch()
    process = place.start("p.rlg", *SMALL, "--watch", "--metrics-port", "0", "--out", "a", MSRL_POINTS=str(deaths))
    metrics = re.fullmatch(r"metrics for Prometheus at http://([\d.:]+)/metrics\n", process.stderr.readline())[1]
    page = re.fullmatch(r"watch the run at http://([\d.:]+)/\?token=(.+)\n", process.stderr.readline())

    def stream():
        """Asks again where a stream ends, as a browser does, until the run is over."""
        while True:
            with suppress(ConnectionError, http.client.HTTPException):  # a driver that died
                for now in events(ask(page[1], f"/facts?token={page[2]}")):
                    yield now
                    if now["ended"] not in ("", "died"):
                        return

    told = stream()
    assert next(now for now in told if now["ended"])["reason"].startswith("rank 0 died")
    now = next(now for now in told if now["done"] >= 4 and any(s["done"] for s in now["states"]))
    assert now["restarts"] == 1 and "loss" in now["curves"]
    assert {"rank 0", "rank 1", "dock of host 0"} <= {p["name"] for p in now["hosts"][0]["processes"] if p["memory"]}
    scraped = ask(metrics, "/metrics").read().decode()
    assert 'msrl_restarts_total{of="run"} 1.0' in scraped and 'msrl_memory_bytes{host="0",process="rank 1"}' in scraped
    process.send_signal(signal.SIGINT)
    assert [now["ended"] for now in told][-1] == "interrupted"
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("http://") == 0, err
    place.assert_clean()
    for address in (metrics, page[1]):
        with pytest.raises(ConnectionRefusedError):
            ask(address, "/")
    trace = json.loads((place.folder / "a" / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    waits = {(processes[e["pid"]], e["name"]) for e in trace if e["ph"] == "X" and lanes[e["pid"], e["tid"]] == "dock"}
    assert ("rank 1 on host 0", "actor.update waits") in waits
