"""Kills each kind of process of a run at each named point of its work, and counts what is lost: rows, runs, seconds.

Two hosts (two raylets on this machine), each with a rank, a dock and a function host,
run an example that is first left alone: what it writes to `seen` are the points that its processes reach
(runtime/process/fault_points.py): before and after each instruction of a stream, between a share and its rows, before
and after a put, between two tasks, while an iteration is opened, ended, saved. Then runs are disturbed, at the next
point in every other iteration, until each point of each process has had its death. A run ends well when its metrics
are, line for line, and its weights, bit for bit, those of the run that was left alone. Seconds are from the death until
the iteration in which it was has its line. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import smoke
from disturbed import PROGRAMS, TARGETS, TWO_HOSTS, Count, Place, Result, compare, report

from msrl_graph.runtime.process.fault_points import file

HOSTS = 2
# Who is replaced while the run goes on; first, since it takes less time.
IN_PLACE = ("functions", "dock")
WHEN = re.compile(
    r"(.*?): (.*) (?:(\w+)/)?(\d+)"
)  # a process, what it does, in which iteration of a task, or a checkpoint's


@dataclass(frozen=True)
class Point:
    """A place in the work of a process, `what` it does there, and when it gets there: (task, iteration), of a
    checkpoint without a task."""

    process: str
    what: str
    times: tuple[tuple[str, int], ...]

    @property
    def kind(self) -> str:
        return self.process.split()[0]

    def next(self, iteration: int) -> Death | None:
        """The death at the first time from an iteration on."""
        found = [(i, task) for task, i in self.times if i >= iteration]
        return Death(self, *min(found)) if found else None


@dataclass(frozen=True)
class Death:
    """The death of a process at a point, in an iteration of a task."""

    point: Point
    iteration: int
    task: str

    def file(self, folder: Path) -> Path:
        when = f"{self.task}/{self.iteration}" if self.task else str(self.iteration)
        return file(folder, self.point.process, f"{self.point.what} {when}")

    def over(self, lines: list[dict[str, Any]]) -> bool:
        """Whether a run with these lines of metrics has got over it."""
        if self.task in ("train", ""):  # after a checkpoint comes the next iteration
            return any(line.get("iteration", -1) >= self.iteration for line in lines)
        return any(
            line.get("after_iterations", -1) >= self.iteration and line.get("evaluation") == self.task for line in lines
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--program", choices=PROGRAMS, default="grpo")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--patience", type=float, default=90.0)
    parser.add_argument("--only", action="append", help="a part of the names of the points")
    parser.add_argument(
        "--most", type=int, default=0, help="of each kind of process so many points at most, spread evenly (0: all)"
    )
    options = smoke.parse(parser, iterations=6, only=["functions"], most=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.program, options.iterations, TWO_HOSTS[options.program][1])
        count = Count()
        points = place.folder / "points"
        points.mkdir()
        os.environ["MSRL_POINTS"] = str(points)  # which the raylets' processes inherit
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            for _ in range(HOSTS - 1):
                cluster.add_node(num_cpus=1)
            place.environment |= {"MSRL_POINTS": str(points), "RAY_ADDRESS": cluster.address}
            process = place.start("quiet")
            assert process.wait() == 0, (place.folder / "quiet.log").read_text()
            reference = place.result("quiet")
            left = found(points / "seen", options)
            print(f"{len(left)} points", flush=True)
            while left:
                left = disturb(place, points, left, options, count, reference)
                print(
                    (
                        f"{sum(count.kills.values())} kills, {count.runs} runs, {count.finished} finished, {len(left)} "
                        "points left"
                    ),
                    flush=True,
                )
        finally:
            for pid in place.processes():
                os.kill(pid, signal.SIGKILL)
            cluster.shutdown()
            ray.shutdown()
            shutil.rmtree(place.temporary, ignore_errors=True)
            report(count)  # of what was done, where it is ended before


def found(seen: Path, options: argparse.Namespace) -> list[Point]:
    """The points that were reached, those of processes that are replaced in place first."""
    times: dict[tuple[str, str], dict[tuple[str, int], None]] = {}
    for line in seen.read_text(encoding="utf-8").splitlines():
        match = WHEN.fullmatch(line)
        assert match, line
        process, what, task, iteration = match.groups()
        if not options.only or any(o in line for o in options.only):
            times.setdefault((process, what), {})[task or "", int(iteration)] = None
    points = [Point(process, what, tuple(when)) for (process, what), when in times.items()]
    chosen: list[Point] = []
    for kind in sorted({p.kind for p in points}, key=lambda k: (k not in IN_PLACE, k)):
        some = [p for p in points if p.kind == kind]
        step = max(1.0, len(some) / options.most) if options.most else 1.0
        chosen += [some[int(i * step)] for i in range(int(len(some) / step))]
    return chosen


def disturb(
    place: Place, points: Path, left: list[Point], options: argparse.Namespace, count: Count, reference: Result
) -> list[Point]:
    """One run, in which the first of these points have their deaths, in every other iteration one: the points that are
    left."""
    (points / "seen").unlink(missing_ok=True)
    out = f"run-{count.runs}"
    count.runs += 1
    plan: dict[Path, Death] = {}
    while left and (death := left[0].next(max((d.iteration + 2 for d in plan.values()), default=0))):
        plan[death.file(points)] = death
        left = left[1:]
    for path in plan:
        path.touch()
    process = place.start(out)
    pending: dict[Death, float] = {}
    changed = time.monotonic()
    seen = -1
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        lines = place.read(out)
        for path in [p for p in plan if not p.exists()]:
            death = plan.pop(path)
            pending[death] = now
            count.kills[death.point.kind] = count.kills.get(death.point.kind, 0) + 1
        for death in [d for d in pending if d.over(lines)]:
            seconds = now - pending.pop(death)
            count.recover.setdefault(death.point.kind, []).append(seconds)
            if death.point.kind in IN_PLACE and seconds > 10:
                count.remarks.append(f"{out}: {seconds:.1f} s after {death.file(points).name}")
        if len(lines) != seen:
            seen = len(lines)
            changed = now
        if now - changed > options.patience:
            count.hangs += 1
            count.remarks.append(
                f"{out}: no line for {options.patience:.0f} s after "
                f"{[d.file(points).name for d in pending]}\n{place.log(out)}"
            )
            process.send_signal(signal.SIGHUP)  # at once
            process.wait(60)
            break
    for path in plan:
        path.unlink(missing_ok=True)
        count.remarks.append(f"{out}: it never got to {path.name}")
    clean(place, count, out)
    if process.returncode == 0:
        compare(place, out, count, reference)
    else:
        count.remarks.append(f"{out} ended with {process.returncode}: {place.log(out)}")
    return left


def clean(place: Place, count: Count, out: str) -> None:
    """Counts processes of the run that are still there ten seconds after its end, and files."""
    until = time.monotonic() + 10
    while (left := actors()) and time.monotonic() < until:
        time.sleep(0.1)
    files = list(place.temporary.iterdir())
    if left or files:
        count.leftovers += len(left) + len(files)
        count.remarks.append(f"{out} left {left} {files}")


def actors() -> list[str]:
    """The actors of a run on the raylets of this process."""
    names = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            names += [
                name for name in TARGETS.values() if name.startswith("ray::") and name in " ".join(process.cmdline())
            ]
    return names


if __name__ == "__main__":
    main()
