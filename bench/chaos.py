"""Kills processes of a run with -9 at random moments, and counts what is lost: rows, runs, processes, files, seconds.

An example runs with a checkpoint every other iteration: GRPO; DAPO, which draws prompts until enough of them survive;
PF-PPO, whose rows repeat, with a coefficient and a mean of each prompt that outlive the iteration, and that draws
prompts by these; or countdown, whose responses are drawn by weights that may be two versions old, with a checkpoint
every fourth (none is older than the last). At random moments of whatever phase a rank, the dock, a function host, the
driver, the supervisor, Ray's raylet or its GCS is killed, several in each run. A run ends well when its metrics are,
line for line, those of a run that nobody disturbed, and its weights bit for bit the same. A run whose supervisor is
killed cannot start itself again: nothing of it may be left, and it is gone on with by --resume.

A row is lost when an iteration's optimizer steps saw fewer responses than undisturbed, doubled when they saw more; a
hang is a run that does not write a line for --patience seconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

from msrl_graph.runtime.dock.segments import LOCK
from msrl_graph.runtime.metrics.record import TIMES

EXAMPLES = Path(__file__).parent.parent / "examples"
SOLVED = """
  state solved : f32 per prompt = 0.5
  source(prompts) -> prompt, answer { weights = around(solved) }
  node host.solved(correct, solved) -> solved { call = moving_mean(reward = correct, mean = solved), per = prompt }
  host.correct -> host.solved
"""
# Of each program the file, changes to its text, and params.
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
# What a process's command line or name holds.
TARGETS = {
    "rank": "ray::Rank",
    "dock": "ray::DockHost",
    "functions": "ray::FunctionHost",
    "driver": "msrl_graph.runtime.driver.driver",
    "supervisor": "run_main",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
# Whose death costs a new start, and so a new driver: docks and function hosts are started again in place.
RESTARTS = TARGETS.keys() - {"dock", "functions"}
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
    oldest: int = 0  # versions that the weights of a row were behind
    recover: dict[str, list[float]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class Place:
    """A folder with a program in it and a temporary folder of its own, by which its processes are known."""

    def __init__(self, folder: Path, program: str, iterations: int, more: list[tuple[str, str]] | None = None) -> None:
        self.folder, self.iterations, self.environment = folder, iterations, dict(os.environ)
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
        for old, new in [*changes, *(more or ()), ('"../', f'"{EXAMPLES}/')]:
            assert old in text, old
            text = text.replace(old, new)
        (folder / "p.rlg").write_text(text)
        self.temporary = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # short: Ray's sockets lie below it
        self.shared = set(SHARED.iterdir())

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
        """Those that run with this place's temporary folder or below its command: id -> command line."""
        found = {}
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TMPDIR", "").startswith(str(self.temporary))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline()) or process.name()
            except psutil.Error:
                continue
        return found

    def drivers(self) -> set[int]:
        return {pid for pid, command in self.processes().items() if TARGETS["driver"] in command}

    def result(self, out: str) -> Result:
        lines = [json.loads(x) for x in (self.folder / out / "metrics.jsonl").read_text().splitlines()]
        lines = [{k: v for k, v in x.items() if k not in TIMES} for x in lines]
        workers = sorted((self.folder / out / "weights").iterdir())
        return lines, {
            f"{w.name} {k}": v.tobytes() for w in workers for k, v in load_file(w / "model.safetensors").items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--program", choices=PROGRAMS, default="grpo")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--each", type=int, default=8, help="kills in one run")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=20.0, help="the most seconds from one kill to the next")
    parser.add_argument("--patience", type=float, default=150.0)
    parser.add_argument("--only", choices=TARGETS, action="append")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    count = Count()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.program, options.iterations)
        try:
            process = place.start("quiet")
            assert process.wait() == 0, (place.folder / "quiet.log").read_text()
            reference = place.result("quiet")
            chance = random.Random(options.seed)
            left = options.kills
            while left > 0:
                many = min(options.each, left)
                left -= chaos(place, f"run-{count.runs}", many, options, chance, count, reference)
                print(f"{options.kills - left} kills, {count.runs} runs, {count.finished} finished", flush=True)
        finally:
            for pid in place.processes():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(place.temporary, ignore_errors=True)
    report(count)


def chaos(
    place: Place,
    out: str,
    kills: int,
    options: argparse.Namespace,
    chance: random.Random,
    count: Count,
    reference: Result,
) -> int:
    """One run and its kills: how many there were until it ended."""
    names, wanted = options.only or list(TARGETS), kills
    count.runs += 1
    process = place.start(out)
    pending: tuple[str, float, int, set[int]] | None = (
        None  # the last kill, when, how many lines there were, and the driver's id
    )
    due = time.monotonic() + chance.uniform(0.0, options.gap)  # starting and starting anew are phases, too
    seen, changed = -1, time.monotonic()
    while True:
        time.sleep(0.05)
        now, lines = time.monotonic(), place.lines(out)
        if lines != seen:
            seen, changed = lines, now
            if (
                pending is not None
                and lines > pending[2]
                and not (pending[0] in RESTARTS and pending[3] & place.drivers())
            ):
                name, since = pending[:2]  # it is further than it was
                count.recover.setdefault(name, []).append(now - since)
                pending = None
        if process.poll() is not None:
            if process.returncode == -signal.SIGKILL:  # the supervisor was killed: is anything left?
                clean(place, count, out)
                known = sorted((place.folder / out / "checkpoints").glob("[0-9]*"))
                if known:
                    process = place.start(out, "--resume", out)
                else:
                    shutil.rmtree(place.folder / out, ignore_errors=True)
                    process = place.start(out)
                seen, changed = -1, time.monotonic()
                continue
            break
        if now - changed > options.patience:
            count.hangs += 1
            count.remarks.append(f"{out}: no line for {options.patience:.0f} s after killing {pending}")
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            break
        if now > due and kills:
            name = chance.choice(names)
            victims = [pid for pid, command in place.processes().items() if TARGETS[name] in command]
            if not victims:
                due = now + 0.2
                continue
            drivers = place.drivers()
            try:
                os.kill(chance.choice(victims), signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills -= 1
            count.kills[name] = count.kills.get(name, 0) + 1
            pending = (name, time.monotonic(), lines, drivers)
            due = time.monotonic() + chance.uniform(0.0, options.gap)
            seen = lines
    clean(place, count, out)
    if process.returncode != 0:
        count.remarks.append(
            f"{out} ended with {process.returncode}: {(place.folder / f'{out}.log').read_text()[-1500:]}"
        )
        return wanted - kills
    compare(place, out, count, reference)
    return wanted - kills


def compare(place: Place, out: str, count: Count, reference: Result) -> None:
    """Counts a run that came to its end, and in what it is not the undisturbed one."""
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
    """Counts processes and files that are still there ten seconds after the end."""
    until = time.monotonic() + 10
    while (left := place.processes()) and time.monotonic() < until:
        time.sleep(0.1)
    shared = {path for path in SHARED.iterdir() if not held(path)}  # what is held is another run's
    files = [*place.temporary.iterdir(), *(shared - place.shared)]
    if left or files:
        count.leftovers += len(left) + len(files)
        count.remarks.append(f"{out} left {left} {files}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for path in files:
            shutil.rmtree(path, ignore_errors=True)  # of files in shared memory, the next run's count starts anew
        place.shared = set(SHARED.iterdir())


def held(room: Path) -> bool:
    """Whether a process holds a folder of rows."""
    with suppress(OSError), (room / LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def report(count: Count) -> None:
    for remark in count.remarks:
        print(remark)
    print(f"{'killed':14}{'kills':>6}  seconds until it was further than before: median, most")
    for name, number in sorted(count.kills.items()):
        seconds = count.recover.get(name, [])
        shown = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        print(f"{name:14}{number:6}  {shown}")
    seconds = [s for xs in count.recover.values() for s in xs]
    figures = {
        "kills": sum(count.kills.values()),
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


if __name__ == "__main__":
    main()
