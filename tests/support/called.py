"""A process that is called by lines, in a thread of this one."""

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from msrl_graph.runtime.data.columns import Array
from msrl_graph.runtime.dock.rpc import AsyncRpcConnection, RpcConnections, RpcServer
from msrl_graph.runtime.dock.wire_format import Method, Methods
from msrl_graph.runtime.process.run_key import new_key
from msrl_graph.runtime.process.task_report import ProcessLost, RunError

KEY = new_key()
HERE, AWAY = 0, 1  # hosts, as a process of host 0 sees them


METHODS = Methods(
    {
        "echo": Method("echo", tuple[Any], Any),
        "arrays": Method("echo", tuple[list[Array]], list[Array]),
        "fail": Method("fail", tuple[str], None),
        "fail_badly": Method("fail_badly", tuple[str], None),
        "number": Method("echo", tuple[int], int),
        "wait": Method("wait", tuple[()], str),
    }
)


class Served:
    def __init__(self):
        self.heard = []
        self.answers = None  # what `echo` answers instead of its argument
        self.gate = asyncio.Event()

    async def echo(self, value):
        self.heard.append(value)
        return value if self.answers is None else self.answers

    async def fail(self, words):
        raise ProcessLost(words) if words == "lost" else RunError(words)

    async def fail_badly(self, words):
        raise ZeroDivisionError(words)

    async def wait(self):
        self.heard.append("wait")
        await self.gate.wait()
        return "waited"

    async def hidden(self):
        raise AssertionError("not served")


class Place:
    """A loop in a thread with a server, which can go and be another one at another port."""

    def __init__(self, host=AWAY, key=KEY, name="there", below=""):
        self.host = host
        self.key = key
        self.name = name
        self.top = tempfile.mkdtemp()
        self.folder = f"{self.top}/{below or 'own'}"
        Path(self.folder).mkdir(0o700)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.finds = 0
        self.lines = []
        self.posts = []
        self.start()

    def start(self):
        self.run(self._start())

    async def _start(self):
        self.served = Served()
        self.server = RpcServer(self.name, self.served, METHODS, self.key)
        self.address = self.server.address(self.host, self.folder, "127.0.0.1")

    def find(self, name):
        assert name == "there"
        self.finds += 1
        return self.address

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def end(self):
        """As if the process had died: nobody listens, lines break."""
        self.run(self._end())

    async def _end(self):
        self.server.listener.close()
        own = asyncio.current_task()
        for task in asyncio.all_tasks(self.loop) - {own}:
            task.cancel()
        await asyncio.sleep(0.05)

    def line(self):
        """A line of this thread."""
        self.lines.append(RpcConnections(self.find, HERE, KEY, METHODS).connection_to("there"))
        return self.lines[-1]

    def post(self):
        self.posts.append(AsyncRpcConnection("there", self._found, HERE, KEY, METHODS))
        return self.posts[-1]

    async def _found(self, name):
        return self.find(name)

    def close(self):
        for line in self.lines:
            line.close()
        for post in self.posts:
            self.loop.call_soon_threadsafe(post.close)
        self.end()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        shutil.rmtree(self.top)
