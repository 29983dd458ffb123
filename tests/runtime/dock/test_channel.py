"""Strangers between and beside the processes of a run: none of them is heard, believed, or has a message read."""

import asyncio
import os
import pickle
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from called import AWAY, HERE, KEY, METHODS, Place

from msrl_graph.runtime.data.encoding import DecodeError
from msrl_graph.runtime.dock import rpc
from msrl_graph.runtime.dock.channel import Address, Impostor, connect
from msrl_graph.runtime.dock.rpc import AsyncRpcConnection, RpcConnections, greeting_bytes
from msrl_graph.runtime.dock.wire_format import frame, frame_calls, read_answers, read_calls
from msrl_graph.runtime.process.connection_gate import MOST
from msrl_graph.runtime.process.run_key import new_key
from msrl_graph.runtime.process.task_report import RunError

NOBODY = 65534
OTHER = new_key()  # of another run


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def place():
    made = Place(AWAY)
    yield made
    made.close()


def at(server):
    return Address(AWAY, "/none", "none", *server.getsockname()[:2])


class False_(threading.Thread):
    """A server at a port where a client expects a process of its run. It says what `hello` makes of a connection, and
    then an answer that does harm; `got` is what it was sent."""

    def __init__(self, hello, bomb):
        super().__init__(daemon=True)
        self.hello = hello
        self.bomb = bomb
        self.got = b""
        self.listening = socket.create_server(("127.0.0.1", 0))

    def run(self):
        with suppress(OSError):
            while True:
                raw, _ = self.listening.accept()
                with suppress(OSError), raw:
                    raw.settimeout(2)
                    with self.hello(raw) as connection:
                        connection.sendall(b"".join(frame(pickle.dumps([(True, self.bomb)], 5), [])))
                        while data := connection.recv(1 << 16):
                            self.got += data


def answers_tls(key):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def hello(raw):
        with open(f"/tmp/key-{os.getpid()}", "wb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(key)
        context.load_cert_chain(file.name)
        Path(file.name).unlink()
        return context.wrap_socket(raw, server_side=True)

    return hello


def answers_nonce(raw):
    """As lines once began: with a nonce."""
    raw.sendall(bytes(32))
    return raw


def calls_from_a_thread(server):
    line = RpcConnections(lambda name: at(server), HERE, KEY, METHODS).connection_to("there")
    return line.send("echo", b"a secret of the run").get()


def calls_from_a_coroutine(server):
    async def find(name):
        return at(server)

    return asyncio.run(AsyncRpcConnection("there", find, HERE, KEY, METHODS).send("echo", b"a secret of the run"))


@pytest.mark.parametrize("calls", [calls_from_a_thread, calls_from_a_coroutine])
@pytest.mark.parametrize(
    "hello", [lambda raw: raw, answers_nonce, answers_tls(OTHER)], ids=["plain", "nonce", "another run's key"]
)
def test_a_false_server_is_told_nothing_and_not_believed(tmp_path, monkeypatch, hello, calls):
    monkeypatch.setattr(rpc, "_IMPOSTOR_GRACE", 0.3)
    false = False_(hello, Bomb(tmp_path / "harm"))
    false.start()
    with closing(false.listening), pytest.raises(RunError, match="is not the there of this run"):
        calls(false.listening)
    assert not (tmp_path / "harm").exists()
    assert b"secret" not in false.got and b"there" not in false.got


class Relay(threading.Thread):
    """Stands between a client and a process, and passes records of TLS on. `act` says once, for the next record of a
    direction, what is passed on in its place; `passed` are all, by direction."""

    def __init__(self, to):
        super().__init__(daemon=True)
        self.to = to
        self.act = {}
        self.passed = {"in": [], "out": []}
        self.ends = []
        self.listening = socket.create_server(("127.0.0.1", 0))

    def run(self):
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                server = socket.create_connection(self.to)
                self.ends += [client, server]
                for way, *ends in (("in", client, server), ("out", server, client)):
                    threading.Thread(target=self.pass_on, args=(way, *ends), daemon=True).start()

    def pass_on(self, way, source, sink):
        with suppress(OSError, EOFError):
            while True:
                record = exactly(source, 5)
                record += exactly(source, struct.unpack("!H", record[3:])[0])
                self.passed[way].append(record)
                act = self.act.pop(way, None)
                sink.sendall(act(record) if act else record)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        for end in (self.listening, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def found(self, name):
        return Address(AWAY, "/none", "none", *self.listening.getsockname()[:2])


def exactly(source, size):
    found = b""
    while len(found) < size:
        if not (data := source.recv(size - len(found))):
            raise EOFError
        found += data
    return found


ACTS = {
    "changes": lambda record: record[:-1] + bytes([record[-1] ^ 1]),
    "repeats": lambda record: record * 2,
    "leaves out": lambda record: b"",
    "cuts": lambda record: record[:-3] + b"\x17\x03\x03\x00\x00",
    "says itself": lambda record: record + b"".join(frame_calls([("echo", ("false",))])),
}


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("act", ACTS)
def test_what_a_relay_changes_is_neither_heard_nor_believed(place, act, way):
    """It breaks the line; the call is made again on a new one."""
    relay = Relay(place.address[-2:])
    relay.start()
    with closing(relay):
        line = RpcConnections(relay.found, HERE, KEY, METHODS).connection_to("there")
        place.lines.append(line)
        assert line.send("echo", "first").get() == "first"
        relay.act[way] = ACTS[act]
        second = line.send("echo", "second")
        until = time.monotonic() + 5
        while way in relay.act and time.monotonic() < until:
            time.sleep(0.01)
        third = line.send("echo", "third")  # what was left out shows as something else comes
        assert (second.get(), third.get()) == ("second", "third")
        assert way not in relay.act
        # Of what it repeats nothing is done again; of what was not answered all.
        heard = place.served.heard
        assert set(heard) == {"first", "second", "third"} and heard.count("first") == 1


def test_what_was_said_once_is_not_heard_again(place):
    """All that a client has sent, sent again to the same process, and the process's answers to a client."""
    relay = Relay(place.address[-2:])
    relay.start()
    with closing(relay):
        place.lines.append(line := RpcConnections(relay.found, HERE, KEY, METHODS).connection_to("there"))
        assert line.send("echo", "once").get() == "once"
        with socket.create_connection(place.address[-2:]) as again:
            again.sendall(b"".join(relay.passed["in"]))
            again.settimeout(5)
            with suppress(ConnectionError):
                while again.recv(1 << 16):
                    pass
    assert place.served.heard == ["once"] and place.server.messages == 1
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answers():
            made, _ = server.accept()
            with made:
                made.sendall(b"".join(relay.passed["out"]))
                with suppress(ConnectionError):
                    made.recv(1 << 16)

        thread = threading.Thread(target=answers)
        thread.start()
        with pytest.raises(OSError):
            connect(at(server), HERE, KEY)
        thread.join()


def test_who_has_another_runs_key_is_not_heard(place):
    with suppress(OSError), closing(connect(place.address, HERE, OTHER)) as line:
        line.sendall(greeting_bytes("there"))
        for part in frame_calls([("echo", ("mine",))]):
            line.sendall(part)
        assert line.recv(1) == b""
    assert not place.served.heard and not place.server.messages


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a handshake begins


@pytest.mark.parametrize(
    "says", [b"", b"x" * 32, b"y" * 5000, HELLO, pickle.dumps([("echo", ("mine",))]), b"\xff" * 64]
)
def test_whatever_a_stranger_says_is_not_heard(place, says):
    (away,) = place.server.listener.gates[1:]
    away.patience = 0.2
    with socket.create_connection(place.address[-2:], timeout=10) as stranger:
        stranger.sendall(says)
        with suppress(ConnectionResetError):
            while stranger.recv(64):
                pass
    assert not place.server.messages


def test_a_process_answers_only_to_its_own_name(place):
    """Whoever leads a line astray, to another process of the same run, has it do nothing there."""
    with closing(connect(place.address, HERE, KEY)) as line:
        line.sendall(greeting_bytes("another"))
        for part in frame_calls([("echo", ("mine",))]):
            line.sendall(part)
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""
    assert not place.server.messages


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize("says", [b"", HELLO])
def test_a_flood_of_strangers_keeps_no_process_of_the_run_out(place, says):
    over = threading.Event()
    held = []

    def flood():
        while not over.is_set():
            with suppress(OSError):
                made = socket.create_connection(place.address[-2:], timeout=1)
                held.append(made)
                made.sendall(says)
            time.sleep(0.001)
            for old in held[:-200]:
                old.close()
            del held[:-200]

    before = descriptors()
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until = time.monotonic() + 5
        while len(held) < 200 and time.monotonic() < until:
            time.sleep(0.01)
        for i in range(3):
            line = place.line()
            assert line.send("echo", i).get() == i
            line.close()
        over.set()
        thread.join()
        assert _settles(lambda: descriptors() <= before + len(held) + MOST + 10)
    finally:
        over.set()
        thread.join()
        for made in held:
            made.close()
    assert _settles(lambda: descriptors() <= before + 2)


def _settles(holds, within=10.0):
    until = time.monotonic() + within
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


# On one host.


@pytest.fixture
def near():
    made = Place(HERE, key=b"")
    yield made
    made.close()


def test_on_one_host_no_port_is_open(near):
    assert near.address.port == 0 and near.address.ip == ""
    assert near.line().send("echo", 1).get() == 1
    assert [s.family for s in near.server.listener._sockets] == [socket.AF_UNIX]


def test_a_folder_that_others_can_enter_is_not_used(near, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(near.folder)
    with pytest.raises(OSError):
        connect(near.address._replace(folder=str(link)), HERE, b"")
    Path(near.folder).chmod(0o755)
    with pytest.raises(Impostor, match="other users can access"):
        connect(near.address, HERE, b"")


def test_a_folder_may_be_deeper_than_a_sockets_path():
    with ExitStack() as stack:
        deep = Place(HERE, key=b"", below="x" * 200)
        stack.callback(deep.close)
        assert deep.line().send("echo", 1).get() == 1


BECOME = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
CALLS = """
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
try:
    line.sendall(bytes.fromhex(sys.argv[2]))
    print(line.recv(1))
except OSError:
    print(b"")
"""
SERVES = """
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
print(server.accept()[0].recv(100))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_host_is_neither_heard_nor_believed(near):
    """Even where the folder lets it in, by whatever mistake."""
    folder = Path(near.folder)
    folder.parent.chmod(0o755)
    folder.chmod(0o777)
    (folder / near.address.name).chmod(0o777)
    call = greeting_bytes("there") + b"".join(frame_calls([("echo", ("mine",))]))

    def stranger(code, name):
        command = [sys.executable, "-I", "-S", "-c", BECOME + code, folder / name, call.hex()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")

    done = stranger(CALLS, near.address.name)
    assert done.communicate(timeout=30)[0].strip() == "b''"
    assert not near.served.heard and not near.server.messages
    false = stranger(SERVES, "false")
    assert false.stdout.readline() == "ready\n"
    folder.chmod(0o700)
    with pytest.raises(Impostor, match=f"a process of user {NOBODY}"):
        connect(near.address._replace(name="false"), HERE, b"")
    assert false.communicate(timeout=30)[0].strip() == "b''"


def test_what_a_process_of_the_run_sends_is_not_unpickled(tmp_path):
    """Nor would a process of the run be believed that somebody else has taken over."""
    message = (pickle.dumps([(True, Bomb(tmp_path / "harm"))], 5), [])
    for read in (read_calls, read_answers):
        with pytest.raises(DecodeError):
            read(message)
    assert not (tmp_path / "harm").exists()
