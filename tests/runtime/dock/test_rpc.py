"""Lines between processes: every call is answered once, in order, also where a line breaks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from called import AWAY, HERE, KEY, METHODS, Place
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.runtime.data.encoding import DecodeError
from msrl_graph.runtime.dock.rpc import RpcConnections
from msrl_graph.runtime.dock.wire_format import RemoteError
from msrl_graph.runtime.process.task_report import RunError


@pytest.fixture(params=[HERE, AWAY], ids=["here", "away"])
def place(request):
    made = Place(request.param)
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


@examples(20)
@given(st.lists(arrays, max_size=4), st.sampled_from([HERE, AWAY]))
def test_arrays_of_any_size_arrive_as_they_were(some, host):
    place = Place(host)
    try:
        got = place.line().send("arrays", some).get()
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(got, some, strict=True))
        told = place.run(place.post().send("arrays", some))
        assert all(np.array_equal(a, b) for a, b in zip(told, some, strict=True))
    finally:
        place.close()


@pytest.mark.parametrize("own", [True, False])
def test_what_is_lost_on_one_line_is_sent_again_while_another_answer_is_waited_for(place, own):
    """A process that writes rows does not wait for its dock, but for rows that come of them from another one."""
    other = Place(name="other")
    try:
        lines = RpcConnections(lambda name: {"there": place, "other": other}[name].address, HERE, KEY, METHODS)
        lines.connection_to("there").send("echo", 0).get()
        heard = []
        answer = lines.connection_to("there").send("wait")

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
            assert lines.connection_to("other").send("wait").get() == "waited"
        else:  # another thread waits
            with ThreadPoolExecutor(1) as pool:
                assert lines.wait(pool.submit(lambda: lines.connection_to("other").send("wait").get())) == "waited"
                pool.submit(lambda: lines.connection_to("other").close()).result()
        assert heard == ["wait"]
        assert answer.get() == "waited"
        thread.join()
        for name in ("there", "other"):
            lines.connection_to(name).close()
    finally:
        other.close()


def test_what_is_raised_is_raised_where_it_was_asked(place):
    line = place.line()
    bad = line.send("fail", "rows are gone")
    good = line.send("echo", 1)
    assert good.get() == 1
    with pytest.raises(RunError, match="rows are gone"):
        bad.get()
    with pytest.raises(RunError, match="lost"):  # though it is of a class that no caller knows
        line.send("fail", "lost").get()
    with pytest.raises(RemoteError, match="AttributeError: Served does not serve hidden"):
        line.send("hidden").get()
    with pytest.raises(RemoteError, match="ZeroDivisionError: by what"):
        line.send("fail_badly", "by what").get()
    with pytest.raises(RemoteError, match="ZeroDivisionError: by what"):
        place.run(place.post().send("fail_badly", "by what"))


@pytest.mark.parametrize(("method", "argument"), [("number", "one"), ("arrays", [1]), ("fail", b"x")])
def test_arguments_of_another_type_are_an_error_of_their_call_alone(place, method, argument):
    line = place.line()
    with pytest.raises(RemoteError, match=r"DecodeError: .*xpected"):
        line.send(method, argument).get()
    assert not place.served.heard
    assert line.send("number", 3).get() == 3


def test_an_answer_of_another_type_is_not_returned(place):
    place.served.answers = "one"
    line = place.line()
    with pytest.raises(DecodeError, match="Expected `int`, got `str`"):
        line.send("number", 3).get()
    place.served.answers = object()
    with pytest.raises(RemoteError, match="object cannot be encoded"):
        line.send("number", 3).get()
    place.served.answers = None
    assert line.send("number", 3).get() == 3


def test_a_call_without_an_answer_is_made_again_on_a_new_line(place):
    line = place.line()
    assert line.send("echo", 0).get() == 0
    waits = line.send("wait")
    after = line.send("echo", 1)
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
    bad = line.send("fail", "no", wait=True)
    third = line.send("echo", 2)
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
    lines = RpcConnections(place.find, HERE, KEY, METHODS)
    done = []
    place.lines.append(lines.connection_to("there"))
    waits = lines.connection_to("there").send("wait")

    def ask():
        line = lines.connection_to("there")
        done.append(line.send("echo", 5).get())
        line.close()

    other = threading.Thread(target=ask)
    other.start()
    other.join(10)
    assert done == [5]  # though this thread's call has no answer yet
    place.loop.call_soon_threadsafe(place.served.gate.set)
    assert waits.get() == "waited"
