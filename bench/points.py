"""Kill each kind of process of a run at each named point of its work.

Counted are lost rows, runs and seconds.

An example runs on two hosts (two raylets on this machine), each with a rank, a dock and a function host. It is first
left undisturbed: what it writes to `seen` are the points that its processes reach (runtime/process/fault_points.py):
before and after each instruction of a stream, between a share and its rows, before and after a put, between two tasks,
while an iteration is opened, ended or saved. Then runs are disturbed, at the next point in every other iteration, until
each process has been killed at each of its points. A run ends well if its metrics equal, line by line, those of the
undisturbed run and its weights are bit for bit the same. Seconds are from the kill until its iteration has written its
line. The last line is JSON.
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

from msrl_graph.runtime.process.fault_points import fault_file

HOSTS = 2
# Processes that are replaced during the run; they come first, since this takes less time.
IN_PLACE = ("functions", "dock")
# A process, its action, and the iteration of a task or of a checkpoint.
WHEN = re.compile(r"(.*?): (.*) (?:(\w+)/)?(\d+)")


@dataclass(frozen=True)
class Point:
    """A point in the work of a process, its action there, and when it is reached.

    `times` are (task, iteration), without a task for a checkpoint.
    """

    process: str
    what: str
    times: tuple[tuple[str, int], ...]

    @property
    def kind(self) -> str:
        return self.process.split()[0]

    def next(self, iteration: int) -> Death | None:
        """Return the death at the first time from an iteration on."""
        candidates = [(number, task) for task, number in self.times if number >= iteration]
        return Death(self, *min(candidates)) if candidates else None


@dataclass(frozen=True)
class Death:
    """The kill of a process at a point, in an iteration of a task."""

    point: Point
    iteration: int
    task: str

    def file(self, folder: Path) -> Path:
        when = f"{self.task}/{self.iteration}" if self.task else str(self.iteration)
        return fault_file(folder, self.point.process, f"{self.point.what} {when}")

    def is_passed(self, lines: list[dict[str, Any]]) -> bool:
        """Return whether a run with these lines of metrics has passed this death."""
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
    parser.add_argument("--only", action="append", help="text in the names of the points")
    parser.add_argument(
        "--most", type=int, default=0, help="maximum number of points for each kind of process, spread evenly (0: all)"
    )
    options = smoke.parse(parser, iterations=6, only=["functions"], most=1, patience=180.0)
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
            remaining = list_points(points / "seen", options)
            print(f"{len(remaining)} points", flush=True)
            while remaining:
                remaining = disturb(place, points, remaining, options, count, reference)
                print(
                    (
                        f"{sum(count.kills.values())} kills, {count.runs} runs, {count.finished} "
                        f"finished, {len(remaining)} "
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
            report(count)  # also after an interruption


def list_points(seen: Path, options: argparse.Namespace) -> list[Point]:
    """Return the reached points; processes that are replaced in place come first."""
    times: dict[tuple[str, str], dict[tuple[str, int], None]] = {}
    for line in seen.read_text(encoding="utf-8").splitlines():
        match = WHEN.fullmatch(line)
        assert match, line
        process, action, task, iteration = match.groups()
        if not options.only or any(word in line for word in options.only):
            times.setdefault((process, action), {})[task or "", int(iteration)] = None
    points = [Point(process, action, tuple(when)) for (process, action), when in times.items()]
    chosen: list[Point] = []
    for kind in sorted({point.kind for point in points}, key=lambda key: (key not in IN_PLACE, key)):
        same_kind = [point for point in points if point.kind == kind]
        step = max(1.0, len(same_kind) / options.most) if options.most else 1.0
        chosen += [same_kind[int(index * step)] for index in range(int(len(same_kind) / step))]
    return chosen


def disturb(
    place: Place, points: Path, remaining: list[Point], options: argparse.Namespace, count: Count, reference: Result
) -> list[Point]:
    """Run once with a death at the first points, one in every other iteration.

    Returns the remaining points.
    """
    (points / "seen").unlink(missing_ok=True)
    out = f"run-{count.runs}"
    count.runs += 1
    plan: dict[Path, Death] = {}
    while remaining and (
        death := remaining[0].next(max((planned.iteration + 2 for planned in plan.values()), default=0))
    ):
        plan[death.file(points)] = death
        remaining = remaining[1:]
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
        for path in [touched for touched in plan if not touched.exists()]:
            death = plan.pop(path)
            pending[death] = now
            count.kills[death.point.kind] = count.kills.get(death.point.kind, 0) + 1
        for death in [planned for planned in pending if planned.is_passed(lines)]:
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
                f"{[planned.file(points).name for planned in pending]}\n{place.log(out)}"
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
    return remaining


def clean(place: Place, count: Count, out: str) -> None:
    """Count processes and files of the run that are left ten seconds after its end."""
    until = time.monotonic() + 10
    while (processes := actors()) and time.monotonic() < until:
        time.sleep(0.1)
    files = list(place.temporary.iterdir())
    if processes or files:
        count.leftovers += len(processes) + len(files)
        count.remarks.append(f"{out} left {processes} {files}")


def actors() -> list[str]:
    """Return the actors of a run on the raylets of this process."""
    names = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            names += [
                name for name in TARGETS.values() if name.startswith("ray::") and name in " ".join(process.cmdline())
            ]
    return names


if __name__ == "__main__":
    main()
