"""Instructions for the processes of a pool, and the walk through their streams.

Invariant: all code that executes, times or checks streams is a `Walker`, with a method per instruction, and uses a
`Walk`. A new instruction is added to `Op`; mypy then names the code that does not handle it yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

Op = Literal["RESHARD", "RUN", "RELEASE", "SWAP_IN", "WAIT", "AGAIN"]


@dataclass(frozen=True)
class Instruction:
    """An instruction about a node; `Walker` has the meaning of each `op`.

    Two have an `other`: RESHARD is about the edge `node` => `other`, and AGAIN goes back to `other`.
    """

    op: Op
    node: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.node} => {self.other}" if self.other else f"{self.op} {self.node}"


@dataclass(frozen=True)
class InstructionStream:
    """The instructions of a pool; `task` is `train` or the name of an evaluation."""

    pool: str
    task: str
    instructions: tuple[Instruction, ...]


class Walker(ABC):
    """A visitor of streams, with a method per instruction of the stream of `pool`."""

    def ready(self, pool: str, node: str, /) -> bool:
        """Return whether RUN of a node can be done now.

        A walker that can only wait for the rows returns True and waits in `run`.
        """
        return True

    def weights_ready(self, pool: str, src: str, dst: str, /) -> bool:
        """Return whether a RESHARD can be done now.

        A walker that can only wait for the weights returns True and waits in `reshard`.
        """
        return True

    @abstractmethod
    def run(self, pool: str, node: str, /) -> None:
        """RUN: the node computes, as long as it gets rows."""

    @abstractmethod
    def reshard(self, pools: Sequence[str], src: str, dst: str, /) -> None:
        """RESHARD: the weights of the update `src` go to the generation `dst`.

        It is called once for all `pools` that take part.
        """

    @abstractmethod
    def release(self, pool: str, node: str, /) -> None:
        """RELEASE: the weights of a generation leave the devices."""

    @abstractmethod
    def swap_in(self, pool: str, node: str, /) -> None:
        """SWAP_IN: the weights of an update start to return from host memory."""

    @abstractmethod
    def wait(self, pool: str, node: str, /) -> None:
        """WAIT: wait until these weights are back on the devices."""

    @abstractmethod
    def again(self, pool: str, node: str, rounds: int, /) -> bool:
        """AGAIN: return whether the filter needs another round of prompts after `rounds`."""


class Walk:
    """Progress through the streams of a task, by pool, in parallel.

    A process walks only its own stream. A RESHARD is done when all pools that have it have reached it.
    """

    def __init__(self, streams: Mapping[str, Sequence[Instruction]], begin: int = 0) -> None:
        """Begin a walk; `begin` instructions of each stream are already done."""
        self.streams = streams
        self._position = dict.fromkeys(streams, begin)
        self._rounds = dict.fromkeys(streams, 1)
        self._reshard_pools: dict[tuple[str, str], list[str]] = {}
        for pool, stream in streams.items():
            for instruction in stream:
                if instruction.op == "RESHARD":
                    pools = self._reshard_pools.setdefault((instruction.node, instruction.other), [])
                    pools += [pool] if pool not in pools else []

    def step(self, pool: str) -> Instruction | None:
        """Return the next instruction of a pool; None at the end of its stream."""
        stream = self.streams[pool]
        index = self._position[pool]
        return stream[index] if index < len(stream) else None

    def advance(self, pool: str, walker: Walker) -> bool:
        """Take the next step of a pool; return whether that was possible."""
        stream = self.streams[pool]
        index = self._position[pool]
        if index == len(stream):
            return False
        step = stream[index]
        match step.op:
            case "RUN":
                if not walker.ready(pool, step.node):
                    return False
                walker.run(pool, step.node)
            case "RESHARD":
                pools = self._reshard_pools[step.node, step.other]
                if any(self.step(member) != step for member in pools) or not walker.weights_ready(
                    pool, step.node, step.other
                ):
                    return False
                walker.reshard(pools, step.node, step.other)
                for other in pools:
                    self._position[other] += other != pool
            case "RELEASE":
                walker.release(pool, step.node)
            case "SWAP_IN":
                walker.swap_in(pool, step.node)
            case "WAIT":
                walker.wait(pool, step.node)
            case "AGAIN":
                if walker.again(pool, step.node, self._rounds[pool]):
                    self._rounds[pool] += 1
                    self._position[pool] = find_round_start(stream, index)
                    return True
            case _:
                assert_never(step.op)
        self._position[pool] = index + 1
        return True

    def finish(self, walker: Walker) -> bool:
        """Take all possible steps; return whether all streams have ended."""
        while any(self.advance(pool, walker) for pool in self.streams):
            pass
        return all(self.step(pool) is None for pool in self.streams)


def find_round_start(stream: Sequence[Instruction], index: int) -> int:
    """Return the index where a walk continues after an AGAIN at `index`.

    It is that of the RUN of the round's first node, or of the RESHARD before it if the weights that the node needs have
    been released since.
    """
    other = stream[index].other
    begin = [
        place
        for place, instruction in enumerate(stream[:index])
        if (instruction.op, instruction.node) == ("RUN", other)
    ]
    weights = [
        place
        for place, instruction in enumerate(stream[:index])
        if (instruction.op, instruction.other) == ("RESHARD", other)
    ]
    released = not begin or Instruction("RELEASE", other) in stream[begin[0] : index]
    return weights[0] if weights and released else begin[0]


def nodes_run(streams: Iterable[InstructionStream], task: str = "train") -> list[str]:
    """Return the nodes that the streams of a task run, stream by stream."""
    return [
        instruction.node
        for stream in streams
        if stream.task == task
        for instruction in stream.instructions
        if instruction.op == "RUN"
    ]
