"""Instructions: what the processes of a pool are told to do, the closed set of them, and the one walk through them.

Invariant: whoever does, times or checks what streams say is a `Walker`, with a method for each instruction, and goes
through them by a `Walk`. To be in the set an instruction must be in `Op`; mypy then names what does not know it yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

Op = Literal["RESHARD", "RUN", "RELEASE", "SWAP_IN", "WAIT", "AGAIN"]


@dataclass(frozen=True)
class Instruction:
    """What to do with a node; `Walker` says what each means. Two have an `other`: RESHARD is about the edge `node` =>
    `other`, and AGAIN goes back to `other`."""

    op: Op
    node: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.node} => {self.other}" if self.other else f"{self.op} {self.node}"


@dataclass(frozen=True)
class InstructionStream:
    """What the processes of a pool do, in order; `task` is `train` or the name of an evaluation."""

    pool: str
    task: str
    instructions: tuple[Instruction, ...]


class Walker(ABC):
    """Who goes through streams: what each instruction is to it. `pool` is whose stream the instruction stands in."""

    def ready(self, pool: str, node: str, /) -> bool:
        """Whether RUN of a node can be done now. Who can only wait for its rows says that it is, and waits."""
        return True

    def given(self, pool: str, src: str, dst: str, /) -> bool:
        """Whether a RESHARD can be done now. Who can only wait for the weights says that it can, and waits."""
        return True

    @abstractmethod
    def run(self, pool: str, node: str, /) -> None:
        """RUN: the node computes, as long as it gets rows."""

    @abstractmethod
    def reshard(self, pools: Sequence[str], src: str, dst: str, /) -> None:
        """RESHARD: the weights of the update `src` go to the generation `dst`; once for all `pools` that take part."""

    @abstractmethod
    def release(self, pool: str, node: str, /) -> None:
        """RELEASE: the weights of a generation leave the devices."""

    @abstractmethod
    def swap_in(self, pool: str, node: str, /) -> None:
        """SWAP_IN: the weights of an update start on their way back from the host's memory."""

    @abstractmethod
    def wait(self, pool: str, node: str, /) -> None:
        """WAIT: until they are back."""

    @abstractmethod
    def again(self, pool: str, node: str, rounds: int, /) -> bool:
        """AGAIN: whether after so many rounds of prompts the filter `node` needs one more."""


class Walk:
    """How far the streams of a task are walked, by pool, all side by side; a process walks its own alone. A RESHARD is
    done when all pools that have it are at it."""

    def __init__(self, streams: Mapping[str, Sequence[Instruction]], begin: int = 0) -> None:
        """`begin`: how many instructions of each were done before."""
        self.streams = streams
        self._at = dict.fromkeys(streams, begin)
        self._rounds = dict.fromkeys(streams, 1)
        self._meet: dict[tuple[str, str], list[str]] = {}
        for pool, stream in streams.items():
            for x in stream:
                if x.op == "RESHARD":
                    pools = self._meet.setdefault((x.node, x.other), [])
                    pools += [pool] if pool not in pools else []

    def step(self, pool: str) -> Instruction | None:
        """What a pool does next; None at the end of its stream."""
        stream = self.streams[pool]
        at = self._at[pool]
        return stream[at] if at < len(stream) else None

    def advance(self, pool: str, walker: Walker) -> bool:
        """Takes the next step of a pool; whether it could be taken."""
        stream = self.streams[pool]
        at = self._at[pool]
        if at == len(stream):
            return False
        step = stream[at]
        match step.op:
            case "RUN":
                if not walker.ready(pool, step.node):
                    return False
                walker.run(pool, step.node)
            case "RESHARD":
                pools = self._meet[step.node, step.other]
                if any(self.step(p) != step for p in pools) or not walker.given(pool, step.node, step.other):
                    return False
                walker.reshard(pools, step.node, step.other)
                for other in pools:
                    self._at[other] += other != pool
            case "RELEASE":
                walker.release(pool, step.node)
            case "SWAP_IN":
                walker.swap_in(pool, step.node)
            case "WAIT":
                walker.wait(pool, step.node)
            case "AGAIN":
                if walker.again(pool, step.node, self._rounds[pool]):
                    self._rounds[pool] += 1
                    self._at[pool] = back(stream, at)
                    return True
            case _:
                assert_never(step.op)
        self._at[pool] = at + 1
        return True

    def finish(self, walker: Walker) -> bool:
        """Takes all steps that can be taken; whether no pool waits for another at the end."""
        while any(self.advance(pool, walker) for pool in self.streams):
            pass
        return all(self.step(pool) is None for pool in self.streams)


def back(stream: Sequence[Instruction], at: int) -> int:
    """Where a walk goes on when the AGAIN at a place asks for another round of prompts: at the RUN of the round's first
    node, or the RESHARD before it where the weights that it needs were released since."""
    other = stream[at].other
    begin = [i for i, x in enumerate(stream[:at]) if (x.op, x.node) == ("RUN", other)]
    weights = [i for i, x in enumerate(stream[:at]) if (x.op, x.other) == ("RESHARD", other)]
    released = not begin or Instruction("RELEASE", other) in stream[begin[0] : at]
    return weights[0] if weights and released else begin[0]


def nodes_run(streams: Iterable[InstructionStream], task: str = "train") -> list[str]:
    """The nodes that the streams of a task run, stream by stream."""
    return [x.node for s in streams if s.task == task for x in s.instructions if x.op == "RUN"]
