"""The process that runs a generation node's agents.

The first rank of each data-parallel group starts one process of this kind. `AgentProcess` is the rank's handle of the
process, and `main` is the program of the process.

Invariant: the user's code never runs in a rank, because this code could block or end the rank. The process ends when
its rank has ended.
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
EXIT_TIMEOUT = 5.0  # seconds that the process has to end by itself


class AgentProcess:
    """A rank's handle of the process that runs a node's agents.

    The constructor starts the process, and does not wait until the process is ready. The first call of `begin` waits.
    """

    def __init__(self, plan: Plan, node: Node) -> None:
        self.node = node
        own_end, process_end = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.agent_process", str(process_end.fileno())],
            pass_fds=[process_end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        process_end.close()
        self.process = process
        self.line = Connection(own_end.detach())
        weakref.finalize(self, _end_process, self.line, process)
        self.line.send(Setup(plan.to_json(), node.name, shipped_files.shipped_folder(), log.file_name()))

    def begin(self, batch: BatchStart) -> None:
        """Start an agent for each row of a batch."""
        self._ask(batch)

    def next(self, drawn: list[SampleReply]) -> list[SampleRequest] | AgentsFinished:
        """Pass drawn tokens to the agents, and return the agents' next requests.

        `drawn` has the replies to earlier requests. The list of requests is empty if no agent has sent a request for a
        while. Returns AgentsFinished when all agents have finished, or when the failure of an agent ends the run.
        """
        answer: list[SampleRequest] | AgentsFinished = self._ask(SampleReplies(drawn))
        return answer

    def _ask(self, question: BatchStart | SampleReplies) -> Any:
        try:
            self.line.send(question)
            answer = self.line.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            message = f"`{self.node.name}` ({place_of_call(self.node)}): the process of its agents ended with {how}"
            raise (ProcessLost if status == -signal.SIGKILL else RunError)(message) from None
        if isinstance(answer, AgentsBroken):
            raise RunError(answer.message)
        return answer


def _end_process(line: Connection, process: subprocess.Popen[bytes]) -> None:
    line.close()
    try:
        process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(descriptor: int) -> None:
    """Answer the rank's messages, one after another, until the rank is gone.

    `descriptor` is the file descriptor of the connection to the rank.
    """
    # An interrupt from the keyboard stops the rank, which stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = Connection(descriptor)
    setup: Setup = line.recv()
    if setup.log:
        log.share_file(setup.log, f"agents of {setup.node}")
    if setup.files:
        shipped_files.use_folder(setup.files)
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
            os._exit(0)  # even if threads of the user still run
        if agents is None:
            line.send(AgentsBroken(failed))
            continue
        answer = agents.begin(question) if isinstance(question, BatchStart) else agents.next(question)
        line.send(asyncio.run_coroutine_threadsafe(answer, loop).result())


if __name__ == "__main__":
    main(int(sys.argv[1]))
