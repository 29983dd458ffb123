"""Runs functions on N real processes joined by torch.distributed over gloo. The processes stay: a case begins where the
last one ended."""

import gc
import os
import tempfile
import time
import traceback
from importlib.util import find_spec
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from torch import distributed as dist
from torch import multiprocessing

from msrl_graph.backends.vllm.core import SURROUNDINGS
from msrl_graph.runtime.rank import object_collectives

_teams = {}  # by size: starting ranks takes seconds
# Nearly all of them to import these, which one process does for all of the ranks, before it has threads.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.qwen2.modeling_qwen2",
        "msrl_graph.runtime.rank.rank",
        # Where they are there.
        "megatron.core.models.gpt.gpt_layer_specs",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.core",
        "vllm.v1.executor.uniproc_executor",
        "vllm._custom_ops",
    ]
)


def run(world, function, *arguments):
    """`function(rank, folder, *arguments)` on each of `world` ranks; fails if one of them fails."""
    team = _teams.setdefault(world, Team(world, _anything))
    with tempfile.TemporaryDirectory() as folder:
        team.ask(function, folder, arguments)


def _anything(rank):
    def act(function, folder, arguments):
        function(rank, Path(folder), *arguments)
        dist.barrier()

    return act


def end():
    """Ends the ranks that wait for another `run`."""
    for team in _teams.values():
        team.close()


def _rank(rank, world, folder, function, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    object_collectives.seal_with(b"of the tests")
    try:
        function(rank, Path(folder), *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Team:
    """Ranks that stay: `function(rank, *arguments)` makes on each what then answers to every case."""

    PATIENCE = 120.0  # seconds for an answer, many times what it takes
    # The most threads of a rank. Gloo has a thread for each process group, which wakes 100 times a second. Engines do
    # not destroy their groups. After a hundred cases, these threads took most of the CPU time.
    THREADS = 200

    def __init__(self, world, function, *arguments):
        self.world = world
        self.function = function
        self.arguments = arguments
        self.pipes = []

    def start(self):
        with patch.dict(os.environ, SURROUNDINGS if find_spec("vllm") else {}):  # some count when it is loaded
            forkserver.ensure_running()
        self.folder = tempfile.TemporaryDirectory()
        ends = [_context.Pipe() for _ in range(self.world)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [
            _context.Process(
                target=_stay,
                args=(rank, self.world, self.folder.name, self.function, self.arguments, theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        self.answers(2 * self.PATIENCE)

    def ask(self, *case):
        """What each rank answers; fails where one raises, and where one has not answered in time."""
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send(case)
        found = self.answers(self.PATIENCE)
        if any(psutil.Process(process.pid).num_threads() > self.THREADS for process in self.processes):
            self.close()
        return found

    def answers(self, patience):
        found = {}
        until = time.monotonic() + patience
        while len(found) < self.world:
            ready = connection.wait([p for p in self.pipes if p not in found], max(0, until - time.monotonic()))
            found |= {pipe: pipe.recv() for pipe in ready}
            wrong = [words for _, words in found.values() if words]
            if wrong or not ready:
                hanging = [rank for rank, pipe in enumerate(self.pipes) if pipe not in found]
                self.close()
                raise AssertionError("\n".join(wrong) or f"ranks {hanging} hang")
        return [found[pipe][0] for pipe in self.pipes]

    def close(self):
        """Ends the ranks; the next case starts new ones."""
        if self.pipes:
            for process in self.processes:
                process.kill()
                process.join()
            self.pipes = []
            self.folder.cleanup()


def _stay(rank, world, folder, function, arguments, pipe):
    def serve(rank, _):
        gc.freeze()  # a collection need not look through all that was imported
        act = function(rank, *arguments)
        pipe.send((None, ""))
        while True:
            pipe.send((act(*pipe.recv()), ""))

    try:
        _rank(rank, world, folder, serve, ())
    except Exception:
        pipe.send((None, traceback.format_exc()))
