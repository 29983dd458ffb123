"""The instances of a user's environment, called side by side.

Invariant: an instance is asked one thing at a time. A call that raises, takes too long or gives what does not belong
there comes back as a value, a Failure; whoever asks decides what becomes of its row.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from ...data.characters import half_character, half_character_within
from ...data.chat import Messages, are_messages
from ..process import row_progress
from .own_process import ProcessExit, call_of
from .user_traceback import BadResult, ErrorSummary
from .values import InjectedArguments, brief, pure_numbers

Reason = Literal["raised", "timeout", "rubbish", "exited", "memory"]


@dataclass(frozen=True)
class Failure:
    """Why a row has no answer."""

    reason: Reason
    told: ErrorSummary

    @classmethod
    def of(cls, error: BaseException, reason: Reason | None = None) -> Failure:
        """`reason`: if it is not to be seen from the error."""
        seen: Reason = "raised"
        if isinstance(error, BadResult | MemoryError | ProcessExit):
            kinds: dict[type, Reason] = {BadResult: "rubbish", MemoryError: "memory", ProcessExit: "exited"}
            seen = next(kind for of, kind in kinds.items() if isinstance(error, of))
        return cls(reason or seen, ErrorSummary.of(error))


Utterance = str | Messages  # what an environment says: text as it is, or messages


@dataclass(frozen=True)
class EnvironmentReply:
    """What an environment says, the values of its columns as of now, and whether the episode is over."""

    said: Utterance
    values: tuple[Any, ...] = ()
    over: bool = False


@dataclass(frozen=True)
class EpisodeStart:
    """The beginning of a row's episode, and the columns that it is given."""

    task: str  # its name
    iteration: int
    row: int
    given: Mapping[str, Any]


Ask = EpisodeStart | str  # a beginning, or the text that the policy wrote


@dataclass(frozen=True)
class ClassSignature:
    """How a class is called. `columns` are those whose values a step gives; `gym`: as gymnasium has it, and whether
    `reward` is the `sum` of the steps' rewards or a list of `each`; "" where it is called as ours are."""

    make: Callable[[], Any]
    filled: InjectedArguments
    columns: tuple[str, ...]
    timeout: float
    gym: Literal["", "sum", "each"] = ""


class Instances:
    """Of some rows, which are called by their positions. Plain methods have a thread each, `at_once` so many side by
    side; those that are `async` share a loop, all at once."""

    def __init__(self, called: ClassSignature, at_once: int) -> None:
        self.called = called
        self.made = dict[int, Any]()
        self.process = os.getpid()
        self.rewards: dict[int, list[float]] = {}  # of each step so far, as gymnasium has them
        self.threads = ThreadPoolExecutor(at_once, "environment")
        methods = (getattr(called.make, name, None) for name in ("reset", "step"))
        self.waits = any(map(inspect.iscoroutinefunction, methods))

    def answers(self, asked: Mapping[int, Ask], stops: bool, where: str = "") -> dict[int, EnvironmentReply | Failure]:
        """What each says; where a failure `stops` the others, only those up to the first of them. `where` is for
        reports of progress."""
        row_progress.report(0, len(asked), where)
        calls = {position: _Call(self, position, ask) for position, ask in asked.items()}
        found: dict[int, EnvironmentReply | Failure] = {}
        for position, call in calls.items():
            row_progress.report(len(found), len(calls), where)
            found[position] = call.answer()
            if stops and isinstance(found[position], Failure):
                for other in calls.values():
                    other.future.cancel()
                break
        return found

    def end(self) -> None:
        """Lets go of all of them; a class as gymnasium has it may `close`."""
        closing = [made.close for made in self.made.values() if self.called.gym and hasattr(made, "close")]
        doing = [self.threads.submit(self._close, c) for c in closing if not inspect.iscoroutinefunction(c)]
        doing += [asyncio.run_coroutine_threadsafe(c(), _loop()) for c in closing if inspect.iscoroutinefunction(c)]
        wait(doing, None if self.called.timeout == math.inf else self.called.timeout)
        self.made = {}
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _close(self, close: Callable[[], object]) -> None:
        with call_of(self.process):
            close()

    def begun(self, position: int, ask: Ask) -> Any:
        """What the user's method gives, which may be to be waited for."""
        if not isinstance(ask, EpisodeStart):
            return self.made[position].step(ask)
        called = self.called
        made = self.called.make()
        self.made[position] = made
        if called.gym:
            return made.reset(seed=called.filled.seed_of(ask.task, ask.iteration, ask.row), options=dict(ask.given))
        return made.reset(**ask.given, **called.filled(ask.task, ask.iteration, ask.row))

    def read(self, position: int, ask: Ask, found: Any) -> EnvironmentReply:
        """What was given, as an answer; BadResult where it is none."""
        if self.called.gym:
            return self._of_gym(position, ask, found)
        if isinstance(ask, EpisodeStart):
            return EnvironmentReply(_said(found, "reset"))
        columns = self.called.columns
        said, *values, over = _parts("step", found, ("what it says", *columns, "whether the episode is over"))
        return EnvironmentReply(
            _said(said, "step"), tuple(values), _truth(over, "at the end", "whether the episode is over")
        )

    def _of_gym(self, position: int, ask: Ask, found: Any) -> EnvironmentReply:
        if isinstance(ask, EpisodeStart):
            said, _ = _parts("reset", found, ("the observation", "info"))
            self.rewards[position] = []
            return EnvironmentReply(_observed(said, "reset"))
        said, reward, *ends, info = _parts(
            "step", found, ("the observation", "reward", "terminated", "truncated", "info")
        )
        observed = _observed(said, "step")
        if not isinstance(info, Mapping):
            raise BadResult(f"`step` returned {brief(info)} for the info, where a dictionary belongs")
        over = [_truth(end, f"for `{name}`", name) for end, name in zip(ends, ("terminated", "truncated"), strict=True)]
        try:
            self.rewards[position].append(pure_numbers(reward, np.float64).item())
        except (TypeError, ValueError):  # several of them
            raise BadResult(f"`step` returned {brief(reward)} for the reward, where a number belongs") from None
        rewards = self.rewards[position]
        known = {**info, "reward": sum(rewards) if self.called.gym == "sum" else [*rewards]}
        if missing := [name for name in self.called.columns if name not in known]:
            raise BadResult(f"`step` returned an info without `{missing[0]}`, which the generation writes")
        return EnvironmentReply(observed, tuple(known[name] for name in self.called.columns), any(over))


class _Call:
    """A call under way."""

    def __init__(self, instances: Instances, position: int, ask: Ask) -> None:
        self.instances = instances
        self.position = position
        self.ask = ask
        self.began = self.ended = math.inf  # time.monotonic
        self.future: Future[EnvironmentReply | Failure] = (
            asyncio.run_coroutine_threadsafe(self._waiting(), _loop())
            if instances.waits
            else instances.threads.submit(self._done)
        )

    def answer(self) -> EnvironmentReply | Failure:
        """As soon as there is one."""
        limit = self.instances.called.timeout
        future = self.future
        while not future.done() and (left := min(self.began, time.monotonic()) + limit - time.monotonic()) > 0:
            wait([future], None if limit == math.inf else left)
        if not future.done() or self.ended - self.began > limit:
            future.cancel()
            return Failure.of(TimeoutError(f"it takes longer than {limit:g} s, its `timeout`"), "timeout")
        return future.result()

    def _done(self) -> EnvironmentReply | Failure:
        self.began = time.monotonic()
        try:
            with call_of(self.instances.process):
                found = self.instances.begun(self.position, self.ask)
            return self.instances.read(self.position, self.ask, found)
        except BaseException as error:
            return Failure.of(error)
        finally:
            self.ended = time.monotonic()

    async def _waiting(self) -> EnvironmentReply | Failure:
        self.began = time.monotonic()
        try:
            with call_of(self.instances.process):
                found = self.instances.begun(self.position, self.ask)
                if inspect.isawaitable(found):
                    found = await found
            return self.instances.read(self.position, self.ask, found)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # an exit would end the loop
            return Failure.of(error)
        finally:
            self.ended = time.monotonic()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _parts(method: str, found: Any, parts: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(found, tuple) or len(found) != len(parts):
        what = f"`{method}` returned {brief(found)}, where a tuple of {len(parts)} belongs"
        raise BadResult(f"{what}: {', '.join(parts)}")
    return found


def _truth(value: Any, where: str, what: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadResult(f"`step` returned {brief(value)} {where}, where true or false belongs: {what}")
    return bool(value)


def _said(value: Any, method: str) -> Utterance:
    """What an environment says; None is nothing."""
    if (found := _messages(value, method)) is not None:
        return found
    what = half_character(value) if isinstance(value, str) else "" if value is None else brief(value)
    if what:
        raise BadResult(f"it returned {what}, where the text belongs that it says, messages, or none")
    return value or ""


def _observed(value: Any, method: str) -> Utterance:
    """Return what an environment of gymnasium's kind says: text, messages, or nothing."""
    if (found := _messages(value, method)) is not None:
        return found
    if value is not None and not isinstance(value, str):
        what = f"the observation is {brief(value)}, and a policy reads text"
        raise BadResult(f"{what}: wrap the class, and let `reset` and `step` return what is to be read")
    if half := half_character(value or ""):
        raise BadResult(f"the observation has {half}, and a policy reads text")
    return value or ""


def _messages(value: Any, method: str) -> Messages | None:
    """A copy of a message or of a list of them; None for what is neither. Raises BadResult."""
    given = [value] if isinstance(value, dict) else value
    if not are_messages(given):
        return None
    try:
        found: Messages = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResult(f"`{method}` returned messages that are no JSON: {error}") from None
    if half := half_character_within(found):
        raise BadResult(f"`{method}` returned messages with {half}, which has no tokens")
    if method == "step" and any(message["role"] == "assistant" for message in found):
        raise BadResult("`step` returned a message of the `assistant`, and what that says is drawn by the policy")
    return found


__all__ = ["Ask", "ClassSignature", "EnvironmentReply", "EpisodeStart", "Failure", "Instances", "Utterance"]
