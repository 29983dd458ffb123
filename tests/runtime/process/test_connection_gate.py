"""Listening sockets of a run: silent connections are few and short, and keep nobody out."""

import asyncio
import http.client
import os
import select
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest
from place import EXAMPLE

from msrl_graph import compile
from msrl_graph.runtime.agents.server import Endpoint, OpenRow
from msrl_graph.runtime.metrics.http_server import StatusServer
from msrl_graph.runtime.metrics.ports import ListeningSockets
from msrl_graph.runtime.metrics.run_status import RunFacts
from msrl_graph.runtime.process.connection_gate import MOST, Gate, listen


def ended(connections, within=0.05):
    """Of each connection whether the other end has closed it, once all have or some seconds are over."""
    until = time.monotonic() + within
    left = select.poll()
    for made in connections:
        left.register(made, select.POLLIN | select.POLLRDHUP)
    while True:
        found = {number for number, event in left.poll(10) if event & (select.POLLRDHUP | select.POLLHUP)}
        if len(found) == len(connections) or time.monotonic() > until:
            return [made.fileno() in found for made in connections]


@contextmanager
def visitors(gate, sources):
    """Connections from these addresses of the loopback, in this order, and their other ends."""
    with ExitStack() as stack, listen("127.0.0.1") as server:
        found = []
        for source in sources:
            made = stack.enter_context(socket.socket())
            made.bind((source, 0))
            made.connect(server.getsockname())
            other = stack.enter_context(server.accept()[0])
            gate.enter(other)
            found.append((made, other))
        yield found


def test_of_too_many_the_oldest_leaves_of_the_source_that_has_most():
    gate = Gate(most=4)
    a = "127.0.0.1"
    b = "127.0.0.2"
    c = "127.0.0.3"
    with visitors(gate, [a, b, b, c, b, b]) as found:
        assert ended([made for made, _ in found]) == [False, True, True, False, False, False]
        gate.prove(found[4][1].fileno())
        for _ in range(3):
            gate.make_room()
        assert ended([made for made, _ in found]) == [True, True, True, True, False, True]
        gate.make_room()


def test_who_proves_nothing_has_some_seconds():
    gate = Gate(patience=0.2)
    with visitors(gate, ["127.0.0.1"] * 2) as found:
        gate.prove(found[0][1].fileno())
        gate.expire()
        assert ended([made for made, _ in found]) == [False, False]
        time.sleep(0.2)
        gate.expire()
        assert ended([made for made, _ in found]) == [False, True]


@contextmanager
def endpoint():
    """An endpoint of agents with a row under way: its address, its gate, and a request that it answers."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served = Endpoint("policy", None, (), None)

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    served.rows["key"] = OpenRow(0, None)
    run(served.start())
    try:
        head = {"Authorization": "Bearer key"}
        yield served._listening.getsockname(), served.gate, ("/v1/models", head)
    finally:
        run(served.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def watched(metrics):
    plan = compile(EXAMPLE / "grpo.rlg")
    with closing(ListeningSockets(not metrics, 0 if metrics else None)) as doors:
        port = int(doors.lines[0].rpartition(":")[2].partition("/")[0])
        given = replace(doors.ports, page=_dup(doors.ports.page), metrics=_dup(doors.ports.metrics))
        watching = StatusServer(plan, RunFacts(plan), given)
        path = "/metrics" if metrics else f"/?token={doors.ports.token}"
        yield ("127.0.0.1", port), watching.gates[0], (path, {})


def _dup(descriptor):
    """The driver's own descriptor, which a run's supervisor hands it."""
    return os.dup(descriptor) if descriptor >= 0 else -1


LISTENERS = {"endpoint": endpoint, "page": lambda: watched(False), "metrics": lambda: watched(True)}


@pytest.fixture(params=LISTENERS)
def listener(request):
    with LISTENERS[request.param]() as made:
        yield made


def answered(address, request):
    path, headers = request
    with closing(http.client.HTTPConnection(*address, timeout=5)) as client:
        client.request("GET", path, headers=headers)
        return client.getresponse().status


def test_silent_connections_are_few_and_keep_nobody_out(listener, monkeypatch):
    monkeypatch.setattr("msrl_graph.runtime.metrics.prometheus.PATIENCE", 0.1)
    address, gate, request = listener
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        assert answered(address, request) == 200
        assert ended(silent, 0.3).count(False) <= MOST
        gate.patience = 0.1
        with socket.create_connection(address):  # the timer of an event loop is set as somebody comes
            assert all(ended(silent, 10))


def test_a_flood_keeps_nobody_out(listener, monkeypatch):
    monkeypatch.setattr("msrl_graph.runtime.metrics.prometheus.PATIENCE", 0.1)
    address, _, request = listener
    over = threading.Event()

    def flood():
        while not over.is_set():
            with suppress(OSError):
                made = socket.create_connection(address, timeout=1)
                made.send(b"G")
                held.append(made)
            for old in held[:-200]:
                old.close()
            del held[:-200]

    held = []
    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            time.sleep(0.1)
            assert answered(address, request) == 200
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for made in held:
            made.close()


def test_who_proves_nothing_is_cut_off_in_the_middle_of_a_request(listener):
    address, gate, _ = listener
    gate.patience = 0.2
    with socket.create_connection(address) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        begin = time.monotonic()
        while time.monotonic() - begin < 5 and not all(ended([slow], 0.1)):
            with suppress(OSError):
                slow.sendall(b"x: y\r\n")
        assert time.monotonic() - begin < 3
