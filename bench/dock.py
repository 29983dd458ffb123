"""Rows between the nodes of a graph on 1 to 8 hosts: through the dock, and by other ways, in turn.

Hosts are network namespaces of this machine, with a link of 12.5 MB/s each way and a Ray node in each (needs root). The
graph is that of GRPO: a generation, two inferences and a reward, an update, of which each host makes and reads 128
samples of 5 columns of 2048 float32; nothing is computed. The sides are `ours` (the dock, a warehouse on each host),
`ours_one` (one warehouse), `central` (a Ray actor with all rows), `tq_one` and `tq_sharded` (TransferQueue with one
storage unit, and with one on each host), `verl` (a driver that scatters and collects DataProto): bench/dock_sides, each
under the Python of its own environment, on the same Ray nodes. A round is an iteration of each side that computes
nothing, then one in which workers compute (sleep) for --compute seconds; a first iteration of each side is left out.
Figures are medians. Bytes are what `tc -s` counted on the links.

The figures mean nothing where the machine is too busy, so two things must hold, or the exit status is 1: raw TCP
between two hosts takes the rate of the links, within 6 %, and on the most hosts the central actor is at 95 % or more of
what its link allows (few workers leave it idle at times).

--lengths takes rows of differing lengths, and then only the dock runs, without and with `balance = tokens`. --local
puts and gets rows on one host. --page writes tables and a picture into docs/performance.md. The last line is JSON.
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
# By side its script, and the environment under whose Python it runs; "": this one.
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
PAUSE = 0.5  # seconds in which what the side before has left to do, such as to free memory, gets done
DEADLINE = 180.0  # seconds for an answer
RAW = 25_000_000  # bytes for raw TCP
# Columns as long as a response: those that a generation writes, and all that nodes read, each time.
GENERATED = 2
READ = 9
COLUMNS = 5
CONTROLLERS, SCALARS = 6, 3  # C and M of the paper's equation 4
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
    """What a side took on so many hosts, by computing seconds: an entry a round."""

    seconds: dict[float, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: dict[float, list[int]] = field(default_factory=lambda: defaultdict(list))  # sent over all links
    busiest: dict[float, list[int]] = field(default_factory=lambda: defaultdict(list))  # over one link, one way
    uneven: float = 1.0  # tokens of the fullest share of the update over the mean, where the side tells it

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
        lengths = drawn(options.lengths, samples * count, options.length) if options.lengths else ()
        setup = {
            "name": "local" if local else name,
            "hosts": [hosts.ip(h) for h in range(count)],
            "samples": samples,
            "length": options.length,
            "lengths": lengths,
        }
        self.name, self.number, self.log = name, 0, tempfile.TemporaryFile("w+")  # noqa: SIM115
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
        """Its turn: the others' processes stand still, which look for work even where there is none."""
        self.number += 1
        self.tell(signal.SIGCONT)
        self.process.stdin.write(f"{self.number} {compute}\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        answer = self.answer()
        self.tell(signal.SIGSTOP)
        return answer

    @cached_property
    def processes(self) -> list[int]:
        """The side's own and its workers', once they are there."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(SIDE) == self.name:
                    found.append(process.pid)
        return found

    def tell(self, number: int) -> None:
        """Sends a signal to all of them."""
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=20)  # it ends where its input does
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.log.close()


@contextmanager
def running(
    names: Sequence[str], hosts: Hosts, count: int, options: argparse.Namespace, local: bool = False
) -> Iterator[list[Running]]:
    """The sides, started all at once."""
    sides: list[Running] = []
    try:
        for name in names:
            sides.append(Running(name, hosts, count, options, local))
        for side in sides:
            side.answer()
        for side in sides:
            side.tell(signal.SIGSTOP)
        yield sides
    finally:
        for side in sides:
            side.tell(signal.SIGCONT)
            side.close()


def drawn(lengths: str, count: int, most: int) -> list[int]:
    """So many lengths: `lognormal` (a median of a fifth of the longest), or at random of those of a file, which has one
    on each line, or rows of JSON with an `answer`, of which four characters are taken for a token."""
    chance = random.Random(0)
    if lengths == "lognormal":
        found = [chance.lognormvariate(0, 1) * most / 5 for _ in range(count)]
    else:
        lines = Path(lengths).read_text().splitlines()
        known = [len(json.loads(x)["answer"]) / 4 if x.startswith("{") else float(x) for x in lines if x.strip()]
        found = chance.choices(known, k=count)
    return [min(max(round(n), 1), most) for n in found]


def raw(hosts: Hosts) -> float:
    """Bytes a second of TCP from the second host to the first."""
    receive = subprocess.Popen(
        [*hosts.on(0), sys.executable, "-c", RECEIVE, hosts.ip(0)], stdout=subprocess.PIPE, text=True
    )
    assert receive.stdout is not None
    receive.stdout.readline()
    subprocess.run([*hosts.on(1), sys.executable, "-c", SEND, hosts.ip(0), str(RAW)], check=True)
    return float(receive.communicate()[0])


def floor(count: int, options: argparse.Namespace) -> float:
    """Seconds of the central actor at best. What was generated elsewhere must be in before anybody can read a share of
    it; then all that is read elsewhere goes out by the same link."""
    return (GENERATED + READ) * (count - 1) * 4 * options.samples * options.length / (1e6 * options.rate)


def measured(count: int, options: argparse.Namespace, gates: list[dict[str, Any]]) -> dict[str, Found]:
    """By side what it took on so many hosts."""
    hosts = Hosts(count, rate=f"{options.rate}mbps")
    found: dict[str, Found] = defaultdict(Found)
    try:
        if count > 1:
            told(gates, f"{count} hosts: raw TCP / rate", raw(hosts) / (1e6 * options.rate), 0.94, 1.06)
        print(f"{count} hosts: starting {options.sides}", flush=True)
        with running(options.sides.split(), hosts, count, options) as sides:
            for number in range(1 + options.rounds):
                for compute in dict.fromkeys((0.0, options.compute)) if number else (0.0,):
                    for side in sides:
                        time.sleep(PAUSE)
                        before = hosts.links()
                        answer = side.iteration(compute)
                        if number:
                            moved = [(s - t, r - u) for (s, r), (t, u) in zip(hosts.links(), before, strict=True)]
                            found[side.name].seconds[compute].append(answer["seconds"])
                            found[side.name].bytes[compute].append(sum(s for s, _ in moved))
                            found[side.name].busiest[compute].append(max(map(max, moved)))
                            found[side.name].uneven = answer.get("uneven", 1.0)
                print(f"{count} hosts: {number} of {options.rounds} rounds, {clock()}", flush=True)
    finally:
        hosts.close()
    for name, some in found.items():
        moved = statistics.median(some.bytes[0.0])
        busiest = statistics.median(some.busiest[0.0])
        line = f"{1000 * some.median(0.0):10,.1f} ms {moved / 1e6:8,.2f} MB sent, {busiest / 1e6:8,.2f} on one link"
        print(f"{count} hosts  {name:<12}{line}", flush=True)
    if count == max(map(int, options.hosts.split())) > 1 and "central" in found:
        told(
            gates,
            f"{count} hosts: central's floor / central",
            floor(count, options) / found["central"].median(0.0),
            0.95,
        )
    return dict(found)


def told(gates: list[dict[str, Any]], name: str, value: float, least: float, most: float = float("inf")) -> None:
    holds = least <= value <= most
    gates.append({"gate": name, "value": round(value, 3), "holds": holds})
    print(f"{name}: {value:.3f}{'' if holds else f', which is NOT within {least} and {most}'}", flush=True)


def clock() -> str:
    """Minutes and seconds since the start."""
    seconds = int(time.monotonic() - START)
    return f"{seconds // 60}:{seconds % 60:02}"


def rows(options: argparse.Namespace) -> dict[str, Any]:
    gates: list[dict[str, Any]] = []
    counts = [*map(int, options.hosts.split())]
    found = {count: measured(count, options, gates) for count in counts}
    most = max(counts)
    answer: dict[str, Any] = {"hosts": most}
    for name, some in found[most].items():
        answer[f"{name}_s"] = round(some.median(0.0), 4)
    if "ours" in found[most]:
        # The conventional volume: what goes through all warehouses of equation 4.
        count = options.samples * most
        length = statistics.mean(drawn(options.lengths, count, options.length)) if options.lengths else options.length
        volume = most * warehouse_bytes(count, 1, 4, 8, COLUMNS, length, SCALARS, CONTROLLERS, most)
        answer["wire_fraction_of_eq4"] = round(statistics.median(found[most]["ours"].bytes[0.0]) / volume, 5)
    if counts[0] == 1 and options.compute:
        key = f"linearity_{options.compute:g}s"
        linear = {
            name: found[1][name].median(options.compute) / some.median(options.compute)
            for name, some in found[most].items()
        }
        answer[key] = round(linear.get("ours", 0.0), 4)
        answer[f"{key}_by_side"] = {name: round(x, 4) for name, x in linear.items()}
    answer["gates"] = gates
    if options.lengths:
        answer |= {f"{name}_uneven": round(some.uneven, 4) for name, some in found[most].items()}
        answer |= {f"{name}_bytes": statistics.median(some.bytes[0.0]) for name, some in found[most].items()}
    if options.page and options.lengths:
        write_lengths(found, Path(options.lengths).name, drawn(options.lengths, most * options.samples, options.length))
    elif options.page:
        write_rows(found, options.compute, answer)
    return answer


def local(options: argparse.Namespace) -> dict[str, Any]:
    """One writer and one reader on one host: 1024 samples of 5 columns."""
    size = 1024 * COLUMNS * options.length * 4
    answer: dict[str, Any] = {"payload_mb": round(size / 1e6, 1)}
    hosts = Hosts(1)
    try:
        with running(options.sides.split(), hosts, 1, options, local=True) as sides:
            found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for number in range(1 + options.rounds):
                for side in sides:
                    time.sleep(PAUSE)
                    took = side.iteration(0.0)
                    if number:
                        found[side.name].append(took)
    finally:
        hosts.close()
    for name, some in found.items():
        put, get, held = (statistics.median(t[what] for t in some) for what in ("put", "get", "held"))
        both = statistics.median(t["put"] + t["get"] for t in some)
        figures = {
            "gb_s": round(size / both / 1e9, 2),
            "put_ms": round(1000 * put, 2),
            "get_ms": round(1000 * get, 2),
            "memory_over_payload": round(held / size, 2),
        }
        answer[name] = figures
        print(name, figures, flush=True)
    if "tq_one" in found:
        answer["over_transferqueue"] = round(answer["ours"]["gb_s"] / answer["tq_one"]["gb_s"], 1)
    if options.page:
        write_local(answer)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1 2 4 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compute", type=float, default=3.0, help="seconds of an iteration that computes; 0: none does"
    )
    parser.add_argument("--sides", help="of all those above")
    parser.add_argument("--samples", type=int, default=128, help="of a host")
    parser.add_argument("--length", type=int, default=2048, help="of a sample, at most")
    parser.add_argument("--lengths", default="", help="lognormal, or a file of lengths, or of rows with an answer")
    parser.add_argument("--rate", type=float, default=12.5, help="MB/s of a link, each way")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = smoke.parse(parser, local=True, sides="ours", rounds=1, samples=8, length=64)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts go with this process, however it ends
    of_lengths = "ours ours_tokens" if options.lengths else "ours ours_one central tq_one tq_sharded verl"
    options.sides = options.sides or ("ours tq_one" if options.local else of_lengths)
    answer = local(options) if options.local else rows(options)
    failed = [g["gate"] for g in answer.get("gates", ()) if not g["holds"]]
    if failed:
        print(f"INVALID: the machine or the bench does not do what it must: {'; '.join(failed)}", file=sys.stderr)
    print(json.dumps(answer), flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
