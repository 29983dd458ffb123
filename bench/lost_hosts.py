"""Faults of hosts: a run on four hosts loses hosts, links and processes at random.

Each row must still enter the update once.

Hosts are network namespaces of this machine with a Ray node in each (tests/support/hosts.py). The first host has Ray's
head and the driver. Any other host can have these faults: all its processes are killed and Ray is started there again
some seconds later; its link is cut for a while; its link has 1 MB/s for a while; all its processes are stopped for up
to a minute, then continue; or one process of the run there is killed. The program states no layout, so that it can be
replanned for the remaining hosts.

A row is lost if an iteration's optimizer steps saw fewer responses than are drawn, doubled if they saw more. A hang is
a run that writes no line for --patience seconds. A run has recovered when it has written two more lines. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import smoke
from disturbed import SHARED, TARGETS, Count, held, report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from hosts import Hosts, inner

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
ROWS = 32  # per iteration: prompts times group
PROCESSES = ("rank", "dock", "functions")
KINDS = ("host", "link", "slow", "pause", *PROCESSES)
CHANGES = (
    ("nodes = 1, devices_per_node = 2", "nodes = {hosts}, devices_per_node = 1"),
    ("  layout actor.update   { dp = 2, zero = 3 }\n", ""),
    ("  layout actor.generate { tp = 2 }\n", "  dock { deadline = 90 s }\n"),
    ("iterations = 320, seed = 0", "iterations = {iterations}, seed = 0, save = 2, restarts = 1000"),
    ("mini_batch = 256", "mini_batch = 16"),
    ('"./model"', f'"{EXAMPLE}/model"'),
    ('"train', f'"{EXAMPLE}/train'),
    ('"test', f'"{EXAMPLE}/test'),
    ("every = 40", "every = 1000"),
)


class Cluster:
    """Hosts, and the current faults with their ends."""

    def __init__(self, count: int) -> None:
        self.hosts = Hosts(count)
        self.count = count
        self.until: dict[int, tuple[str, float]] = {}  # by host
        self.before = set(SHARED.iterdir())

    def space(self, host: int) -> str:
        return f"{self.hosts.name}h{host}"

    def processes(self, host: int) -> dict[int, str]:
        """Return the processes of a host with their command lines."""
        commands = {}
        for pid in self.hosts._pids(self.space(host)):
            with suppress(psutil.Error):
                commands[pid] = " ".join(psutil.Process(pid).cmdline())
        return commands

    def harm(self, kind: str, host: int, chance: random.Random) -> bool:
        """Inject a fault; return whether it was possible."""
        link = ["ip", "netns", "exec", self.space(host), "tc", "qdisc"]
        if kind in TARGETS:
            victims = [pid for pid, command in self.processes(host).items() if TARGETS[kind] in command]
            if victims:
                os.kill(chance.choice(victims), signal.SIGKILL)
            return bool(victims)
        if kind == "host":
            self.hosts.stop(host)
        elif kind == "link":
            self.hosts.cut(host)
        elif kind == "slow":
            subprocess.run(
                [*link, "add", "dev", "eth0", "root", "tbf", "rate", "1mbps", "burst", "16kb", "latency", "300ms"],
                check=True,
            )
        else:
            for pid in self.processes(host):
                os.kill(pid, signal.SIGSTOP)
        self.until[host] = kind, time.monotonic() + chance.uniform(5, 60 if kind == "pause" else 30)
        return True

    def mend(self, now: float) -> None:
        """End faults whose time is over; restart Ray on hosts where it has given up."""
        for host, (kind, until) in [*self.until.items()]:
            if now < until:
                continue
            if kind == "link":
                subprocess.run(["ip", "-n", self.space(host), "link", "set", "eth0", "up"], check=True)
            elif kind == "slow":
                subprocess.run(
                    ["ip", "netns", "exec", self.space(host), "tc", "qdisc", "del", "dev", "eth0", "root"], check=True
                )
            elif kind == "pause":
                for pid in self.processes(host):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            del self.until[host]
        for host in set(range(1, self.count)) - self.until.keys():
            node = self.hosts.nodes.get(host)
            if node is None or node.poll() is not None:
                if node is not None:
                    self.hosts.stop(host)
                for old in self.hosts.folder.glob(f"{host}/msrl-run-*"):  # a machine that restarts has none
                    shutil.rmtree(old)
                self.hosts._start(host, ())

    def list_leftovers(self) -> list[str]:
        """Return what a run has left on any host, ten seconds after its end."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            commands = [command for host in range(self.count) for command in self.processes(host).values()]
            ray = [
                command.split()[0]
                for command in commands
                if any(command.startswith(TARGETS[kind]) for kind in PROCESSES)
            ]
            rooms = [str(path) for path in SHARED.glob("msrl-run-*") if path not in self.before and not held(path)]
            if not ray and not rooms and not self.hosts.left(0):
                return []
            time.sleep(0.5)
        return [*ray, *rooms, *map(str, self.hosts.left(0))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--each", type=int, default=8, help="faults per run")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--gap", type=float, default=30.0, help="maximum seconds between two faults")
    parser.add_argument("--patience", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append")
    few = {"faults": 1, "each": 1, "hosts": 2, "iterations": 8, "gap": 1.0, "only": ["functions"]}
    options = smoke.parse(parser, **few)
    signal.signal(signal.SIGTERM, _end)
    count = Count()
    chance = random.Random(options.seed)
    remaining = options.faults
    with tempfile.TemporaryDirectory(prefix="lost", dir="/tmp") as name:
        folder = Path(name)
        text = (EXAMPLE / "grpo.rlg").read_text()
        for old, new in CHANGES:
            assert old in text, old
            text = text.replace(
                old,
                new.format(hosts=options.hosts, iterations=options.iterations)
                if "{hosts}" in new or "{iterations}" in new
                else new,
            )
        (folder / "p.rlg").write_text(text)
        cluster = Cluster(options.hosts)
        try:
            while remaining > 0:
                remaining -= run_once(cluster, folder, min(options.each, remaining), options, chance, count)
                print(f"{options.faults - remaining} faults, {count.runs} runs, {count.finished} finished", flush=True)
                for remark in count.remarks:
                    print(f"  {remark}", flush=True)
                count.remarks.clear()
        finally:
            for host in range(options.hosts):
                for pid in cluster.processes(host):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            cluster.hosts.close()
            report(count)  # also of the part before an interruption


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up takes a while
    sys.exit(143)


def run_once(
    cluster: Cluster, folder: Path, faults: int, options: argparse.Namespace, chance: random.Random, count: Count
) -> int:
    """Run the program with faults; return how many occurred until it ended."""
    wanted = faults
    out = folder / f"run-{count.runs}"
    count.runs += 1
    main = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
    words = [sys.executable, "-c", main, "p.rlg", "--set", "prompts=8", "--set", "group=4", "--out", str(out)]
    environment = {
        **os.environ,
        **cluster.hosts.environment,
        "RAY_ADDRESS": cluster.hosts.address,
        "TMPDIR": str(folder),
    }
    with (folder / f"{out.name}.log").open("wb") as log:
        process = subprocess.Popen([*cluster.hosts.on(0, folder), *words], env=environment, stdout=log, stderr=log)
    seen = -1
    changed = time.monotonic()
    due = time.monotonic() + chance.uniform(0, options.gap)
    pending: tuple[str, float, int] | None = None
    while process.poll() is None:
        time.sleep(0.1)
        now = time.monotonic()
        lines = _lines(out)
        cluster.mend(now)
        if lines != seen:
            seen = lines
            changed = now
            if pending is not None and lines >= pending[2] + 2:
                count.recover.setdefault(pending[0], []).append(now - pending[1])
                pending = None
        if now - changed > options.patience:
            count.hangs += 1
            count.remarks.append(f"{out.name}: no line for {options.patience:.0f} s after {pending}")
            os.kill(inner(process.pid), signal.SIGTERM)
            process.wait(90)
            count.remarks.append((folder / f"{out.name}.log").read_text()[-1500:])
            break
        free = sorted(set(range(1, cluster.count)) - cluster.until.keys())
        if now > due and faults and free and pending is None:
            kind = chance.choice(options.only or KINDS)
            if cluster.harm(kind, host := chance.choice(free), chance):
                faults -= 1
                count.remarks.append(f"{out.name}: {kind} of host {host} after {max(lines, 0)} lines")
                count.kills[kind] = count.kills.get(kind, 0) + 1
                pending = kind, now, lines
                due = now + chance.uniform(0, options.gap)
    while cluster.until:
        time.sleep(0.5)
        cluster.mend(time.monotonic())
    if leftovers := cluster.list_leftovers():
        count.leftovers += len(leftovers)
        count.remarks.append(f"{out.name} left {leftovers}")
    log_text = (folder / f"{out.name}.log").read_text()
    count.remarks += [
        f"{out.name}: {line}"
        for line in log_text.splitlines()
        if "restarting" in line or "replanned" in line or "waiting" in line
    ]
    if process.returncode:
        count.remarks.append(f"{out.name} ended with {process.returncode}: {log_text[-1500:]}")
        return wanted - faults
    count.finished += 1
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        if "iteration" in line:
            count.rows_lost += max(0, ROWS - int(line["rows"]))
            count.rows_twice += max(0, int(line["rows"]) - ROWS)
    return wanted - faults


def _lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main()
