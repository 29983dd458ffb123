"""Kill and stop processes of a run at random moments, and count what is lost.

Counted are rows, runs, processes, files and seconds.

An example runs with a checkpoint every other iteration: GRPO; DAPO, which draws prompts until enough of them survive;
PF-PPO, whose rows repeat, which keeps a coefficient and a mean of each prompt across iterations and draws prompts by
these; or countdown, whose responses may be drawn by weights that are two versions old, with a checkpoint every fourth
iteration (none is older than the last).

At random moments of any phase a rank, the dock, a function host, the driver, the keeper, the supervisor, Ray's raylet
or its GCS is killed (SIGKILL) or, except for the supervisor, stopped (SIGSTOP), several in each run. Every third fault
is at a named point of a checkpoint, a delivery of weights or the beginning of a task (runtime/process/fault_points.py).

A run ends well if its metrics equal, line by line, those of an undisturbed run, and its weights are bit for bit the
same. A run whose supervisor is killed cannot restart itself: nothing of it may be left, and it is resumed with
--resume. If the keeper is killed with it (`both`), it is resumed at once. With --hosts 2 there are two raylets, Ray's
servers are left alone, and instead all processes of the second host are stopped at once (`host`).

A row is lost if an iteration's optimizer steps saw fewer responses than in the undisturbed run, doubled if they saw
more. A hang is a run that writes no line for --patience seconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import random
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

import smoke
from disturbed import PROGRAMS, SERVERS, TARGETS, TWO_HOSTS, Count, Place, Result, clean, compare, report

from msrl_graph.runtime.process.fault_points import STOP, fault_file

BOTH = "both"  # keeper and supervisor at once
HOST = "host"  # all processes of the second host
KILL = "kill"
# Faults that cost a restart, and so a new driver; other processes are restarted in place.
RESTARTS = {*TARGETS, BOTH, HOST} - {"dock", "functions", "keeper"}
POINTS = re.compile(r"(checkpoint \d+|RESHARD .*|WAIT .*|RELEASE .*|open .*|opened .*|begun .*)$")


@dataclass
class Fault:
    """A fault in progress: its name, start, and the lines and drivers at that time."""

    name: str
    since: float
    lines: int
    drivers: set[int]


class Faults:
    """The faults of a run.

    `points` are the points that its processes reach: (process, action, iteration).
    """

    def __init__(self, place: Place, points: list[str], options: argparse.Namespace, chance: random.Random) -> None:
        self.place = place
        self.chance = chance
        self.options = options
        self.folder = place.folder / "points"
        self.points = [point for point in points if POINTS.search(point.partition(": ")[2])]
        names = (
            [*TARGETS, BOTH] if options.hosts == 1 else [name for name in TARGETS if name not in SERVERS] + [BOTH, HOST]
        )
        self.names = options.only or names
        self.planned: dict[Path, str] = {}  # faults at points that are not reached yet

    def draw(self, lines: list[dict[str, Any]], calm: bool) -> str:
        """Inject a fault into a running process, or plan one; return its name, or "".

        If not `calm`, a driver may be stopped and would not end with keeper and supervisor.
        """
        how = self.chance.choice(self.options.how or (KILL, STOP))
        if self.points and self.chance.random() < 1 / 3 and not self.planned:
            return self._plan(lines, how)
        name = self.chance.choice(self.names)
        if name in ("supervisor", BOTH) and KILL not in (self.options.how or (KILL,)):
            return ""
        if name == BOTH and not calm:
            return ""
        if name in ("supervisor", BOTH):
            how = KILL
        if name == HOST:
            how = STOP
            victims = self.place.second_host_processes()
        else:
            words = [TARGETS["keeper"], TARGETS["supervisor"]] if name == BOTH else [TARGETS[name]]
            known = [
                [process_id for process_id, command in self.place.processes().items() if word in command]
                for word in words
            ]
            victims = [self.chance.choice(pids) for pids in known if pids]
            if len(victims) < len(words):
                return ""
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if how == KILL else signal.SIGSTOP)
        return f"{how} {name}" if victims else ""

    def _plan(self, lines: list[dict[str, Any]], how: str) -> str:
        now = max((line.get("iteration", -1) for line in lines), default=-1)
        soon = [point for point in self.points if now + 2 <= int(re.findall(r"\d+", point)[-1]) <= now + 5]
        if soon:
            process, _, action = self.chance.choice(soon).partition(": ")
            path = fault_file(self.folder, process, action)
            path.write_text(STOP if how == STOP else "")
            self.planned[path] = f"{how} {process.split()[0]} at {POINTS.search(action)[0].split()[0]}"  # type: ignore[index]
        return ""

    def take_happened(self) -> str:
        """Return a planned fault that happened, or ""."""
        for path in [planned_path for planned_path in self.planned if not planned_path.exists()]:
            return self.planned.pop(path)
        return ""

    def forget(self) -> None:
        for path in self.planned:
            path.unlink(missing_ok=True)
        self.planned.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--program", choices=PROGRAMS, default="grpo")
    parser.add_argument("--kills", type=int, default=200, help="total number of faults")
    parser.add_argument("--each", type=int, default=8, help="faults per run")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=20.0, help="maximum seconds between two faults")
    parser.add_argument("--patience", type=float, default=150.0)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", choices=(*TARGETS, BOTH, HOST), action="append")
    parser.add_argument("--how", choices=(KILL, STOP), action="append")
    few = {"kills": 1, "each": 1, "iterations": 10, "gap": 1.0, "only": ["functions"], "how": [KILL]}
    options = smoke.parse(parser, **few)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    count = Count()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.program, options.iterations, TWO_HOSTS[options.program][options.hosts - 1])
        (points := place.folder / "points").mkdir()
        place.environment["MSRL_POINTS"] = os.environ["MSRL_POINTS"] = str(points)
        try:
            with place.cluster(options.hosts):
                process = place.start("quiet")
                assert process.wait() == 0, (place.folder / "quiet.log").read_text()
                reference = place.result("quiet")
                seen = sorted(set((points / "seen").read_text(encoding="utf-8").splitlines()))
                faults = Faults(place, seen, options, random.Random(options.seed))
                remaining = options.kills
                while remaining > 0:
                    many = min(options.each, remaining)
                    remaining -= chaos(place, f"run-{count.runs}", many, options, faults, count, reference)
                    print(
                        f"{options.kills - remaining} faults, {count.runs} runs, {count.finished} finished", flush=True
                    )
                    for remark in count.remarks:
                        print(f"  {remark}", flush=True)
        finally:
            for pid in place.processes():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(place.temporary, ignore_errors=True)
            report(count)


def chaos(
    place: Place,
    out: str,
    wanted: int,
    options: argparse.Namespace,
    faults: Faults,
    count: Count,
    reference: Result,
) -> int:
    """Run the program with faults; return how many occurred until it ended."""
    remaining = wanted
    chance = faults.chance
    count.runs += 1
    (faults.folder / "seen").unlink(missing_ok=True)
    process = place.start(out)
    pending: Fault | None = None
    due = time.monotonic() + chance.uniform(0.0, options.gap)  # start and restart are phases, too
    seen = -1
    changed = time.monotonic()
    while True:
        time.sleep(0.05)
        now = time.monotonic()
        lines = place.lines(out)
        if lines != seen:
            seen = lines
            changed = now
            if (
                pending is not None
                and lines > pending.lines
                and not (pending.name.split()[1] in RESTARTS and pending.drivers & place.drivers())
            ):  # it has made progress
                count.recover.setdefault(pending.name, []).append(now - pending.since)
                pending = None
        if process.poll() is not None:
            if process.returncode == -signal.SIGKILL:  # the supervisor was killed: is anything left?
                if pending is None or pending.name != f"{KILL} {BOTH}":
                    clean(place, count, out)
                else:  # leftovers without a holder are removed by a run that begins a minute later
                    place.age()
                known = sorted((place.folder / out / "checkpoints").glob("[0-9]*"))
                if known:
                    process = place.start(out, "--resume", out)
                else:
                    clean(place, count, out)
                    shutil.rmtree(place.folder / out, ignore_errors=True)
                    process = place.start(out)
                seen = -1
                changed = time.monotonic()
                continue
            break
        if now - changed > options.patience:
            count.hangs += 1
            count.remarks.append(f"{out}: no line for {options.patience:.0f} s after {pending}\n{place.log(out)}")
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            break
        name = faults.take_happened()
        if not name and now > due and remaining and not faults.planned:
            drivers = place.drivers()
            if not (name := faults.draw(place.read(out), pending is None)):
                due = now + 0.2
                continue
        if name:
            remaining -= 1
            count.kills[name] = count.kills.get(name, 0) + 1
            print(f"  {out}: {name} after {lines} lines", flush=True)
            pending = Fault(name, time.monotonic(), lines, place.drivers() if " at " in name else drivers)
            due = time.monotonic() + chance.uniform(0.0, options.gap)
            seen = lines
    faults.forget()
    clean(place, count, out)
    if process.returncode != 0:
        count.remarks.append(f"{out} ended with {process.returncode}: {place.log(out)}")
        return wanted - remaining
    compare(place, out, count, reference)
    return wanted - remaining


if __name__ == "__main__":
    main()
