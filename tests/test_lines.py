"""Lines between processes: every call is answered once, in order, also where a line breaks; strangers are not heard."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_graph.runtime.dock.lines import Lines, Post, Server
from msrl_graph.runtime.process.report import RunError

TOKEN = b"of this run"


class Served:
    def __init__(self):
        self.heard, self.gate = [], asyncio.Event()

    async def echo(self, value):
        self.heard.append(value)
        return value

    async def fail(self, words):
        raise RunError(words)

    async def wait(self):
        self.heard.append("wait")
        await self.gate.wait()
        return "waited"

    async def hidden(self):
        raise AssertionError("not served")


class Place:
    """A loop in a thread with a server, which can go and be another one at another port."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.finds, self.lines, self.posts = 0, [], []
        self.start()

    def start(self):
        self.served = self.run(self._served())
        self.address = self.run(self.server.address("127.0.0.1"))

    async def _served(self):
        served = Served()
        self.server = Server(served, ("echo", "fail", "wait"), TOKEN)
        return served

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
        self.server._server.close()
        own = asyncio.current_task()
        for task in asyncio.all_tasks(self.loop) - {own}:
            task.cancel()
        await asyncio.sleep(0.05)

    def line(self):
        """A line of this thread."""
        self.lines.append(Lines(self.find, TOKEN).to("there"))
        return self.lines[-1]

    def post(self):
        self.posts.append(Post("there", self._found, TOKEN))
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


@pytest.fixture
def place():
    made = Place()
    yield made
    made.close()


def test_answers_come_in_the_order_of_calls_whenever_they_are_asked_for(place):
    line = place.line()
    answers = [line.send("echo", i) for i in range(200)]
    assert answers[150].get() == 150 and [a.get() for a in answers] == [*range(200)]
    assert place.server.messages == 200 and place.finds == 1


arrays = st.sampled_from([np.int32, np.float32, np.uint8, np.bool_, np.int64]).flatmap(
    lambda kind: st.integers(0, 40_000).map(lambda n: (np.arange(n) % 2).astype(kind))
)


@settings(max_examples=20, deadline=None)
@given(st.lists(arrays, max_size=4))
def test_arrays_of_any_size_arrive_as_they_were(some):
    place = Place()
    try:
        got = place.line().send("echo", some).get()
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(got, some, strict=True))
        told = place.run(place.post().send("echo", some))
        assert all(np.array_equal(a, b) for a, b in zip(told, some, strict=True))
    finally:
        place.close()


@pytest.mark.parametrize("own", [True, False])
def test_what_is_lost_on_one_line_is_sent_again_while_another_answer_is_waited_for(place, own):
    """A process that writes rows does not wait for its dock, but for rows that come of them from another one."""
    other = Place()
    try:
        lines = Lines(lambda name: {"there": place, "other": other}[name].address, TOKEN)
        lines.to("there").send("echo", 0).get()
        heard, answer = [], lines.to("there").send("wait")

        def restarts():
            time.sleep(0.2)
            place.end()
            place.start()
            until = time.monotonic() + 10
            while not place.served.heard and time.monotonic() < until:
                time.sleep(0.01)
            heard.extend(place.served.heard)
            for one in (place, other):
                one.loop.call_soon_threadsafe(one.served.gate.set)

        thread = threading.Thread(target=restarts)
        thread.start()
        if own:
            assert lines.to("other").send("wait").get() == "waited"
        else:  # another thread waits
            with ThreadPoolExecutor(1) as pool:
                assert lines.wait(pool.submit(lambda: lines.to("other").send("wait").get())) == "waited"
                pool.submit(lambda: lines.to("other").close()).result()
        assert heard == ["wait"]
        assert answer.get() == "waited"
        thread.join()
        for name in ("there", "other"):
            lines.to(name).close()
    finally:
        other.close()


def test_what_is_raised_is_raised_where_it_was_asked(place):
    line = place.line()
    bad, good = line.send("fail", "rows are gone"), line.send("echo", 1)
    assert good.get() == 1
    with pytest.raises(RunError, match="rows are gone"):
        bad.get()
    with pytest.raises(AttributeError, match="does not serve hidden"):
        line.send("hidden").get()


def test_a_call_without_an_answer_is_made_again_on_a_new_line(place):
    line = place.line()
    assert line.send("echo", 0).get() == 0
    waits, after = line.send("wait"), line.send("echo", 1)
    place.end()
    place.start()
    place.loop.call_soon_threadsafe(place.served.gate.set)
    assert waits.get() == "waited" and after.get() == 1 and place.finds == 2
    assert place.served.heard == ["wait", 1]  # what was answered is not asked again
    post = place.post()
    assert place.run(post.send("echo", 2)) == 2
    place.end()
    place.start()
    assert place.run(post.send("echo", 3)) == 3


def test_a_call_that_waits_goes_with_the_next_one(place):
    line = place.line()
    first, second = (line.send("echo", i, wait=True) for i in range(2))
    bad, third = line.send("fail", "no", wait=True), line.send("echo", 2)
    assert third.get() == 2 and place.server.messages == 1
    assert first.get() == 0 and second.get() == 1
    with pytest.raises(RunError):
        bad.get()
    assert line.send("echo", 3, wait=True).get() == 3  # who asks for its answer waits no more
    line.send("echo", 4, wait=True)
    line.flush()
    line.flush()
    assert line.send("echo", 5).get() == 5 and place.served.heard == [*range(6)] and place.server.messages == 4


def test_each_thread_has_a_line_of_its_own(place):
    lines, done = Lines(place.find, TOKEN), []
    place.lines.append(lines.to("there"))
    waits = lines.to("there").send("wait")

    def ask():
        line = lines.to("there")
        done.append(line.send("echo", 5).get())
        line.close()

    other = threading.Thread(target=ask)
    other.start()
    other.join(10)
    assert done == [5]  # though this thread's call has no answer yet
    place.loop.call_soon_threadsafe(place.served.gate.set)
    assert waits.get() == "waited"


@pytest.mark.parametrize("says", [b"", b"x" * 32, b"y" * 5000])
def test_who_does_not_know_the_token_is_not_heard(place, says):
    with socket.create_connection(place.address, timeout=10) as stranger:
        assert len(stranger.recv(64)) == 32
        stranger.sendall(says)
        if len(says) < 32:
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # it had more to say
            assert stranger.recv(64) == b""
    assert not place.server.messages
