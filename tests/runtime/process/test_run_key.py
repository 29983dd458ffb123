"""Ray's processes and false servers: a process of a run tells nothing to a server without the key of its attempt."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from msrl_graph.runtime.process.run_key import make_ray_key
from msrl_graph.runtime.process.start_variables import own_ray

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"  # with which a server of gRPC begins: an empty frame of HTTP/2
CALLS = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


class FalseServer(threading.Thread):
    """A server at the port of one of Ray's servers; `received` is what clients have sent to it."""

    def __init__(self, context=None):
        super().__init__(daemon=True)
        self.context = context
        self.received = b""
        self.met = threading.Event()  # set once a client has gone away, or has called
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"

    def run(self):
        with suppress(OSError):
            while True:
                raw, _ = self.listening.accept()
                with suppress(OSError), raw:
                    raw.settimeout(5)
                    self.answer(raw)
                self.met.set()

    def answer(self, raw):
        connection = self.context.wrap_socket(raw, server_side=True) if self.context else raw
        connection.sendall(SETTINGS)
        while data := connection.recv(1 << 16):
            self.received += data
            if b"authorization" in self.received:
                self.met.set()


def tls_of_another_run(folder):
    key = make_ray_key(folder)["RAY_TLS_SERVER_KEY"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key)
    context.set_alpn_protocols(["h2"])
    return context


def call(address, **variables):
    environment = {**os.environ, **own_ray(), **variables}
    return subprocess.Popen([sys.executable, "-c", CALLS, address], env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("form", ["without TLS", "with another run's key", "told everything without keys"])
def test_a_false_server_of_ray_is_told_nothing(tmp_path, form):
    """The last form shows that the test would see what is told."""
    other = tmp_path / "other"
    other.mkdir()
    false = FalseServer(tls_of_another_run(other) if "another" in form else None)
    false.start()
    client = call(false.address, **({} if "everything" in form else make_ray_key(tmp_path)))
    try:
        assert false.met.wait(30)
        told = own_ray()["RAY_AUTH_TOKEN"].encode() in false.received
        assert told == ("everything" in form)
        assert told or b"authorization" not in false.received
    finally:
        client.kill()
        client.wait()
        false.listening.close()


def test_the_key_of_ray_is_in_a_file_that_only_this_user_can_read(tmp_path):
    path = tmp_path / "ray.pem"
    before = os.umask(0)
    try:
        variables = make_ray_key(tmp_path)
    finally:
        os.umask(before)
    assert {value for name, value in variables.items() if name != "RAY_USE_TLS"} == {str(path)}
    assert path.stat().st_mode & 0o777 == 0o600
