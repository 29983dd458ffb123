"""What strangers get at the sockets of a run on one machine: those of another host nothing, those of the same host no
more than a refusal."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hosts import Hosts, possible
from place import SMALL, metrics

MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
REACHED = """
import json, socket, sys
reached = []
for port in json.loads(sys.argv[2]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=2).close()
        reached.append(port)
    except OSError:
        pass
print(json.dumps(reached))
"""
# How many bytes servers of gRPC answer, the first frame of which needs no request; with a key or without one.
GREETS = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
if sys.argv[1]:
    context.load_cert_chain(sys.argv[1])
for port in sys.argv[2:]:
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as raw, context.wrap_socket(raw) as line:
            line.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\4" + bytes(5))
            got = line.recv(9)
    except OSError:
        pass
    print(len(got))
"""
SILENT = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
held = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:] for _ in range(1100)]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2")
def test_strangers_get_nothing_at_the_sockets_of_a_run_on_one_machine(place):
    place.write(evaluated=False)
    made = Hosts(2, bare=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"TMPDIR": str(place.temporary)}
    words = ["p.rlg", *SMALL, "--iterations", "100000", "--out", "out", "--watch", "--metrics-port", "0"]
    with (place.folder / "err").open("wb") as err:
        run = subprocess.Popen(
            [*made.inside(0), sys.executable, "-c", MAIN, *words], cwd=place.folder, env=environment, stderr=err
        )

    def on(host, code, *arguments, **more):
        command = [*made.inside(host), sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={**environment, **more}, timeout=100)

    try:
        place.wait_for_lines("out", 1, place.patience)
        listening = [*made.listening(0)]
        assert len(listening) > 6  # Ray's, those of the ranks, the page, the metrics
        assert {address for address, _, _ in listening} == {"127.0.0.1"}, listening
        reached = on(1, REACHED, made.ip(0), json.dumps([port for _, port, _ in listening]))
        assert json.loads(reached.stdout) == [], reached.stderr
        servers = [port for _, port, names in listening if "gcs_server" in names or "raylet" in names]
        assert len(servers) > 1
        (key,) = place.temporary.glob("*/ray.pem")
        assert on(0, GREETS, key, *servers).stdout.split() == ["9"] * len(servers)
        assert on(0, GREETS, "", *servers).stdout.split() == ["0"] * len(servers)
        said = (place.folder / "err").read_text()
        ports = [line.rpartition(":")[2].partition("/")[0] for line in said.splitlines()[:2]]
        command = [*made.inside(0), sys.executable, "-c", SILENT, *ports]
        silent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert silent.stdout.readline() == "ready\n"
            place.wait_for_lines("out", len(metrics(place.folder / "out")) + 5)
        finally:
            silent.communicate("")
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143, (place.folder / "err").read_text()
    finally:
        run.terminate()
        run.wait(60)
        made.close()
    place.assert_clean()
