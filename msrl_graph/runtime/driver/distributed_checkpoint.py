"""Checkpoints of hosts that do not see the run's folder: each has its part, at the same path on a disk of its own.

Invariant: parts have their names before the driver writes the manifest, so that a checkpoint with a manifest is whole.
What a run goes on from is looked for on all hosts before a rank builds anything; what a host's ranks need of it, and
that host lacks, comes from one that has it, in pieces. Where all see the folder, nothing of this has work.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ...diagnostics import Diagnostic, Fault
from ...files import urls
from ...ir.plan import Plan
from ..data import row_files as rows
from ..metrics.recorder import Recorder
from ..process import fault_points
from ..weights import checkpoint, checkpoint_parts
from ..weights.checkpoint import CheckpointFile, CheckpointHost, Manifest
from . import run_inputs
from .run_state import FILE as STATES
from .run_state import RunState

Wait = Callable[[Sequence[Any]], list[Any]]  # the results of what Ray was asked for

HERE = -1  # the driver, by its own disk; hosts are called by their numbers
AHEAD = 4  # pieces of a file that are under way at once


class DistributedCheckpoint:
    """The first rank of each host in `apart` keeps its part of what is saved; those of hosts in `unseen` have parts,
    perhaps, of what the run goes on from."""

    def __init__(self, plan: Plan, ranks: Sequence[Any], wait: Wait) -> None:
        self.plan = plan
        self.ranks = ranks
        self.wait = wait
        self.apart: list[int] = []
        self.unseen: list[int] = []
        self.wrote: dict[int, list[str]] = {}  # the files of the newest checkpoint
        self.held: dict[str, list[int]] = {}  # by file of what the run goes on from: who has it

    # Saving

    def save(
        self, out: Path, iteration: int, recorder: Recorder, program: Mapping[str, Any], carried: RunState, wait: Wait
    ) -> Path:
        """Writes a checkpoint. OSError where a disk does not take it: nothing of it is left then."""
        written = None
        try:
            written = checkpoint.begin(out, iteration).absolute()
            self._all("begin", str(out.absolute()), iteration)
            fault_points.reach("driver", f"begun checkpoint {iteration}")
            lines = recorder.written
            says = checkpoint.said(iteration, lines, carried.position, program)
            found = wait([r.checkpoint.remote(str(written), says) for r in self.ranks])
            _check(wrong for _, _, wrong in found)
            of_ranks = [[f for f in files if f.pieces] for files, _, _ in found]
            metrics = checkpoint.write_metrics(written, recorder.copy(), says)
            files = (*chain.from_iterable(of_ranks), *carried.save(written, says), metrics)
            steps = {name: count for _, steps, _ in found for name, count in steps.items()}
            known = (iteration, lines, steps, dict(program), files, carried.position)
            read = run_inputs.read(out)
            manifest = self._signed(checkpoint.Manifest(checkpoint.FORMAT, *known, inputs=read), of_ranks)
            fault_points.reach("driver", f"written checkpoint {iteration}")
            for host in self.apart:  # one after the other, since some may have one disk
                _check([self._got(self._ask(host, "name", str(written)))])
            fault_points.reach("driver", f"placed checkpoint {iteration}")
            best = {best.iteration for best in recorder.bests}
            target = checkpoint.commit(written, manifest, self.plan.deploy.run.keep, best)
            fault_points.reach("driver", f"kept checkpoint {iteration}")
        except OSError:
            if written is not None:
                for place in (HERE, *self.apart):
                    self._got(self._ask(place, "forget", str(written)))
            raise
        # It is whole already: a host that fails now keeps what is old, and has its part without a manifest. The
        # manifest comes last, since it is what makes a checkpoint of a folder.
        content = {name: (target / name).read_bytes() for name in (checkpoint.DIGEST, checkpoint.MANIFEST)}
        names = [p.name for p in checkpoint.up_to(target)]
        for answer in [self._ask(host, "keep", str(out.absolute()), names, content) for host in self.apart]:
            self._got(answer)
        return target

    def _signed(self, manifest: Manifest, files: Sequence[Sequence[CheckpointFile]]) -> Manifest:
        """The manifest with who has what; `files` are those of each rank."""
        wrote = {f.name: self.plan.cluster.host(rank) for rank, some in enumerate(files) for f in some}
        names: dict[int, list[str]] = {}
        for file in manifest.files:
            host = wrote.get(file.name, HERE)
            names.setdefault(host if host in self.apart else HERE, []).append(file.name)
        self.wrote = names
        if not self.apart:
            return manifest
        where = {host: self._got(self._where(host)) for host in sorted(names)}
        hosts = tuple(CheckpointHost(address, node, tuple(names[host])) for host, (address, node) in where.items())
        return replace(manifest, format_version=checkpoint.PARTED, hosts=hosts)

    def send(self, folder: Path, url: str) -> None:
        """Puts a checkpoint at the URL of the run, where it is seen when all of it is there, and removes those that
        are kept no longer. OSError or Fault where that fails."""
        run = folder.parent.parent
        below = urls.under(url, checkpoint.FOLDER)
        there = urls.under(below, folder.name)
        urls.remove(there, (checkpoint.MANIFEST,))  # of what a run wrote that went on otherwise
        asked = [
            self._ask(place, "send", str(folder.absolute()), there, self.wrote[place])
            for place in sorted(self.wrote, reverse=True)
        ]
        _check([self._got(answer) for answer in asked])
        urls.send(run, url, ("metrics.jsonl", "plan.json", run_inputs.FILE))
        urls.send(folder, there, (checkpoint.DIGEST,))
        urls.send(folder, there, (checkpoint.MANIFEST,), whole=True)
        kept = {p.name for p in checkpoint.found(run)}
        with urls.told(url):
            old = [n for n in checkpoint.at_url(below, whole=False) if n not in kept and int(n) < int(folder.name)]
        urls.remove(below, [*(f"{name}/{checkpoint.MANIFEST}" for name in old), *old])

    def leave(self, run: Path, url: str) -> None:
        """Puts up what else hosts have of a run that has ended, and removes their parts. OSError where that fails."""
        for act in (("send", str(run), url, ("logs", rows.FOLDER, rows.EVALUATED)), ("forget", str(run))):
            self._all(*act)

    # Going on

    def check(self, folder: Path) -> None:
        """Looks for all files of what the run goes on from. Raises Fault, with what each host lacks."""
        if not self.unseen:
            return
        manifest = checkpoint.manifest_of(folder)
        self.held, found = self._looked(folder, manifest)
        if all(self.held.values()):
            return
        places = {self._got(self._where(place))[0]: place for place in (HERE, *self.unseen)}
        told = []
        for host in manifest.hosts:
            lost = [name for name in host.files if not self.held[name]]
            at = places.get(host.address)
            what = [f"{name} {'is on no host of this run' if at is None else found[at][name]}" for name in lost]
            if lost:
                told.append(f"on {host.address} (Ray node {host.node[:12]}) {', '.join(what)}")
        message = f"the checkpoint {folder} cannot be used: {'; '.join(told)}"
        older = (p for p in reversed(checkpoint.found(folder.parent.parent)) if int(p.name) < int(folder.name))
        good = next((p for p in older if self._is_whole(p)), None)
        help = "bring back what is missing, or begin anew: no older one is whole"
        if good:
            help = f"{good} is whole: --resume {good}, with --out another folder, or --overwrite for what is newer"
        raise Fault(Diagnostic("bad-checkpoint", message, help=help))

    def bring(self, folder: Path, manifest: Manifest, wait: Wait) -> None:
        """Has files of what the run goes on from copied to hosts that lack them, and whose ranks want them. OSError
        where that fails."""
        if not self.unseen:
            return
        wanted: dict[int, set[str]] = {HERE: {STATES, checkpoint.METRICS}}
        for rank, names in enumerate(wait([r.wants.remote(manifest) for r in self.ranks])):
            host = self.plan.cluster.host(rank)
            wanted.setdefault(host if host in self.unseen else HERE, set()).update(names)
        lacking = {
            place: [f for f in manifest.files if f.name in names and place not in self.held[f.name]]
            for place, names in wanted.items()
        }
        with ThreadPoolExecutor(len(lacking)) as pool:
            list(pool.map(partial(self._copies, folder), lacking, lacking.values()))

    def _copies(self, folder: Path, target: int, files: Sequence[CheckpointFile]) -> None:
        for file in files:
            self._copy(folder, file, self.held[file.name][0], target)

    def collect(self, folder: Path) -> None:
        """Has a folder that rank 0 wrote come to the driver. OSError where that fails."""
        if (source := self.plan.cluster.host(0)) not in self.apart:
            return
        shutil.rmtree(folder, ignore_errors=True)
        for file in self._got(self._ask(source, "listed", str(folder))):
            self._copy(folder, file, source, HERE)

    def _copy(self, folder: Path, file: CheckpointFile, source: int, target: int) -> None:
        under_way = deque[Any]()
        for offset in range(0, file.bytes, checkpoint_parts.PIECE):
            content = self._ask(source, "piece", str(folder), file.name, offset)
            if target == HERE:
                content = self._got(content)
            under_way.append(self._ask(target, "take", str(folder), file.name, offset, content))
            if len(under_way) == AHEAD:
                _check([self._got(under_way.popleft())])
        _check([*map(self._got, under_way), self._got(self._ask(target, "whole", str(folder), file))])

    def _looked(self, folder: Path, manifest: Manifest) -> tuple[dict[str, list[int]], dict[int, dict[str, str]]]:
        """Who has each file as it was written; and what is wrong with it on each."""
        asked = {place: self._ask(place, "amiss", str(folder), manifest.files) for place in (*self.unseen, HERE)}
        found = {place: self._got(answer) for place, answer in asked.items()}
        return {f.name: [p for p, wrong in found.items() if not wrong[f.name]] for f in manifest.files}, found

    def _is_whole(self, folder: Path) -> bool:
        try:
            return all(self._looked(folder, checkpoint.manifest_of(folder))[0].values())
        except checkpoint.CorruptCheckpoint:
            return False

    # Asking

    def _all(self, act: str, *arguments: Any) -> None:
        asked = [self._ask(host, act, *arguments) for host in self.apart]
        _check([self._got(answer) for answer in asked])

    def _ask(self, place: int, act: str, *arguments: Any) -> Any:
        return (
            checkpoint_parts.ACTS[act](*arguments) if place == HERE else self._first(place).part.remote(act, *arguments)
        )

    def _where(self, place: int) -> Any:
        import ray

        if place == HERE:
            return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return self._first(place).where.remote()

    def _first(self, host: int) -> Any:
        return next(rank for r, rank in enumerate(self.ranks) if self.plan.cluster.host(r) == host)

    def _got(self, answer: Any) -> Any:
        import ray

        return self.wait([answer])[0] if isinstance(answer, ray.ObjectRef) else answer


def _check(told: Iterable[str]) -> None:
    if wrong := next(filter(None, told), ""):
        raise OSError(wrong)
