"""The instances of a user's environment, called concurrently.

Invariant: an instance gets one call at a time. If a call raises an error, takes too long or returns an unusable value,
the result of the call is a Failure. The caller then decides what happens to the row.
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
from .own_process import ProcessExit, guarded_call
from .user_traceback import BadResult, ErrorSummary
from .values import InjectedArguments, describe_briefly, pure_numbers

Reason = Literal["raised", "timeout", "rubbish", "exited", "memory"]


@dataclass(frozen=True)
class Failure:
    """The reason why an environment, an agent or a function gave no result for a row."""

    reason: Reason
    summary: ErrorSummary

    @classmethod
    def from_error(cls, error: BaseException, reason: Reason | None = None) -> Failure:
        """Return the failure for an error.

        `reason` is needed only if the type of the error does not imply the reason.
        """
        inferred: Reason = "raised"
        if isinstance(error, BadResult | MemoryError | ProcessExit):
            kinds: dict[type, Reason] = {BadResult: "rubbish", MemoryError: "memory", ProcessExit: "exited"}
            inferred = next(kind for error_type, kind in kinds.items() if isinstance(error, error_type))
        return cls(reason or inferred, ErrorSummary.from_error(error))


Utterance = str | Messages  # what an environment says: text as it is, or messages


@dataclass(frozen=True)
class EnvironmentReply:
    """The reply of an environment to one call.

    - `utterance`: the text or the messages of the environment.
    - `values`: the values of the columns that the environment writes.
    - `ended`: whether the episode is over.
    """

    utterance: Utterance
    values: tuple[Any, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class EpisodeStart:
    """A request to begin the episode of a row.

    `arguments` are the arguments of `reset` that come from columns.
    """

    task: str  # the name of the task
    iteration: int
    row: int
    arguments: Mapping[str, Any]


Ask = EpisodeStart | str  # a beginning, or the text that the policy wrote


@dataclass(frozen=True)
class ClassSignature:
    """An environment class, and how its methods are called.

    - `make`: the class, which is called to make an instance.
    - `filled`: the arguments `rng`, `tokenizer` and `iteration`, which `reset` gets if it has parameters with these
      names.
    - `columns`: the columns whose values `step` returns.
    - `timeout`: the maximum number of seconds for a call.
    - `gym`: "" for the interface of msrl_graph. For a gymnasium class, it is "sum" if the column `reward` is the sum of
      the rewards of all steps, or "each" if the column is the list of these rewards.
    """

    make: Callable[[], Any]
    filled: InjectedArguments
    columns: tuple[str, ...]
    timeout: float
    gym: Literal["", "sum", "each"] = ""


class Instances:
    """The instances of an environment class for some rows, one for each row.

    An instance is identified by the position of its row. Methods that are not `async` run in threads, with at most
    `at_once` calls at a time. `async` methods share an event loop, in which all calls run concurrently.
    """

    def __init__(self, called: ClassSignature, at_once: int) -> None:
        self.called = called
        self.made = dict[int, Any]()
        self.process = os.getpid()
        self.rewards: dict[int, list[float]] = {}  # of each step so far, for a gymnasium class
        self.threads = ThreadPoolExecutor(at_once, "environment")
        methods = (getattr(called.make, name, None) for name in ("reset", "step"))
        self.waits = any(map(inspect.iscoroutinefunction, methods))

    def answers(
        self, requests: Mapping[int, Ask], stops: bool, where: str = ""
    ) -> dict[int, EnvironmentReply | Failure]:
        """Call the instances, and return the instances' replies.

        The keys of `requests` and of the result are the positions of the rows. If `stops` is true, only the replies up
        to the first failure are returned. `where` is the text that progress reports show.
        """
        row_progress.report(0, len(requests), where)
        calls = {position: _Call(self, position, request) for position, request in requests.items()}
        replies: dict[int, EnvironmentReply | Failure] = {}
        for position, call in calls.items():
            row_progress.report(len(replies), len(calls), where)
            replies[position] = call.answer()
            if stops and isinstance(replies[position], Failure):
                for other in calls.values():
                    other.future.cancel()
                break
        return replies

    def end(self) -> None:
        """Close the instances of a gymnasium class, and drop all instances."""
        closing = [instance.close for instance in self.made.values() if self.called.gym and hasattr(instance, "close")]
        futures = [
            self.threads.submit(self._close, close_method)
            for close_method in closing
            if not inspect.iscoroutinefunction(close_method)
        ]
        futures += [
            asyncio.run_coroutine_threadsafe(close_method(), _event_loop())
            for close_method in closing
            if inspect.iscoroutinefunction(close_method)
        ]
        wait(futures, None if self.called.timeout == math.inf else self.called.timeout)
        self.made = {}
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _close(self, close: Callable[[], object]) -> None:
        with guarded_call(self.process):
            close()

    def start_call(self, position: int, request: Ask) -> Any:
        """Call `reset` or `step` of the user's class, and return the result.

        The result may be awaitable. For an EpisodeStart, the instance is made first.
        """
        if not isinstance(request, EpisodeStart):
            return self.made[position].step(request)
        signature = self.called
        instance = self.called.make()
        self.made[position] = instance
        if signature.gym:
            return instance.reset(
                seed=signature.filled.episode_seed(request.task, request.iteration, request.row),
                options=dict(request.arguments),
            )
        return instance.reset(**request.arguments, **signature.filled(request.task, request.iteration, request.row))

    def parse_result(self, position: int, request: Ask, result: Any) -> EnvironmentReply:
        """Convert the result of a call to a reply.

        Raises BadResult if the result cannot be used.
        """
        if self.called.gym:
            return self._parse_gym_result(position, request, result)
        if isinstance(request, EpisodeStart):
            return EnvironmentReply(_check_utterance(result, "reset"))
        columns = self.called.columns
        utterance, *values, over = _unpack("step", result, ("what it says", *columns, "whether the episode is over"))
        return EnvironmentReply(
            _check_utterance(utterance, "step"),
            tuple(values),
            _check_truth(over, "at the end", "whether the episode is over"),
        )

    def _parse_gym_result(self, position: int, request: Ask, result: Any) -> EnvironmentReply:
        if isinstance(request, EpisodeStart):
            observation, _ = _unpack("reset", result, ("the observation", "info"))
            self.rewards[position] = []
            return EnvironmentReply(_check_observation(observation, "reset"))
        observation, reward, *ends, info = _unpack(
            "step", result, ("the observation", "reward", "terminated", "truncated", "info")
        )
        observed = _check_observation(observation, "step")
        if not isinstance(info, Mapping):
            raise BadResult(f"`step` returned {describe_briefly(info)} for the info, where a dictionary belongs")
        end_flags = [
            _check_truth(end, f"for `{name}`", name)
            for end, name in zip(ends, ("terminated", "truncated"), strict=True)
        ]
        try:
            self.rewards[position].append(pure_numbers(reward, np.float64).item())
        except (TypeError, ValueError):  # several numbers
            raise BadResult(
                f"`step` returned {describe_briefly(reward)} for the reward, where a number belongs"
            ) from None
        rewards = self.rewards[position]
        known = {**info, "reward": sum(rewards) if self.called.gym == "sum" else [*rewards]}
        if missing := [name for name in self.called.columns if name not in known]:
            raise BadResult(f"`step` returned an info without `{missing[0]}`, which the generation writes")
        return EnvironmentReply(observed, tuple(known[name] for name in self.called.columns), any(end_flags))


class _Call:
    """A call of an instance that is in progress."""

    def __init__(self, instances: Instances, position: int, request: Ask) -> None:
        self.instances = instances
        self.position = position
        self.ask = request
        self.began = self.ended = math.inf  # time.monotonic
        self.future: Future[EnvironmentReply | Failure] = (
            asyncio.run_coroutine_threadsafe(self._run_in_loop(), _event_loop())
            if instances.waits
            else instances.threads.submit(self._run_in_thread)
        )

    def answer(self) -> EnvironmentReply | Failure:
        """Wait for the environment's reply; return a Failure if the call takes too long."""
        limit = self.instances.called.timeout
        future = self.future
        while not future.done() and (seconds_left := min(self.began, time.monotonic()) + limit - time.monotonic()) > 0:
            wait([future], None if limit == math.inf else seconds_left)
        if not future.done() or self.ended - self.began > limit:
            future.cancel()
            return Failure.from_error(TimeoutError(f"it took longer than its `timeout` of {limit:g} s"), "timeout")
        return future.result()

    def _run_in_thread(self) -> EnvironmentReply | Failure:
        self.began = time.monotonic()
        try:
            with guarded_call(self.instances.process):
                result = self.instances.start_call(self.position, self.ask)
            return self.instances.parse_result(self.position, self.ask, result)
        except BaseException as error:
            return Failure.from_error(error)
        finally:
            self.ended = time.monotonic()

    async def _run_in_loop(self) -> EnvironmentReply | Failure:
        self.began = time.monotonic()
        try:
            with guarded_call(self.instances.process):
                result = self.instances.start_call(self.position, self.ask)
                if inspect.isawaitable(result):
                    result = await result
            return self.instances.parse_result(self.position, self.ask, result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # an exit would end the loop
            return Failure.from_error(error)
        finally:
            self.ended = time.monotonic()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _unpack(method: str, result: Any, parts: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != len(parts):
        message = f"`{method}` returned {describe_briefly(result)}, where a tuple of {len(parts)} belongs"
        raise BadResult(f"{message}: {', '.join(parts)}")
    return result


def _check_truth(value: Any, where: str, meaning: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadResult(f"`step` returned {describe_briefly(value)} {where}, where true or false belongs: {meaning}")
    return bool(value)


def _check_utterance(value: Any, method: str) -> Utterance:
    """Return the text or the messages of an environment; None becomes an empty text.

    Raises BadResult for any other value.
    """
    if (messages := _copy_messages(value, method)) is not None:
        return messages
    problem = half_character(value) if isinstance(value, str) else "" if value is None else describe_briefly(value)
    if problem:
        raise BadResult(f"it returned {problem}, where text, messages or None belong")
    return value or ""


def _check_observation(value: Any, method: str) -> Utterance:
    """Return the observation of a gymnasium environment, as text or messages.

    None becomes an empty text. Raises BadResult for any other value.
    """
    if (messages := _copy_messages(value, method)) is not None:
        return messages
    if value is not None and not isinstance(value, str):
        message = f"the observation is {describe_briefly(value)}, but a policy reads text"
        raise BadResult(f"{message}: wrap the class so that `reset` and `step` return text or messages")
    if half := half_character(value or ""):
        raise BadResult(f"the observation has {half}, but a policy reads text")
    return value or ""


def _copy_messages(value: Any, method: str) -> Messages | None:
    """Return a copy of a message or a list of messages; None for any other value.

    Raises BadResult if a message cannot be used.
    """
    candidates = [value] if isinstance(value, dict) else value
    if not are_messages(candidates):
        return None
    try:
        copied: Messages = json.loads(json.dumps(candidates))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResult(f"`{method}` returned messages that are not JSON: {error}") from None
    if half := half_character_within(copied):
        raise BadResult(f"`{method}` returned messages with {half}, which has no tokens")
    if method == "step" and any(message["role"] == "assistant" for message in copied):
        raise BadResult("`step` returned a message of the `assistant`, which only the policy writes")
    return copied


__all__ = ["Ask", "ClassSignature", "EnvironmentReply", "EpisodeStart", "Failure", "Instances", "Utterance"]
