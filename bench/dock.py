"""Transfer of rows between nodes on 1 to 8 hosts: the dock and other systems.

Hosts are network namespaces of this machine, with a link of 12.5 MB/s each way and a Ray node in each (needs root). The
graph is that of GRPO: a generation, two inferences and a reward, an update. Each host writes and reads 128 samples of 5
columns of 2048 float32; nothing is computed. The sides (bench/dock_sides) are:

- `ours`: the dock, a warehouse on each host
- `ours_one`: the dock, one warehouse
- `central`: a Ray actor with all rows
- `tq_one`, `tq_sharded`: TransferQueue with one storage unit, and with one on each host
- `verl`: a driver that scatters and collects DataProto

Each side runs under the Python of its own environment, on the same Ray nodes. A round is an iteration of each side that
computes nothing, then one in which workers compute (sleep) for --compute seconds; the first iteration of each side is
left out. Figures are medians. Bytes are what `tc -s` counted on the links.

The figures mean nothing on a busy machine, so the exit status is 1 unless two gates hold: raw TCP between two hosts
reaches the rate of the links, within 6 %, and on the largest number of hosts the central actor reaches 95 % or more of
what its link allows (few workers leave it idle at times).

--lengths uses rows of different lengths; then only the dock runs, without and with `balance = tokens`. --local puts and
gets rows on one host. --page writes tables and a picture into docs/guides/performance.md. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import smoke
from dock_page import write_lengths, write_local, write_rows
from equations import warehouse_bytes
from hosts import Hosts

ROOT = Path(__file__).parent.parent
SIDES = Path(__file__).with_name("dock_sides")
# For each side its script, and the environment whose Python runs it; "": this one.
SCRIPTS = {
    "ours": ("ours.py", ""),
    "ours_one": ("ours.py", ""),
    "ours_tokens": ("ours.py", ""),
    "central": ("central.py", ""),
    "tq_one": ("transferqueue.py", ".venv-transferqueue"),
    "tq_sharded": ("transferqueue.py", ".venv-transferqueue"),
    "verl": ("dataproto.py", ".venv-verl"),
}
START = time.monotonic()
PAUSE = 0.5  # seconds for the previous side to finish its work, such as freeing memory
DEADLINE = 180.0  # seconds for an answer
RAW = 25_000_000  # bytes for raw TCP
# Number of columns as long as a response: written by a generation, and read by all nodes.
GENERATED = 2
READ = 9
COLUMNS = 5
CONTROLLERS = 6  # C of the paper's equation 4
SCALARS = 3  # M of the paper's equation 4
RECEIVE = """import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print(flush=True)
    line, start, count = server.accept()[0], time.perf_counter(), 0
    while got := len(line.recv(1 << 20)):
        count += got
print(count / (time.perf_counter() - start))"""
SEND = """import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as line:
    line.sendall(bytes(int(sys.argv[2])))"""


@dataclass
class Found:
    """What a side took on some hosts, by seconds of compute: an entry per round."""

    seconds: dict[float, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: dict[float, list[int]] = field(default_factory=lambda: defaultdict(list))  # sent over all links
    busiest: dict[float, list[int]] = field(default_factory=lambda: defaultdict(list))  # over one link, one way
    uneven: float = 1.0  # tokens of the largest update share over the mean, if the side reports it

    def median(self, compute: float) -> float:
        return statistics.median(self.seconds[compute])


SIDE = "MSRL_BENCH_SIDE"  # in the environment of each of a side's processes


class Running:
    """A side that runs on the first host."""

    def __init__(self, name: str, hosts: Hosts, count: int, options: argparse.Namespace, local: bool = False) -> None:
        script, environment = SCRIPTS[name]
        python = ROOT / environment / "bin" / "python" if environment else Path(sys.executable)
        if not python.exists():
            raise SystemExit(f"{name}: there is no {python}; make {environment}/ready makes it")
        samples = 1024 if local else options.samples
        lengths = draw_lengths(options.lengths, samples * count, options.length) if options.lengths else ()
        setup = {
            "name": "local" if local else name,
            "hosts": [hosts.ip(host) for host in range(count)],
            "samples": samples,
            "length": options.length,
            "lengths": lengths,
        }
        self.name = name
        self.number = 0
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*hosts.on(0), str(python), str(SIDES / script), json.dumps(setup)],
            env={**os.environ, **hosts.environment, "RAY_ADDRESS": hosts.address, SIDE: name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        line = out.readline() if select.select([out], [], [], DEADLINE)[0] else ""
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} gave no answer\n{self.log.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def iteration(self, compute: float) -> dict[str, Any]:
        """Run one iteration of this side while all other sides are stopped.

        The others are stopped because they poll for work even if there is none.
        """
        self.number += 1
        self.signal_all(signal.SIGCONT)
        self.process.stdin.write(f"{self.number} {compute}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        answer = self.answer()
        self.signal_all(signal.SIGSTOP)
        return answer

    @cached_property
    def processes(self) -> list[int]:
        """Ids of the side's process and its workers, once they run."""
        pids = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(SIDE) == self.name:
                    pids.append(process.pid)
        return pids

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the side."""
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=20)  # it ends at the end of its input
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.log.close()


@contextmanager
def running(
    names: Sequence[str], hosts: Hosts, count: int, options: argparse.Namespace, local: bool = False
) -> Iterator[list[Running]]:
    """Start the sides, all at once."""
    sides: list[Running] = []
    try:
        for name in names:
            sides.append(Running(name, hosts, count, options, local))
        for side in sides:
            side.answer()
        for side in sides:
            side.signal_all(signal.SIGSTOP)
        yield sides
    finally:
        for side in sides:
            side.signal_all(signal.SIGCONT)
            side.close()


def draw_lengths(lengths: str, count: int, most: int) -> list[int]:
    """Draw lengths of responses.

    `lognormal` has a median of a fifth of the longest. Any other value is a file: one length per line, or rows of JSON
    with an `answer`, in which four characters count as a token.
    """
    chance = random.Random(0)
    if lengths == "lognormal":
        sizes = [chance.lognormvariate(0, 1) * most / 5 for _ in range(count)]
    else:
        lines = Path(lengths).read_text().splitlines()
        known = [
            len(json.loads(line)["answer"]) / 4 if line.startswith("{") else float(line)
            for line in lines
            if line.strip()
        ]
        sizes = chance.choices(known, k=count)
    return [min(max(round(size), 1), most) for size in sizes]


def measure_tcp(hosts: Hosts) -> float:
    """Return the bytes per second of TCP from the second host to the first."""
    receive = subprocess.Popen(
        [*hosts.on(0), sys.executable, "-c", RECEIVE, hosts.ip(0)], stdout=subprocess.PIPE, text=True
    )
    assert receive.stdout is not None
    receive.stdout.readline()
    subprocess.run([*hosts.on(1), sys.executable, "-c", SEND, hosts.ip(0), str(RAW)], check=True)
    return float(receive.communicate()[0])


def floor(count: int, options: argparse.Namespace) -> float:
    """Return the minimum seconds of the central actor.

    Rows generated elsewhere must arrive before any share of them can be read; then all rows read elsewhere leave by the
    same link.
    """
    return (GENERATED + READ) * (count - 1) * 4 * options.samples * options.length / (1e6 * options.rate)


def measure_hosts(count: int, options: argparse.Namespace, gates: list[dict[str, Any]]) -> dict[str, Found]:
    """Return what each side took on a number of hosts."""
    hosts = Hosts(count, rate=f"{options.rate}mbps")
    figures: dict[str, Found] = defaultdict(Found)
    try:
        if count > 1:
            check_gate(gates, f"{count} hosts: raw TCP / rate", measure_tcp(hosts) / (1e6 * options.rate), 0.94, 1.06)
        print(f"{count} hosts: starting {options.sides}", flush=True)
        with running(options.sides.split(), hosts, count, options) as sides:
            for number in range(1 + options.rounds):
                for compute in dict.fromkeys((0.0, options.compute)) if number else (0.0,):
                    for side in sides:
                        time.sleep(PAUSE)
                        before = hosts.links()
                        answer = side.iteration(compute)
                        if number:
                            moved = [
                                (sent - sent_before, received - received_before)
                                for (sent, received), (sent_before, received_before) in zip(
                                    hosts.links(), before, strict=True
                                )
                            ]
                            figures[side.name].seconds[compute].append(answer["seconds"])
                            figures[side.name].bytes[compute].append(sum(sent for sent, _ in moved))
                            figures[side.name].busiest[compute].append(max(map(max, moved)))
                            figures[side.name].uneven = answer.get("uneven", 1.0)
                print(f"{count} hosts: {number} of {options.rounds} rounds, {clock()}", flush=True)
    finally:
        hosts.close()
    for name, side_figures in figures.items():
        moved = statistics.median(side_figures.bytes[0.0])
        busiest = statistics.median(side_figures.busiest[0.0])
        line = (
            f"{1000 * side_figures.median(0.0):10,.1f} ms {moved / 1e6:8,.2f} MB sent, "
            f"{busiest / 1e6:8,.2f} on one link"
        )
        print(f"{count} hosts  {name:<12}{line}", flush=True)
    if count == max(map(int, options.hosts.split())) > 1 and "central" in figures:
        check_gate(
            gates,
            f"{count} hosts: central's floor / central",
            floor(count, options) / figures["central"].median(0.0),
            0.95,
        )
    return dict(figures)


def check_gate(gates: list[dict[str, Any]], name: str, value: float, least: float, most: float = float("inf")) -> None:
    holds = least <= value <= most
    gates.append({"gate": name, "value": round(value, 3), "holds": holds})
    print(f"{name}: {value:.3f}{'' if holds else f', NOT within {least} and {most}'}", flush=True)


def clock() -> str:
    """Return minutes and seconds since the start."""
    seconds = int(time.monotonic() - START)
    return f"{seconds // 60}:{seconds % 60:02}"


def rows(options: argparse.Namespace) -> dict[str, Any]:
    gates: list[dict[str, Any]] = []
    counts = [*map(int, options.hosts.split())]
    figures = {count: measure_hosts(count, options, gates) for count in counts}
    most = max(counts)
    answer: dict[str, Any] = {"hosts": most}
    for name, side_figures in figures[most].items():
        answer[f"{name}_s"] = round(side_figures.median(0.0), 4)
    if "ours" in figures[most]:
        # The conventional volume: the traffic through all warehouses in equation 4.
        count = options.samples * most
        length = (
            statistics.mean(draw_lengths(options.lengths, count, options.length)) if options.lengths else options.length
        )
        volume = most * warehouse_bytes(count, 1, 4, 8, COLUMNS, length, SCALARS, CONTROLLERS, most)
        answer["wire_fraction_of_eq4"] = round(statistics.median(figures[most]["ours"].bytes[0.0]) / volume, 5)
    if counts[0] == 1 and options.compute:
        key = f"linearity_{options.compute:g}s"
        linear = {
            name: figures[1][name].median(options.compute) / side_figures.median(options.compute)
            for name, side_figures in figures[most].items()
        }
        answer[key] = round(linear.get("ours", 0.0), 4)
        answer[f"{key}_by_side"] = {name: round(ratio, 4) for name, ratio in linear.items()}
    answer["gates"] = gates
    if options.lengths:
        answer |= {f"{name}_uneven": round(side_figures.uneven, 4) for name, side_figures in figures[most].items()}
        answer |= {
            f"{name}_bytes": statistics.median(side_figures.bytes[0.0]) for name, side_figures in figures[most].items()
        }
    if options.page and options.lengths:
        write_lengths(
            figures, Path(options.lengths).name, draw_lengths(options.lengths, most * options.samples, options.length)
        )
    elif options.page:
        write_rows(figures, options.compute, answer)
    return answer


def local(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one writer and one reader on one host: 1024 samples of 5 columns."""
    size = 1024 * COLUMNS * options.length * 4
    answer: dict[str, Any] = {"payload_mb": round(size / 1e6, 1)}
    hosts = Hosts(1)
    try:
        with running(options.sides.split(), hosts, 1, options, local=True) as sides:
            answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for number in range(1 + options.rounds):
                for side in sides:
                    time.sleep(PAUSE)
                    took = side.iteration(0.0)
                    if number:
                        answers[side.name].append(took)
    finally:
        hosts.close()
    for name, side_answers in answers.items():
        put, get, memory = (
            statistics.median(side_answer[key] for side_answer in side_answers) for key in ("put", "get", "held")
        )
        both = statistics.median(side_answer["put"] + side_answer["get"] for side_answer in side_answers)
        figures = {
            "gb_s": round(size / both / 1e9, 2),
            "put_ms": round(1000 * put, 2),
            "get_ms": round(1000 * get, 2),
            "memory_over_payload": round(memory / size, 2),
        }
        answer[name] = figures
        print(name, figures, flush=True)
    if "tq_one" in answers:
        answer["over_transferqueue"] = round(answer["ours"]["gb_s"] / answer["tq_one"]["gb_s"], 1)
    if options.page:
        write_local(answer)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1 2 4 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compute", type=float, default=3.0, help="seconds of compute in an iteration; 0: no such iteration"
    )
    parser.add_argument("--sides", help="sides to run, of those above")
    parser.add_argument("--samples", type=int, default=128, help="samples per host")
    parser.add_argument("--length", type=int, default=2048, help="maximum length of a sample")
    parser.add_argument("--lengths", default="", help="lognormal, a file of lengths, or a file of rows with an answer")
    parser.add_argument("--rate", type=float, default=12.5, help="MB/s per link, each way")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = smoke.parse(parser, local=True, sides="ours", rounds=1, samples=8, length=64)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts end with this process, however it ends
    of_lengths = "ours ours_tokens" if options.lengths else "ours ours_one central tq_one tq_sharded verl"
    options.sides = options.sides or ("ours tq_one" if options.local else of_lengths)
    answer = local(options) if options.local else rows(options)
    failed = [gate["gate"] for gate in answer.get("gates", ()) if not gate["holds"]]
    if failed:
        print(f"INVALID: gates of the machine or the bench fail: {'; '.join(failed)}", file=sys.stderr)
    print(json.dumps(answer), flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
