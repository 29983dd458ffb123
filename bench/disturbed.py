"""Disturbed runs: common parts of chaos.py, points.py and lost_hosts.py.

Invariant: a run ends well if its metrics equal, line by line, those of an undisturbed run, its weights are bit for bit
the same, and none of its processes and files are left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

from msrl_graph.runtime.dock.segments import LOCK
from msrl_graph.runtime.metrics.recorder import TIMES

EXAMPLES = Path(__file__).parent.parent / "examples"
SOLVED = """
  state solved : f32 per prompt = 0.5
  source(prompts) -> prompt, answer { weights = around(solved) }
  node host.solved(correct, solved) -> solved { call = moving_mean(reward = correct, mean = solved), per = prompt }
  host.correct -> host.solved
"""
# For each program its file, changes to its text, and params.
PROGRAMS: dict[str, tuple[str, list[tuple[str, str]], list[str]]] = {
    "grpo": (
        "arithmetic/grpo.rlg",
        [('"./model"', '"../arithmetic/model"'), (' "t', ' "../arithmetic/t')],
        ["prompts=8", "group=4"],
    ),
    "dapo": ("dapo/dapo.rlg", [("devices_per_node = 1", "devices_per_node = 2")], ["prompts=8", "group=4"]),
    "pf_ppo": (
        "pf_ppo_pow/pf_ppo_pow.rlg",
        [
            ("devices_per_node = 1", "devices_per_node = 2"),
            ("  source(prompts) -> prompt, answer\n", SOLVED),
        ],
        ["prompts=8", "samples=4"],
    ),
    "countdown": (
        "countdown/countdown.rlg",
        [
            ('"./model"', '"../countdown/model"'),
            (' "t', ' "../countdown/t'),
            ('"countdown.py', '"../countdown/countdown.py'),
            ("save = 2, restarts = 1000 }", "save = 4, restarts = 1000, deterministic = true }"),
        ],
        ["prompts=8", "group=4", "behind=2"],
    ),
}
# For each program the changes for one host, and for two.
TWO_HOSTS: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "grpo": (
        [],
        [
            ("nodes = 1, devices_per_node = 2", "nodes = 2, devices_per_node = 1"),
            ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }"),
        ],
    ),
    "dapo": ([], [("devices_per_node = 2", "nodes = 2, devices_per_node = 1")]),
    "pf_ppo": ([], [("devices_per_node = 2", "nodes = 2, devices_per_node = 1")]),
    "countdown": ([], [("nodes = 1, devices_per_node = 2", "nodes = 2, devices_per_node = 1")]),
}
# Text in a process's command line or name.
TARGETS = {
    "keeper": "runtime.process.processes",
    "rank": "ray::Rank",
    "dock": "ray::DockHost",
    "functions": "ray::FunctionHost",
    "driver": "msrl_graph.runtime.driver.driver",
    "supervisor": "run_main",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
SERVERS = ("raylet", "gcs")
DEADLINE = "  dock { deadline = 24 s }\n  run {"  # so that a stopped process is killed after 12 s
SHARED = Path("/dev/shm")
Result = tuple[list[dict[str, Any]], dict[str, bytes]]  # lines of metrics, weights


@dataclass
class Count:
    kills: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    finished: int = 0
    rows_lost: int = 0
    rows_twice: int = 0
    hangs: int = 0
    leftovers: int = 0
    differing: int = 0  # runs that ended with other metrics or weights
    oldest: int = 0  # largest age of a row's weights, in versions
    recover: dict[str, list[float]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class Place:
    """A folder with a program; its temporary folder identifies its processes."""

    def __init__(self, folder: Path, program: str, iterations: int, more: list[tuple[str, str]] | None = None) -> None:
        self.folder = folder
        self.iterations = iterations
        self.environment = dict(os.environ)
        path, changes, params = PROGRAMS[program]
        self.sets = [word for param in params for word in ("--set", param)]
        text = (EXAMPLES / path).read_text()
        run = f"run {{ iterations = {iterations}, seed = 0, save = 2, restarts = 1000 }}"
        for old, new in (
            (r"run \{ .* \}", run),
            (r"\bevery( *)= \d+", f"every = {iterations // 2}"),
            (r"mini_batch = \d+", "mini_batch = 16"),
        ):
            assert re.search(old, text), old
            text = re.sub(old, new, text)
        for old, new in [*changes, *(more or ()), ('"../', f'"{EXAMPLES}/'), ("  run {", DEADLINE)]:
            assert old in text, old
            text = text.replace(old, new)
        (folder / "p.rlg").write_text(text)
        self.temporary = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # short, since Ray's sockets are below it
        self.shared = set(SHARED.iterdir())
        self.ours: set[int] = set()  # processes of the cluster
        self.raylets: list[int] = []

    def leftover_processes(self) -> dict[int, str]:
        """Return the processes of runs, without idle workers of a cluster."""
        words = [word for name, word in TARGETS.items() if name not in SERVERS]
        return {
            pid: command
            for pid, command in self.processes().items()
            if not self.raylets or (pid not in self.ours and any(word in command for word in words))
        }

    def start(self, out: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"]
        command += ["p.rlg", *self.sets, *(more or ("--out", out))]
        environment = {**self.environment, "TMPDIR": str(self.temporary)}
        with (self.folder / f"{out}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def lines(self, out: str) -> int:
        path = self.folder / out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def processes(self) -> dict[int, str]:
        """Return the processes with this temporary folder: id -> command line."""
        commands = {}
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TMPDIR", "").startswith(str(self.temporary))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    commands[process.pid] = " ".join(process.cmdline()) or process.name()
            except psutil.Error:
                continue
        return commands

    @contextmanager
    def cluster(self, hosts: int) -> Iterator[None]:
        """Run with one host, or with two raylets on this machine as two hosts."""
        if hosts == 1:
            yield
            return
        from ray.cluster_utils import Cluster

        os.environ["TMPDIR"] = str(self.temporary)
        tempfile.tempdir = None
        (self.temporary / "ray").mkdir()  # where Ray writes the cluster's address
        ray = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
        before = set(self.processes())
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "temp_dir": str(ray)},
        )
        try:
            cluster.add_node(num_cpus=1)
            self.environment["RAY_ADDRESS"] = cluster.address
            self.ours = {pid for pid, command in self.processes().items() if pid not in before}
            self.raylets = sorted(
                process_id for process_id in self.ours if TARGETS["raylet"] in self.processes()[process_id]
            )
            yield
        finally:
            cluster.shutdown()
            shutil.rmtree(ray, ignore_errors=True)

    def age(self) -> None:
        """Age temporary folders, so that the next run removes those without a holder."""
        for path in self.temporary.glob("msrl-run-*"):
            with suppress(OSError):
                os.utime(path, (0, 0))

    def second_host_processes(self) -> list[int]:
        """Return the run's processes on the second host."""
        actors = [TARGETS[name] for name in ("rank", "dock", "functions")]
        children = psutil.Process(self.raylets[-1]).children(recursive=True)
        known = self.processes()
        return [child.pid for child in children if any(word in known.get(child.pid, "") for word in actors)]

    def read(self, out: str) -> list[dict[str, Any]]:
        """Return the complete lines of the metrics."""
        path = self.folder / out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def log(self, out: str) -> str:
        return (self.folder / f"{out}.log").read_text()[-1500:]

    def drivers(self) -> set[int]:
        return {pid for pid, command in self.processes().items() if TARGETS["driver"] in command}

    def result(self, out: str) -> Result:
        lines = [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]
        lines = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        workers = sorted((self.folder / out / "weights").iterdir())
        return lines, {
            f"{worker.name} {name}": tensor.tobytes()
            for worker in workers
            for name, tensor in load_file(worker / "model.safetensors").items()
        }


def compare(place: Place, out: str, count: Count, reference: Result) -> None:
    """Count a finished run and its differences from the undisturbed one."""
    count.finished += 1
    lines_now, weights = place.result(out)
    for line, undisturbed in zip(lines_now, reference[0], strict=False):
        more = int(line.get("rows", 0)) - int(undisturbed.get("rows", 0))
        count.rows_lost += max(0, -more)
        count.rows_twice += max(0, more)
        count.oldest = max(count.oldest, int(line.get("staleness_max", 0)))
    if (lines_now, weights) != reference:
        count.differing += 1
        count.remarks.append(f"{out}: other metrics or weights than the undisturbed run's")


def clean(place: Place, count: Count, out: str) -> None:
    """Count processes and files that are left ten seconds after the end."""
    until = time.monotonic() + 10
    while True:
        processes = place.leftover_processes()
        shared = {path for path in SHARED.iterdir() if not held(path)}  # held files belong to another run
        files = [
            *(temporary for temporary in place.temporary.iterdir() if temporary.name != "ray"),
            *(shared - place.shared),
        ]
        if not (processes or files) or time.monotonic() > until:
            break
        time.sleep(0.1)
    if processes or files:
        count.leftovers += len(processes) + len(files)
        inside = [str(path) for folder in files for path in folder.rglob("*")]
        count.remarks.append(f"{out} left {processes} {files} {inside}")
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        for path in files:
            shutil.rmtree(path, ignore_errors=True)  # for files in shared memory, the next run starts a new count
        place.shared = set(SHARED.iterdir())


def held(room: Path) -> bool:
    """Return whether a process holds a folder of rows."""
    with suppress(OSError), (room / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def report(count: Count) -> None:
    for remark in count.remarks:
        print(remark)
    print(f"{'fault':36}{'times':>6}  seconds until it made progress: median, maximum")
    for name, number in sorted(count.kills.items()):
        seconds = count.recover.get(name, [])
        shown = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        print(f"{name:36}{number:6}  {shown}")
    seconds = [value for values in count.recover.values() for value in values]
    figures = {
        "faults": sum(count.kills.values()),
        "runs": count.runs,
        "finished": count.finished,
        "rows_lost": count.rows_lost,
        "rows_twice": count.rows_twice,
        "differing": count.differing,
        "oldest": count.oldest,
        "hangs": count.hangs,
        "leftovers": count.leftovers,
        "recover_s_median": round(statistics.median(seconds), 1) if seconds else None,
        "recover_s_most": round(max(seconds), 1) if seconds else None,
    }
    print(json.dumps(figures))
