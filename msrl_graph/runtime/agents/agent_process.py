"""The process of a node's agents, beside the first rank of a group: what the rank knows of it, and what it does.

Invariant: the user's code never runs in a rank, which it could hold up or end; a process that its rank has left ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...ir.attributes import place_of_call
from ...ir.graph import Node
from ...ir.plan import Plan, from_json
from ..process import log, shipped_files
from ..process.task_report import ProcessLost, RunError
from .agent_runner import Agents
from .rank_protocol import AgentsBroken, AgentsFinished, BatchStart, SampleReplies, SampleReply, SampleRequest, Setup

ROOT = Path(__file__).parents[3]  # of the package
FAREWELL = 5.0  # seconds that the process has to end when it is left


class AgentProcess:
    """What a rank knows of the process of a node's agents; it is started here, and is ready when it first answers."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.node = node
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.agent_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        self.process = process
        self.line = Connection(ours.detach())
        weakref.finalize(self, _leave, self.line, process)
        self.line.send(Setup(plan.to_json(), node.name, shipped_files.folder(), log.file()))

    def begin(self, batch: BatchStart) -> None:
        """Starts an agent for each row of a batch."""
        self._asked(batch)

    def next(self, drawn: list[SampleReply]) -> list[SampleRequest] | AgentsFinished:
        """What is to be drawn next, after what was drawn; nothing, where for a while nobody asks."""
        found: list[SampleRequest] | AgentsFinished = self._asked(SampleReplies(drawn))
        return found

    def _asked(self, question: BatchStart | SampleReplies) -> Any:
        try:
            self.line.send(question)
            found = self.line.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            what = f"`{self.node.name}` ({place_of_call(self.node)}): the process of its agents has ended, with {how}"
            raise (ProcessLost if status == -signal.SIGKILL else RunError)(what) from None
        if isinstance(found, AgentsBroken):
            raise RunError(found.message)
        return found


def _leave(line: Connection, process: subprocess.Popen[bytes]) -> None:
    line.close()
    try:
        process.wait(FAREWELL)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(descriptor: int) -> None:
    """What the process does: answers its rank, one question after another, until that has left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who stops a run by the keyboard stops its rank
    line = Connection(descriptor)
    setup: Setup = line.recv()
    if setup.log:
        log.share(setup.log, f"agents of {setup.node}")
    if setup.files:
        shipped_files.use(setup.files)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    agents = None
    failed = ""
    try:
        plan = from_json(setup.plan)
        agents = Agents(plan, plan.graph.node(setup.node))
    except RunError as error:
        failed = str(error)
    while True:
        try:
            question = line.recv()
        except (EOFError, OSError):
            os._exit(0)  # whatever the user's threads are at
        if agents is None:
            line.send(AgentsBroken(failed))
            continue
        answer = agents.begin(question) if isinstance(question, BatchStart) else agents.next(question)
        line.send(asyncio.run_coroutine_threadsafe(answer, loop).result())


if __name__ == "__main__":
    main(int(sys.argv[1]))
