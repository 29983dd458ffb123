"""Instructions for the processes of a pool, and the execution of their streams.

An instruction stream is the list of instructions that a pool executes in one iteration or evaluation. A `Walk` is the
position in the streams; a `Walker` is the code that acts on each instruction.

Invariant: all code that executes, times or checks instruction streams implements `Walker` and uses a `Walk`. `Walker`
has one method per instruction. A new instruction is added to `Op`. mypy then reports the code that does not handle the
new instruction yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

Op = Literal["RESHARD", "RUN", "RELEASE", "SWAP_IN", "WAIT", "AGAIN"]


@dataclass(frozen=True)
class Instruction:
    """An instruction about a node; the methods of `Walker` explain each `op`.

    Only two instructions use the field `other`. RESHARD moves weights over the resharding edge `node` => `other`. AGAIN
    continues with the instructions of the node `other`, where another round of prompts starts.
    """

    op: Op
    node: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.node} => {self.other}" if self.other else f"{self.op} {self.node}"


@dataclass(frozen=True)
class InstructionStream:
    """The instructions of a pool for a task: `train` or the name of an evaluation."""

    pool: str
    task: str
    instructions: tuple[Instruction, ...]


class Walker(ABC):
    """A visitor of instruction streams, with one method per instruction.

    In each method, `pool` is the pool whose stream has the instruction.
    """

    def ready(self, pool: str, node: str, /) -> bool:
        """Return whether the RUN instruction of a node can be executed immediately.

        A walker that cannot ask whether rows have arrived returns True, and waits for the rows in `run`.
        """
        return True

    def weights_ready(self, pool: str, src: str, dst: str, /) -> bool:
        """Return whether the RESHARD instruction of an edge can be executed immediately.

        A walker that cannot ask whether the weights have arrived returns True, and waits for the weights in `reshard`.
        """
        return True

    @abstractmethod
    def run(self, pool: str, node: str, /) -> None:
        """RUN: compute a node until the node gets no more rows."""

    @abstractmethod
    def reshard(self, pools: Sequence[str], src: str, dst: str, /) -> None:
        """RESHARD: move the weights of the update `src` to the generation `dst`.

        The method is called once for all pools whose streams have this instruction; `pools` are their names.
        """

    @abstractmethod
    def release(self, pool: str, node: str, /) -> None:
        """RELEASE: remove the weights of a generation from the devices."""

    @abstractmethod
    def swap_in(self, pool: str, node: str, /) -> None:
        """SWAP_IN: start to copy the weights of the update `node` back from host memory."""

    @abstractmethod
    def wait(self, pool: str, node: str, /) -> None:
        """WAIT: wait until the weights of the update `node` are back on the devices."""

    @abstractmethod
    def again(self, pool: str, node: str, rounds: int, /) -> bool:
        """AGAIN: return whether the filter `node` needs another round of prompts.

        `rounds` is the number of rounds that have already run.
        """


class Walk:
    """The positions of pools in their instruction streams of one task.

    The pools advance in parallel. In a run, each process advances only its own pool. A RESHARD can be in the streams of
    several pools. It is executed when all these pools have reached it.
    """

    def __init__(self, streams: Mapping[str, Sequence[Instruction]], begin: int = 0) -> None:
        """Begin at the first instruction of each stream, or after `begin` instructions."""
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
        """Return the next instruction of a pool; None at the end of the pool's stream."""
        stream = self.streams[pool]
        index = self._position[pool]
        return stream[index] if index < len(stream) else None

    def advance(self, pool: str, walker: Walker) -> bool:
        """Execute a pool's next instruction if possible; return whether it was executed."""
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
        """Execute instructions of all pools until no instruction can be executed.

        Return whether all streams ended.
        """
        while any(self.advance(pool, walker) for pool in self.streams):
            pass
        return all(self.step(pool) is None for pool in self.streams)


def find_round_start(stream: Sequence[Instruction], index: int) -> int:
    """Return the index of the instruction with which another round of prompts starts.

    `index` is the index of the AGAIN instruction, which requests the round. A round starts with the RUN of its first
    node. If the weights of this node are released between the RUN and the AGAIN, the round starts with the RESHARD that
    moves the weights to the node.
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
    """Return the nodes that the streams of a task run, one stream after another."""
    return [
        instruction.node
        for stream in streams
        if stream.task == task
        for instruction in stream.instructions
        if instruction.op == "RUN"
    ]
