"""Checkpoints of runs on a cluster with hosts that do not see the run's folder.

A host that does not see the run's folder has a folder of its own, at the same path. In this folder, the host stores its
part of each checkpoint: the files that the ranks of the host write.

Invariant: the files of all parts have their final names before the driver writes the manifest, so a checkpoint with a
manifest is complete. Before a rank of a resumed run loads its model, the driver finds out which hosts have which files
of the checkpoint. If a host lacks files that the host's ranks need, these files are copied in pieces from another host.
If all hosts see the run's folder, no host stores a part of its own.
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
from ..metrics import tracking
from ..metrics.recorder import Recorder
from ..process import fault_points
from ..weights import checkpoint, checkpoint_parts
from ..weights.checkpoint import CheckpointFile, CheckpointHost, Manifest
from . import run_inputs
from .run_folder import name_older
from .run_state import FILE as STATES
from .run_state import RunState

Wait = Callable[[Sequence[Any]], list[Any]]  # returns the results of Ray references

HERE = -1  # the place number of the driver's disk; the place number of a host is the host's number
IN_FLIGHT = 4  # pieces of a file in flight at once


class DistributedCheckpoint:
    """Methods that save, find and copy the parts of checkpoints.

    `separate_hosts` are the hosts that do not see the run's folder. The first rank of each of these hosts stores the
    host's part of a checkpoint. `hosts_with_parts` are the hosts whose own disks may contain parts of the checkpoint
    from which the run is resumed.
    """

    def __init__(self, plan: Plan, ranks: Sequence[Any], wait: Wait) -> None:
        self.plan = plan
        self.ranks = ranks
        self.wait = wait
        self.separate_hosts: list[int] = []
        self.hosts_with_parts: list[int] = []
        self.written_files: dict[int, list[str]] = {}  # by place, its files of the newest checkpoint
        self.holders: dict[str, list[int]] = {}  # by file of the checkpoint to resume from, the places that have it

    # Saving

    def save(
        self, out: Path, iteration: int, recorder: Recorder, program: Mapping[str, Any], carried: RunState, wait: Wait
    ) -> Path:
        """Write the checkpoint after `iteration` iterations, and return its folder.

        `program` has everything in the plan that affects the run's result. `carried` is the run state, which is part of
        the checkpoint. Raises OSError if a disk fails; in this case, the incomplete checkpoint is removed.
        """
        written = None
        try:
            written = checkpoint.begin(out, iteration).absolute()
            self._ask_hosts("begin", str(out.absolute()), iteration)
            fault_points.reach("driver", f"begun checkpoint {iteration}")
            lines = recorder.file.written
            metadata = checkpoint.checkpoint_metadata(iteration, lines, carried.position, program)
            answers = wait([rank.checkpoint.remote(str(written), metadata) for rank in self.ranks])
            _raise_first(error for _, _, error in answers)
            of_ranks = [[file for file in files if file.pieces] for files, _, _ in answers]
            metrics = checkpoint.write_metrics(written, recorder.file.copy(), metadata)
            files = (*chain.from_iterable(of_ranks), *carried.save(written, metadata), metrics)
            steps = {name: count for _, steps, _ in answers for name, count in steps.items()}
            fields = (iteration, lines, steps, dict(program), files, carried.position)
            inputs = run_inputs.read(out)
            manifest = self._with_hosts(checkpoint.Manifest(checkpoint.FORMAT, *fields, inputs=inputs), of_ranks)
            fault_points.reach("driver", f"written checkpoint {iteration}")
            for host in self.separate_hosts:  # one after the other, since hosts may share a disk
                _raise_first([self._result(self._ask(host, "name", str(written)))])
            fault_points.reach("driver", f"placed checkpoint {iteration}")
            best = {best.iteration for best in recorder.bests}
            target = checkpoint.commit(written, manifest, self.plan.deploy.run.keep, best)
            fault_points.reach("driver", f"kept checkpoint {iteration}")
        except OSError:
            if written is not None:
                for place in (HERE, *self.separate_hosts):
                    self._result(self._ask(place, "forget", str(written)))
            raise
        # The checkpoint is complete already: a host that fails now keeps old ones, and has its part without a manifest.
        # The manifest comes last, since it turns a folder into a checkpoint.
        content = {name: (target / name).read_bytes() for name in (checkpoint.DIGEST, checkpoint.MANIFEST)}
        names = [path.name for path in checkpoint.list_up_to(target)]
        for answer in [self._ask(host, "keep", str(out.absolute()), names, content) for host in self.separate_hosts]:
            self._result(answer)
        return target

    def _with_hosts(self, manifest: Manifest, files: Sequence[Sequence[CheckpointFile]]) -> Manifest:
        """Return a copy of a manifest; the copy also states which host stores each file.

        `files` are the checkpoint files that each rank has written, by rank number.
        """
        written_files = {
            file.name: self.plan.cluster.host(rank) for rank, rank_files in enumerate(files) for file in rank_files
        }
        names: dict[int, list[str]] = {}
        for file in manifest.files:
            host = written_files.get(file.name, HERE)
            names.setdefault(host if host in self.separate_hosts else HERE, []).append(file.name)
        self.written_files = names
        if not self.separate_hosts:
            return manifest
        locations = {host: self._result(self._ask_location(host)) for host in sorted(names)}
        hosts = tuple(CheckpointHost(address, node, tuple(names[host])) for host, (address, node) in locations.items())
        return replace(manifest, format_version=checkpoint.DISTRIBUTED, hosts=hosts)

    def send(self, folder: Path, url: str) -> None:
        """Upload a checkpoint to the run's URL.

        The checkpoint becomes visible at the URL when all of its files are uploaded. Older checkpoints at the URL are
        removed if the run's folder does not contain them. Raises OSError or Fault.
        """
        run = folder.parent.parent
        below = urls.join(url, checkpoint.FOLDER)
        target = urls.join(below, folder.name)
        urls.remove(target, (checkpoint.MANIFEST,))  # left by a run that continued differently
        answers = [
            self._ask(place, "send", str(folder.absolute()), target, self.written_files[place])
            for place in sorted(self.written_files, reverse=True)
        ]
        _raise_first([self._result(answer) for answer in answers])
        urls.send(run, url, ("metrics.jsonl", "plan.json", run_inputs.FILE, f"{tracking.FOLDER}/{tracking.ID}"))
        urls.send(folder, target, (checkpoint.DIGEST,))
        urls.send(folder, target, (checkpoint.MANIFEST,), atomic=True)
        kept_names = {path.name for path in checkpoint.list_checkpoints(run)}
        with urls.report_errors(url):
            old = [
                name
                for name in checkpoint.list_at_url(below, whole=False)
                if name not in kept_names and int(name) < int(folder.name)
            ]
        urls.remove(below, [*(f"{name}/{checkpoint.MANIFEST}" for name in old), *old])

    def upload_rest(self, run: Path, url: str) -> None:
        """Upload the logs and recorded rows that are stored on the `separate_hosts`.

        The function is called after a run. After the upload, each of these hosts removes its own folder at the path
        `run`. Raises OSError.
        """
        for act in (("send", str(run), url, ("logs", rows.FOLDER, rows.EVALUATED)), ("forget", str(run))):
            self._ask_hosts(*act)

    # Resuming

    def check_files(self, folder: Path) -> None:
        """Check that each file of the resumed checkpoint is intact on at least one host.

        Raises Fault if some files are intact on no host. The message says what is wrong with each of these files.
        """
        if not self.hosts_with_parts:
            return
        manifest = checkpoint.read_manifest(folder)
        self.holders, errors = self._find_files(folder, manifest)
        if all(self.holders.values()):
            return
        places = {
            self._result(self._ask_location(known_place))[0]: known_place
            for known_place in (HERE, *self.hosts_with_parts)
        }
        losses = []
        for host in manifest.hosts:
            lost_files = [name for name in host.files if not self.holders[name]]
            own_place = places.get(host.address)
            reasons = [
                f"{name} {'is on no host of this run' if own_place is None else errors[own_place][name]}"
                for name in lost_files
            ]
            if lost_files:
                losses.append(f"on {host.address} (Ray node {host.node[:12]}) {', '.join(reasons)}")
        message = f"the checkpoint {folder} cannot be used: {'; '.join(losses)}"
        older = (
            path
            for path in reversed(checkpoint.list_checkpoints(folder.parent.parent))
            if int(path.name) < int(folder.name)
        )
        good = next((path for path in older if self._is_complete(path)), None)
        help = "restore the missing files, or start a new run: no older checkpoint is complete"
        if good:
            help = f"{good} is complete: {name_older(good)}"
        raise Fault(Diagnostic("bad-checkpoint", message, help=help))

    def bring(self, folder: Path, manifest: Manifest, wait: Wait) -> None:
        """Copy files of the resumed checkpoint to the hosts that lack these files.

        A host needs the files that the host's ranks load. Files that the host already has are not copied. Raises
        OSError.
        """
        if not self.hosts_with_parts:
            return
        wanted: dict[int, set[str]] = {HERE: {STATES, checkpoint.METRICS}}
        for rank, names in enumerate(wait([handle.wants.remote(manifest) for handle in self.ranks])):
            host = self.plan.cluster.host(rank)
            wanted.setdefault(host if host in self.hosts_with_parts else HERE, set()).update(names)
        lacking = {
            place: [file for file in manifest.files if file.name in names and place not in self.holders[file.name]]
            for place, names in wanted.items()
        }
        with ThreadPoolExecutor(len(lacking)) as pool:
            list(pool.map(partial(self._copy_files, folder), lacking, lacking.values()))

    def _copy_files(self, folder: Path, target: int, files: Sequence[CheckpointFile]) -> None:
        for file in files:
            self._copy(folder, file, self.holders[file.name][0], target)

    def collect(self, folder: Path) -> None:
        """Copy a folder that rank 0 wrote, from rank 0's host to the driver's disk.

        Nothing is copied if the host of rank 0 sees the run's folder. Raises OSError.
        """
        if (source := self.plan.cluster.host(0)) not in self.separate_hosts:
            return
        shutil.rmtree(folder, ignore_errors=True)
        for file in self._result(self._ask(source, "listed", str(folder))):
            self._copy(folder, file, source, HERE)

    def _copy(self, folder: Path, file: CheckpointFile, source: int, target: int) -> None:
        under_way = deque[Any]()
        for offset in range(0, file.bytes, checkpoint_parts.PIECE):
            content = self._ask(source, "piece", str(folder), file.name, offset)
            if target == HERE:
                content = self._result(content)
            under_way.append(self._ask(target, "take", str(folder), file.name, offset, content))
            if len(under_way) == IN_FLIGHT:
                _raise_first([self._result(under_way.popleft())])
        _raise_first([*map(self._result, under_way), self._result(self._ask(target, "whole", str(folder), file))])

    def _find_files(self, folder: Path, manifest: Manifest) -> tuple[dict[str, list[int]], dict[int, dict[str, str]]]:
        """Find the places that have intact copies of a checkpoint's files.

        A place is the number of a host, or HERE for the driver's disk. The first returned dictionary lists for each
        file the places where the file is intact. The second dictionary has for each place the error of each file ("" if
        the file is intact).
        """
        requests = {
            place: self._ask(place, "amiss", str(folder), manifest.files) for place in (*self.hosts_with_parts, HERE)
        }
        errors = {place: self._result(answer) for place, answer in requests.items()}
        return {
            file.name: [place for place, place_errors in errors.items() if not place_errors[file.name]]
            for file in manifest.files
        }, errors

    def _is_complete(self, folder: Path) -> bool:
        try:
            return all(self._find_files(folder, checkpoint.read_manifest(folder))[0].values())
        except checkpoint.CorruptCheckpoint:
            return False

    # Requests

    def _ask_hosts(self, act: str, *arguments: Any) -> None:
        answers = [self._ask(host, act, *arguments) for host in self.separate_hosts]
        _raise_first([self._result(answer) for answer in answers])

    def _ask(self, place: int, act: str, *arguments: Any) -> Any:
        return (
            checkpoint_parts.ACTS[act](*arguments)
            if place == HERE
            else self._first_rank(place).part.remote(act, *arguments)
        )

    def _ask_location(self, place: int) -> Any:
        import ray

        if place == HERE:
            return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return self._first_rank(place).where.remote()

    def _first_rank(self, host: int) -> Any:
        return next(rank for index, rank in enumerate(self.ranks) if self.plan.cluster.host(index) == host)

    def _result(self, answer: Any) -> Any:
        import ray

        return self.wait([answer])[0] if isinstance(answer, ray.ObjectRef) else answer


def _raise_first(errors: Iterable[str]) -> None:
    if error := next(filter(None, errors), ""):
        raise OSError(error)
