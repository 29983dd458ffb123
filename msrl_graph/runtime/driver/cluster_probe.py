"""The probe of a cluster: what its hosts are and have, before anything of a run starts on them.

Invariant: all hosts that the plan takes are asked at once, and within PROBE seconds each has answered or is named. What
would end the run later is an error, what would only slow or dull it a warning; what hosts differ in is told in one
table.
"""

from __future__ import annotations

import io
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...diagnostics import NOWHERE, Diagnostic, Severity, Span
from ...emit.humanize import many, size
from ...hardware import visibility_masks
from ...ir.plan import Plan
from ..process import host_facts, interpreters
from ..process.cluster_join import NoResources
from ..process.host_facts import APART, HostActor, HostFacts, PackageQuery
from ..process.host_requirements import reads, room
from . import environment_check, wait_report
from .device_reservation import DeviceReservation
from .dock_monitor import HostLost, missing

PROBE = 30.0  # seconds in which all hosts answer
PRECISE = ("msrl-graph",)  # of which any difference is an error
WRONG = " !"
SAME = "the same files belong at the same path on every host: in a folder that they share, or a copy on each"
INSTALL = "install the same versions on every host, from the same constraints"


@dataclass(frozen=True)
class HostColumn:
    """What is told of all hosts, in their order. `wrong` are the places of those that are, `told` what it means in the
    words of a message, and where the program says so."""

    title: str
    cells: Sequence[str]
    wrong: frozenset[int] = frozenset()
    code: str = "host-differs"
    severity: Severity = "error"
    told: str = ""
    help: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True)
class Hosts:
    """The hosts that a plan takes, in the order of its own: an actor on each, and what it told. `clocks` are seconds
    by which each differs from this machine's, `blind` are of each marked folder those that do not see it."""

    plan: Plan
    actors: Sequence[Any]
    addresses: Sequence[str]
    asked: Sequence[Mapping[str, Sequence[str]]]  # by title the files that each must have
    seen: Sequence[HostFacts]
    here: HostFacts
    clocks: Sequence[float]
    blind: Sequence[list[int]]
    reads: Mapping[str, Span] = field(default_factory=dict)

    def columns(self) -> list[HostColumn]:
        """All that is told of them."""
        return [*self._versions(), *self._interpreters(), *self._files(), *self._machines(), *self._variables()]

    def _versions(self) -> Iterator[HostColumn]:
        for package, ours in self.here["versions"].items():
            found = [f["versions"][package] for f in self.seen]
            meant = ours or Counter(filter(None, found)).most_common(1)[0][0] if ours or any(found) else ""
            whole = package in PRECISE
            unlike = {i for i, version in enumerate(found) if version != meant or not version}
            grave = {i for i in unlike if whole or _release(found[i]) != _release(meant)}
            told = f"{package} is not everywhere {meant}, as where the run is driven" if ours else f"{package} differs"
            yield HostColumn(
                package,
                [version or "-" for version in found],
                frozenset(grave or unlike),
                severity="error" if grave else "warning",
                told=told if all(found) else f"{package} is not installed everywhere",
                help=INSTALL,
            )

    def _interpreters(self) -> Iterator[HostColumn]:
        """Those that are not the run's own, on the hosts that have processes of theirs."""
        plan = self.plan
        for python in self.seen[0]["others"]:
            pools = [s.pool for s in plan.surroundings if s.python == python]
            needed = [any(plan.on_hosts(pool)[host] for pool in pools) for host in range(len(self.seen))]
            lacks = [
                interpreters.lacking(f["others"][python], self.here["versions"]) if at else ""
                for at, f in zip(needed, self.seen, strict=True)
            ]
            cells = [lack or ("there" if at else "not used there") for at, lack in zip(needed, lacks, strict=True)]
            wrong = frozenset(i for i, lack in enumerate(lacks) if lack)
            told = f"the interpreter {python} is not what the run needs everywhere"
            yield HostColumn(python, cells, wrong, told=told, help=interpreters.MEND)

    def _files(self) -> Iterator[HostColumn]:
        own = self.here["digests"]
        for title in dict.fromkeys(title for asked in self.asked for title in asked):
            cells = []
            wrong = set()
            for i, (asked, found) in enumerate(zip(self.asked, self.seen, strict=True)):
                paths = asked.get(title, ())
                there = [p for p in paths if found["sizes"][p] >= 0]
                same = [p for p in there if own[p] == found["digests"][p]]
                cells.append(
                    "not read there"
                    if not paths
                    else "there"
                    if len(same) == len(paths)
                    else "none"
                    if not there
                    else f"{len(there)} of {many(len(paths), 'file')}"
                    if len(there) < len(paths)
                    else "other sizes"
                    if any(self.here["sizes"][p] != found["sizes"][p] for p in there)
                    else "other contents"
                )
                wrong |= {i} if len(same) < len(paths) else set()
            told = f"{title} is not on every host that reads it, as it is here"
            yield HostColumn(title, cells, frozenset(wrong), told=told, help=SAME, span=self.reads.get(title, NOWHERE))
        # Nothing is wrong with one of its own: distributed_checkpoint.py has each host keep its part there.
        yield HostColumn("out folder", ["its own" if i in self.blind[0] else "shared" for i in range(len(self.seen))])

    def _machines(self) -> Iterator[HostColumn]:
        cluster = self.plan.cluster
        kind = self.plan.cluster.device.kind
        if not kind.is_host:
            few = frozenset(i for i, f in enumerate(self.seen) if f["devices"] < cluster.devices_per_node)
            cells = [str(f["devices"]) for f in self.seen]
            told = f"{many(cluster.devices_per_node, 'device')} a host are planned, and not every host has them"
            yield HostColumn(kind.resource, cells, few, "no-resources", told=told, span=cluster.span)
            seen = [f["variables"].get(kind.visible) for f in self.seen]
            hidden = [visibility_masks.wrong(kind, mask, f["devices"]) for mask, f in zip(seen, self.seen, strict=True)]
            yield HostColumn(
                kind.visible,
                ["-" if mask is None else mask for mask in seen],
                frozenset(i for i, told in enumerate(hidden) if told),
                "no-resources",
                told=next(filter(None, hidden), ""),
                help=f"unset {kind.visible} where Ray is started, or list the host's own numbers, rising from 0",
                span=cluster.span,
            )
        needs = max((m.total for m in self.plan.memory if m.place == "host"), default=0)
        short = frozenset(i for i, f in enumerate(self.seen) if f["memory"] < needs)
        never = frozenset(i for i, f in enumerate(self.seen) if f["total"] < needs)
        yield HostColumn(
            "memory free",
            [f"{size(f['memory'])} of {size(f['total'])}" for f in self.seen],
            never or short,
            "no-resources",
            "error" if never else "warning",
            f"the plan needs up to {size(needs)} of a host's memory",
            "end what else runs there, or plan for more hosts",
            cluster.span,
        )
        rows = room(self.plan)
        yield HostColumn(
            "/dev/shm free",
            [size(f["shared"]) for f in self.seen],
            frozenset(i for i, f in enumerate(self.seen) if f["shared"] < rows),
            "no-resources",
            "warning",
            f"a host's rows have {size(rows)}, among its temporary files where /dev/shm has less",
            "of a container say --shm-size, or mount a larger /dev/shm",
        )
        yield HostColumn(
            "clock",
            [f"{apart:+.1f} s" if abs(apart) >= 0.05 else "the same" for apart in self.clocks],
            frozenset(i for i, apart in enumerate(self.clocks) if abs(apart) > APART),
            severity="warning",
            told="clocks differ, and the trace lays what hosts did together by them",
            help="have the hosts' clocks kept by NTP",
        )
        without = frozenset(i for i, f in enumerate(self.seen) if not f["interface"])
        stated = cluster.interface
        yield HostColumn(
            "interface",
            [
                f"{f['interface']} {f['speaks']}" if f["interface"] else f"only {', '.join(f['interfaces'])}"
                for f in self.seen
            ],
            without if cluster.nodes > 1 or stated else frozenset(),
            severity="error" if stated else "warning",
            told=f"not every host has the interface {stated}, with an address"
            if stated
            else "no interface has the address that Ray has of the host, so ranks speak by the one of the host's name",
            help="" if stated else 'state one that every host has: `cluster … { interface = "eth0" }`',
            span=cluster.span,
        )

    def _variables(self) -> Iterator[HostColumn]:
        """Those that a host has set otherwise than its ranks want."""
        for setting in environment_check.wanted(self.plan):
            cells = [found["variables"].get(setting.name, "-") for found in self.seen]
            mine = [setting in environment_check.wanted(self.plan, host) for host in range(len(self.seen))]
            other = [m and cell not in ("-", setting.value) for m, cell in zip(mine, cells, strict=True)]
            grave = frozenset(i for i, unlike in enumerate(other) if unlike and setting.refuses(cells[i]))
            wrong = grave or frozenset(i for i, unlike in enumerate(other) if unlike)
            if wrong:
                severity, code, help = environment_check.judged(setting, cells[min(wrong)])
                told = f"the plan wants {setting.name}={setting.value}: {setting.why}"
                yield HostColumn(setting.name, cells, wrong, code, severity, told, help)

    def judge(self, verbose: bool) -> list[str]:
        """What to tell of hosts that a run may start on; NoResources with all that is wrong."""
        columns = self.columns()
        wrong = {s: [c for c in columns if c.wrong and c.severity == s] for s in ("error", "warning")}
        if errors := wrong["error"]:
            raise NoResources(self._told(errors, "error"))
        told = []
        if warned := wrong["warning"]:
            d = self._told(warned, "warning")
            told.append(f"warning[{d.code}]: {d.message}\n  {d.help}".rstrip())
        return [*told, "the hosts of the run\n" + self.table(columns)] if verbose else told

    def _told(self, columns: Sequence[HostColumn], severity: Severity) -> Diagnostic:
        """One diagnostic of all of these, with their table."""
        first, *others = sorted(columns, key=lambda c: not c.span.line)
        code = first.code if all(c.code == first.code for c in others) else "host-differs"
        message = "\n".join([*(c.told for c in (first, *others)), self.table(columns)])
        help = "\n".join(dict.fromkeys(c.help for c in (first, *others) if c.help))
        related = tuple((c.span, c.told) for c in others if c.span.line and c.span != first.span)
        return Diagnostic(code, message, first.span, help, severity, related)

    def table(self, columns: Sequence[HostColumn]) -> str:
        """A line for each host; those of which the same is told are one. What is wrong bears a mark."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for title in ("host", *(c.title for c in columns)):
            table.add_column(title, no_wrap=True)
        names = [f["name"] for f in self.seen]
        alike: dict[tuple[str, ...], list[str]] = {}
        for i, address in enumerate(self.addresses):
            cells = tuple(c.cells[i] + WRONG * (i in c.wrong) for c in columns)
            named = f"{address} ({names[i]})" if names.count(names[i]) == 1 and len(names) > 1 else address
            alike.setdefault(cells, []).append(named)
        for cells, who in alike.items():
            table.add_row(", ".join(who[:3]) + f" and {len(who) - 3} more" * (len(who) > 3), *cells)
        console = Console(
            file=io.StringIO(), width=10_000, color_system=None, markup=False, highlight=False, force_jupyter=False
        )
        with console.capture() as text:
            console.print(table)
        return "\n".join(f"  {line.rstrip()}" for line in text.get().splitlines())


class HostsSilent(NoResources):
    """Hosts that are there, as Ray says, do not answer: as a run begins, somebody has to look after them; where it
    begins anew, they may have been lost, or be on their way back."""


def probe(
    plan: Plan, reserved: DeviceReservation, marks: Sequence[Path], also: Mapping[str, str], actors: list[Any]
) -> Hosts:
    """Asks the hosts of a plan, by `actors` that it starts: what is there, and whether they see the folders `marks`, of
    which the first is the run's. `also` are files that every host reads, by what they are of."""
    import ray

    addresses = reserved.addresses
    ray.cloudpickle.register_pickle_by_value(host_facts)
    actor = ray.remote(num_cpus=0)(HostActor)
    with ExitStack() as stack:
        markers = [stack.enter_context(_marked(folder)) for folder in marks]
        files = [{**reads(plan, i), **{t: [p] for t, p in also.items()}} for i in range(plan.cluster.nodes)]

        others = interpreters.commands(plan)

        def asked(address: str, read: Mapping[str, Sequence[str]]) -> PackageQuery:
            paths = [*markers, *(p for paths in read.values() for p in paths)]
            return PackageQuery(
                packages=interpreters.packages(plan),
                others=others if address else {},  # who drives may have none of them
                files=paths,
                devices=plan.cluster.device.kind.files,
                variables=[*(s.name for s in environment_check.wanted(plan)), plan.cluster.device.kind.visible],
                address=address,
                interface=plan.cluster.interface,
            )

        until = time.monotonic() + PROBE
        actors += [actor.options(scheduling_strategy=reserved.on(i)).remote() for i in range(plan.cluster.nodes)]
        answers = [a.look.remote(asked(*of)) for a, of in zip(actors, zip(addresses, files, strict=True), strict=True)]
        everything = {t: paths for read in files for t, paths in read.items()}
        here = host_facts.look(asked("", everything))
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=until - time.monotonic())
        if silent := [address for address, a in zip(addresses, answers, strict=True) if a not in ready]:
            raise HostsSilent(_silent(plan, silent))
        seen = _answers(plan, reserved, answers)
        clocks = [_apart(a, until) for a in actors]
    spans = {**{f"model {n}": m.span for n, m in plan.deploy.models.items()}}
    spans |= {f"data {n}": d.span for n, d in plan.deploy.data.items()}
    blind = [[i for i, f in enumerate(seen) if f["sizes"][marker] < 0] for marker in markers]
    return Hosts(plan, actors, addresses, files, seen, here, clocks, blind, spans)


def _answers(plan: Plan, reserved: DeviceReservation, answers: Sequence[Any]) -> list[HostFacts]:
    import ray

    found: list[HostFacts] = []
    for address, node, answer in zip(reserved.addresses, reserved.nodes, answers, strict=True):
        try:
            found.append(ray.get(answer))
        except ray.exceptions.RayError as error:
            if missing([node]):  # it has just gone: nothing about it is to be mended
                raise HostLost(wait_report.silent([address])) from error
            said = str(error).strip().splitlines()[-1:]
            what = f"the host {address} starts no process of the run: {' '.join(said)}"
            raise NoResources(Diagnostic("host-differs", what, plan.cluster.span)) from error
    return found


def _silent(plan: Plan, addresses: Sequence[str]) -> Diagnostic:
    who = f"the host {addresses[0]} does" if len(addresses) == 1 else f"the hosts {', '.join(addresses)} do"
    return Diagnostic(
        "no-resources",
        f"{who} not answer within {PROBE:g} s",
        plan.cluster.span,
        "see `ray status`, and the logs of its raylet in /tmp/ray/session_latest/logs there",
    )


def _apart(actor: Any, until: float) -> float:
    """Seconds by which a host's clock is ahead of this one's, by no more than is certain."""
    import ray

    before = time.time()
    there: float = ray.get(actor.clock.remote(), timeout=max(1.0, until - time.monotonic()))
    after = time.time()
    return there - after if there > after else there - before if there < before else 0.0


@contextmanager
def _marked(folder: Path) -> Iterator[str]:
    """A file in a folder, by which a host can tell that it sees this very folder and not one of the same name. Nobody
    sees it in a folder that may only be read: each host is asked for what should be in it."""
    marker = folder.absolute() / f".{uuid.uuid4().hex}"
    with suppress(OSError):
        marker.touch()
    try:
        yield str(marker)
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def _release(version: str) -> tuple[str, ...]:
    """The part of a version by which things work together: not its patch, nor how it was built."""
    return tuple(version.partition("+")[0].split(".")[:2])


__all__ = ["Hosts", "probe"]
