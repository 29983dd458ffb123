"""HTTP servers of a run: the run's web page, and the metrics for Prometheus.

Invariant: a client that does not know the page's token gets no content of the page, and the client's connection is
closed after some seconds (process/connection_gate.py). The driver queries the docks only when a client requests data.
So a run without clients does not pay for these queries.
"""

from __future__ import annotations

import hmac
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from ...ir.plan import Plan
from ..process.connection_gate import PAUSE, Gate
from .ports import Ports
from .run_status import EVERY, RunFacts

PATIENCE = 1.0  # seconds that a client waits for a look at the docks
FAREWELL = 1.0  # seconds for open pages to hear how the run ended


class StatusServer:
    """Server of a run's web page and Prometheus metrics; it runs in daemon threads."""

    def __init__(self, plan: Plan, facts: RunFacts, ports: Ports) -> None:
        self.facts = facts
        self.token = ports.token
        self.streams: set[BaseHTTPRequestHandler] = set()  # of open pages
        self.gates: list[Gate] = []  # gates of the page and of the metrics
        self.html = b""
        if ports.page >= 0:
            from ...emit.run_page import watch_html

            self.html = watch_html(plan).encode()
            self._serve(ports.page, type("Page", (_Page,), {"watching": self}))
        if ports.metrics >= 0:
            from .prometheus import handler

            self._serve(ports.metrics, type("Metrics", (_Handler, handler(facts)), {}))

    def _serve(self, descriptor: int, handler: type[BaseHTTPRequestHandler]) -> None:
        listening = socket.socket(fileno=descriptor)
        listening.set_inheritable(False)  # Ray's processes would keep it open
        server = _Server(listening, handler)
        self.gates.append(server.gate)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def end(self, kind: str, reason: str) -> None:
        """Report the end of the attempt to all open web pages, and wait until they close.

        `kind` and `reason` say how and why the attempt ended. The wait takes at most FAREWELL seconds.
        """
        self.facts.end(kind, reason)
        until = threading.Event()
        for _ in range(int(FAREWELL / 0.02)):
            if not self.streams:
                return
            until.wait(0.02)


class _Server(ThreadingHTTPServer):
    """An HTTP server on a socket that is already listening.

    A connection has two phases with a time limit of some seconds each. In the first phase, the client sends its
    request. In the second phase, a client without the token receives the answer. The number of connections is limited
    separately in each phase. So no connection in one phase is closed to make room for a connection in the other phase.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.gate = Gate()
        self.answer_gate = Gate()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            self.gate.make_room()
            time.sleep(PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self.gate.enter(request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        self.gate.expire()
        self.answer_gate.expire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the client is gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        if is_valid:
            self.server.gate.prove(self.connection.fileno())
            self.server.answer_gate.enter(self.connection)
        return is_valid


class _Page(_Handler):
    """Request handler of the run's web page.

    - `/` returns the page.
    - `/facts` returns a stream of events. Each event contains everything that is known about the run.
    - `/curve?key=K` returns the values of metric K from the beginning of the run to the present.
    """

    watching: StatusServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if not hmac.compare_digest(query.get("token", [""])[0].encode(), self.watching.token.encode()):
            self._send(403, "text/plain", b"this page needs the token in the address that msrl-run printed\n")
            return
        self.server.answer_gate.prove(self.connection.fileno())
        if url.path == "/":
            self._send(200, "text/html; charset=utf-8", self.watching.html)
        elif url.path == "/curve":
            curves = {key: self.watching.facts.curve(key) for key in query.get("key", [])}
            self._send(200, "application/json", msgspec.json.encode(curves))
        elif url.path == "/facts":
            self._stream()
        else:
            self._send(404, "text/plain", b"there is no such page\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        with suppress(OSError):  # the client may be gone
            self._send_head(status, kind)
            self.wfile.write(body)

    def _send_head(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        facts = self.watching.facts
        watching = self.watching
        watching.streams.add(self)
        try:
            self._send_head(200, "text/event-stream")
            self.wfile.write(b"retry: 1000\n\n")
            while True:
                now = facts.fresh(PATIENCE)
                self.wfile.write(b"data: " + msgspec.json.encode(now) + b"\n\n")
                if now.ended:
                    break
                facts.attempt_ended.wait(EVERY)
        except OSError:
            pass  # the client is gone
        finally:
            watching.streams.discard(self)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass  # its lines would contain the token
