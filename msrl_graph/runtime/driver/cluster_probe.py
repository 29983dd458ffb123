"""Check of a cluster's hosts, before a run starts any process on these hosts.

Invariant: all hosts that the plan uses are queried at the same time. Within PROBE seconds, each host has answered or is
named in an error. A problem that would end the run later is an error. A problem that would only slow down or degrade
the run is a warning. Differences between hosts are reported in one table.
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
from ...diagnostics.quantities import plural, size
from ...hardware import visibility_masks
from ...ir.plan import Plan
from ..process import host_facts, interpreters
from ..process.cluster_join import NoResources, measure_clock_offset
from ..process.host_facts import CLOCK_TOLERANCE, HostActor, HostFacts, PackageQuery
from ..process.host_requirements import files_read, row_memory
from . import environment_check, wait_report
from .device_reservation import DeviceReservation
from .dock_monitor import HostLost, unreachable_hosts

PROBE = 30.0  # seconds within which all hosts answer
PRECISE = ("msrl-graph",)  # packages for which any difference is an error, as for those of plug-ins
WRONG = " !"
SAME = "the same files belong at the same path on every host: in a folder that they share, or a copy on each"
INSTALL = "install the same versions on every host, from the same constraints"


@dataclass(frozen=True)
class HostColumn:
    """A column of the host table: one fact about each host, in the plan's host order.

    `wrong` has the indices of the hosts whose value does not fit the plan. `message` says what these wrong values mean
    for the run. `span` is the position in the program's text at which the fact is required.
    """

    title: str
    cells: Sequence[str]
    wrong: frozenset[int] = frozenset()
    code: str = "host-differs"
    severity: Severity = "error"
    message: str = ""
    help: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True)
class Hosts:
    """The hosts of a plan, in the plan's order; each has an actor and reported facts.

    `clocks` says for each host by how many seconds its clock is ahead of this machine's clock. `blind` has, for each
    folder that `probe` got as `marks`, the indices of the hosts that do not see this folder.
    """

    plan: Plan
    actors: Sequence[Any]
    addresses: Sequence[str]
    required: Sequence[Mapping[str, Sequence[str]]]  # by title, the files that each host must have
    seen: Sequence[HostFacts]
    here: HostFacts
    clocks: Sequence[float]
    blind: Sequence[list[int]]
    reads: Mapping[str, Span] = field(default_factory=dict)

    def columns(self) -> list[HostColumn]:
        """Return all columns of the host table."""
        return [*self._versions(), *self._interpreters(), *self._files(), *self._machines(), *self._variables()]

    def _versions(self) -> Iterator[HostColumn]:
        for package, ours in self.here["versions"].items():
            versions = [facts["versions"][package] for facts in self.seen]
            expected = ours or Counter(filter(None, versions)).most_common(1)[0][0] if ours or any(versions) else ""
            exact = package in (*PRECISE, *(plug_in.package for plug_in in self.plan.plugins))
            differing = {i for i, version in enumerate(versions) if version != expected or not version}
            severe = {i for i in differing if exact or _release(versions[i]) != _release(expected)}
            message = (
                f"{package} is not {expected} on every host, as on the driver's host" if ours else f"{package} differs"
            )
            yield HostColumn(
                package,
                [version or "-" for version in versions],
                frozenset(severe or differing),
                severity="error" if severe else "warning",
                message=message if all(versions) else f"{package} is not installed on every host",
                help=INSTALL,
            )

    def _interpreters(self) -> Iterator[HostColumn]:
        """Yield a column for each Python interpreter that the program names for a pool.

        Only hosts with processes that use the interpreter are checked.
        """
        plan = self.plan
        for python in self.seen[0]["others"]:
            pools = [environment.pool for environment in plan.surroundings if environment.python == python]
            needed = [any(plan.on_hosts(pool)[host] for pool in pools) for host in range(len(self.seen))]
            problems = [
                interpreters.find_mismatch(facts["others"][python], self.here["versions"]) if is_needed else ""
                for is_needed, facts in zip(needed, self.seen, strict=True)
            ]
            cells = [
                problem or ("present" if is_needed else "not used")
                for is_needed, problem in zip(needed, problems, strict=True)
            ]
            wrong = frozenset(i for i, problem in enumerate(problems) if problem)
            message = f"the interpreter {python} does not fit the run on every host"
            yield HostColumn(python, cells, wrong, message=message, help=interpreters.MEND)

    def _files(self) -> Iterator[HostColumn]:
        own = self.here["digests"]
        for title in dict.fromkeys(title for required in self.required for title in required):
            cells = []
            wrong = set()
            for i, (required, facts) in enumerate(zip(self.required, self.seen, strict=True)):
                paths = required.get(title, ())
                present = [path for path in paths if facts["sizes"][path] >= 0]
                same = [path for path in present if own[path] == facts["digests"][path]]
                cells.append(
                    "not read"
                    if not paths
                    else "present"
                    if len(same) == len(paths)
                    else "none"
                    if not present
                    else f"{len(present)} of {plural(len(paths), 'file')}"
                    if len(present) < len(paths)
                    else "other sizes"
                    if any(self.here["sizes"][path] != facts["sizes"][path] for path in present)
                    else "other contents"
                )
                wrong |= {i} if len(same) < len(paths) else set()
            message = f"{title} differs from this machine's, or is missing, on a host that reads it"
            yield HostColumn(
                title, cells, frozenset(wrong), message=message, help=SAME, span=self.reads.get(title, NOWHERE)
            )
        # A folder of a host's own is never wrong: distributed_checkpoint.py keeps each host's part there.
        yield HostColumn("out folder", ["its own" if i in self.blind[0] else "shared" for i in range(len(self.seen))])

    def _machines(self) -> Iterator[HostColumn]:
        cluster = self.plan.cluster
        kind = self.plan.cluster.device.kind
        if not kind.is_host:
            lacking = frozenset(i for i, facts in enumerate(self.seen) if facts["devices"] < cluster.devices_per_node)
            cells = [str(facts["devices"]) for facts in self.seen]
            message = (
                f"the plan needs {plural(cluster.devices_per_node, 'device')} on each host; not every host has them"
            )
            yield HostColumn(kind.resource, cells, lacking, "no-resources", message=message, span=cluster.span)
            masks = [facts["variables"].get(kind.visible) for facts in self.seen]
            mask_errors = [
                visibility_masks.describe_problem(kind, mask, facts["devices"])
                for mask, facts in zip(masks, self.seen, strict=True)
            ]
            yield HostColumn(
                kind.visible,
                ["-" if mask is None else mask for mask in masks],
                frozenset(i for i, message in enumerate(mask_errors) if message),
                "no-resources",
                message=next(filter(None, mask_errors), ""),
                help=f"unset {kind.visible} where Ray is started, or list the host's own numbers, rising from 0",
                span=cluster.span,
            )
        needs = max((entry.total for entry in self.plan.memory if entry.place == "host"), default=0)
        short = frozenset(i for i, facts in enumerate(self.seen) if facts["memory"] < needs)
        too_small = frozenset(i for i, facts in enumerate(self.seen) if facts["total"] < needs)
        yield HostColumn(
            "memory free",
            [f"{size(facts['memory'])} of {size(facts['total'])}" for facts in self.seen],
            too_small or short,
            "no-resources",
            "error" if too_small else "warning",
            f"the plan needs up to {size(needs)} of a host's memory",
            "stop other programs there, or plan for more hosts",
            cluster.span,
        )
        rows = row_memory(self.plan)
        yield HostColumn(
            "/dev/shm free",
            [size(facts["shared"]) for facts in self.seen],
            frozenset(i for i, facts in enumerate(self.seen) if facts["shared"] < rows),
            "no-resources",
            "warning",
            f"a host's rows take {size(rows)}; they are temporary files if /dev/shm has less",
            "give a container --shm-size, or mount a larger /dev/shm",
        )
        yield HostColumn(
            "clock",
            [f"{offset:+.1f} s" if abs(offset) >= 0.05 else "the same" for offset in self.clocks],
            frozenset(i for i, offset in enumerate(self.clocks) if abs(offset) > CLOCK_TOLERANCE),
            severity="warning",
            message="clocks differ, and the trace aligns the events of hosts by them",
            help="synchronize the hosts' clocks with NTP",
        )
        no_interface = frozenset(i for i, facts in enumerate(self.seen) if not facts["interface"])
        stated = cluster.interface
        yield HostColumn(
            "interface",
            [
                f"{facts['interface']} {facts['speaks']}"
                if facts["interface"]
                else f"only {', '.join(facts['interfaces'])}"
                for facts in self.seen
            ],
            no_interface if cluster.nodes > 1 or stated else frozenset(),
            severity="error" if stated else "warning",
            message=f"not every host has the interface {stated} with an address"
            if stated
            else "no interface has the host's address in Ray, so ranks use the interface of the host's name",
            help="" if stated else 'name one that every host has: `cluster … { interface = "eth0" }`',
            span=cluster.span,
        )

    def _variables(self) -> Iterator[HostColumn]:
        """Yield a column for each environment variable whose value the plan does not want."""
        for setting in environment_check.wanted_settings(self.plan):
            cells = [facts["variables"].get(setting.name, "-") for facts in self.seen]
            applies = [setting in environment_check.wanted_settings(self.plan, host) for host in range(len(self.seen))]
            differing = [
                applies_here and cell not in ("-", setting.value)
                for applies_here, cell in zip(applies, cells, strict=True)
            ]
            severe = frozenset(i for i, differs in enumerate(differing) if differs and setting.refuses(cells[i]))
            wrong = severe or frozenset(i for i, differs in enumerate(differing) if differs)
            if wrong:
                severity, code, help = environment_check.judge_value(setting, cells[min(wrong)])
                message = f"the plan wants {setting.name}={setting.value}: {setting.why}"
                yield HostColumn(setting.name, cells, wrong, code, severity, message, help)

    def judge(self, verbose: bool) -> list[str]:
        """Return warnings about the hosts; with `verbose`, also the table of the hosts.

        Raises NoResources with all errors about the hosts, if there are any errors.
        """
        columns = self.columns()
        wrong = {
            severity: [column for column in columns if column.wrong and column.severity == severity]
            for severity in ("error", "warning")
        }
        if errors := wrong["error"]:
            raise NoResources(self._diagnose(errors, "error"))
        texts = []
        if warned := wrong["warning"]:
            diagnostic = self._diagnose(warned, "warning")
            texts.append(f"warning[{diagnostic.code}]: {diagnostic.message}\n  {diagnostic.help}".rstrip())
        return [*texts, "the hosts of the run\n" + self.table(columns)] if verbose else texts

    def _diagnose(self, columns: Sequence[HostColumn], severity: Severity) -> Diagnostic:
        """Return one diagnostic with a table of `columns`, which all have wrong facts."""
        first, *others = sorted(columns, key=lambda column: not column.span.line)
        code = first.code if all(column.code == first.code for column in others) else "host-differs"
        message = "\n".join([*(column.message for column in (first, *others)), self.table(columns)])
        help = "\n".join(dict.fromkeys(column.help for column in (first, *others) if column.help))
        related = tuple(
            (column.span, column.message) for column in others if column.span.line and column.span != first.span
        )
        return Diagnostic(code, message, first.span, help, severity, related)

    def table(self, columns: Sequence[HostColumn]) -> str:
        """Format columns as a table; mark wrong cells. Hosts with equal cells share a row."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for title in ("host", *(column.title for column in columns)):
            table.add_column(title, no_wrap=True)
        names = [facts["name"] for facts in self.seen]
        alike: dict[tuple[str, ...], list[str]] = {}
        for i, address in enumerate(self.addresses):
            cells = tuple(column.cells[i] + WRONG * (i in column.wrong) for column in columns)
            label = f"{address} ({names[i]})" if names.count(names[i]) == 1 and len(names) > 1 else address
            alike.setdefault(cells, []).append(label)
        for cells, labels in alike.items():
            table.add_row(", ".join(labels[:3]) + f" and {len(labels) - 3} more" * (len(labels) > 3), *cells)
        console = Console(
            file=io.StringIO(), width=10_000, color_system=None, markup=False, highlight=False, force_jupyter=False
        )
        with console.capture() as text:
            console.print(table)
        return "\n".join(f"  {line.rstrip()}" for line in text.get().splitlines())


class HostsSilent(NoResources):
    """Error: hosts do not answer, although Ray reports these hosts as alive.

    At the first start of a run, the user must repair the hosts. After a restart, the supervisor retries the run.
    """


def probe(
    plan: Plan, reserved: DeviceReservation, marks: Sequence[Path], also: Mapping[str, str], actors: list[Any]
) -> Hosts:
    """Query a plan's hosts for facts, such as versions, files, memory and clocks.

    An actor is started on each host and added to `actors`. The function also finds out which hosts see each folder in
    `marks` (the run's folder comes first). The values of `also` are paths of more files that every host reads.
    """
    import ray

    addresses = reserved.addresses
    ray.cloudpickle.register_pickle_by_value(host_facts)
    actor_class = ray.remote(num_cpus=0)(HostActor)
    with ExitStack() as stack:
        markers = [stack.enter_context(_marker_file(folder)) for folder in marks]
        files = [
            {**files_read(plan, i), **{title: [path] for title, path in also.items()}}
            for i in range(plan.cluster.nodes)
        ]

        others = interpreters.commands(plan)

        def package_query(address: str, read: Mapping[str, Sequence[str]]) -> PackageQuery:
            paths = [*markers, *(path for paths in read.values() for path in paths)]
            return PackageQuery(
                packages=interpreters.packages(plan),
                others=others if address else {},  # the driver's host may have none of them
                files=paths,
                devices=plan.cluster.device.kind.files,
                variables=[
                    *(s.name for s in environment_check.wanted_settings(plan)),
                    plan.cluster.device.kind.visible,
                ],
                address=address,
                interface=plan.cluster.interface,
            )

        until = time.monotonic() + PROBE
        strategies = map(reserved.strategy_for, range(plan.cluster.nodes))
        actors += [actor_class.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        answers = [
            actor.look.remote(package_query(*query_arguments))
            for actor, query_arguments in zip(actors, zip(addresses, files, strict=True), strict=True)
        ]
        everything = {title: paths for read in files for title, paths in read.items()}
        here = host_facts.look(package_query("", everything))
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=until - time.monotonic())
        if silent := [address for address, answer in zip(addresses, answers, strict=True) if answer not in ready]:
            raise HostsSilent(_silent_hosts(plan, silent))
        seen = _collect_facts(plan, reserved, answers)
        clocks = []
        for address, actor in zip(addresses, actors, strict=True):
            try:
                clocks.append(measure_clock_offset(actor, max(1.0, until - time.monotonic())))
            except ray.exceptions.GetTimeoutError as error:
                raise HostsSilent(_silent_hosts(plan, [address])) from error
    models = plan.deploy.models.items()
    spans = {f"{kind} {name}": model.span for name, model in models for kind in ("model", "adapter")}
    spans |= {f"data {name}": dataset.span for name, dataset in plan.deploy.data.items()}
    blind = [[i for i, facts in enumerate(seen) if facts["sizes"][marker] < 0] for marker in markers]
    return Hosts(plan, actors, addresses, files, seen, here, clocks, blind, spans)


def _collect_facts(plan: Plan, reserved: DeviceReservation, answers: Sequence[Any]) -> list[HostFacts]:
    import ray

    facts: list[HostFacts] = []
    for address, node, answer in zip(reserved.addresses, reserved.nodes, answers, strict=True):
        try:
            facts.append(ray.get(answer))
        except ray.exceptions.RayError as error:
            if unreachable_hosts([node]):  # it was just lost, so nothing on it needs a fix
                raise HostLost(wait_report.describe_lost_hosts([address])) from error
            last_line = str(error).strip().splitlines()[-1:]
            message = f"the host {address} cannot start a process of the run: {' '.join(last_line)}"
            raise NoResources(Diagnostic("host-differs", message, plan.cluster.span)) from error
    return facts


def _silent_hosts(plan: Plan, addresses: Sequence[str]) -> Diagnostic:
    subject = f"the host {addresses[0]} does" if len(addresses) == 1 else f"the hosts {', '.join(addresses)} do"
    return Diagnostic(
        "no-resources",
        f"{subject} not answer within {PROBE:g} s",
        plan.cluster.span,
        "see `ray status`, and the logs of its raylet in /tmp/ray/session_latest/logs there",
    )


@contextmanager
def _marker_file(folder: Path) -> Iterator[str]:
    """Create a marker file in a folder; a host that finds the file sees the folder.

    A folder of the same name on another disk does not contain the marker. If a folder is read-only, no marker can be
    created; each host is then asked for the files that should be in the folder.
    """
    marker = folder.absolute() / f".{uuid.uuid4().hex}"
    with suppress(OSError):
        marker.touch()
    try:
        yield str(marker)
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)


def _release(version: str) -> tuple[str, ...]:
    """Return the first two numbers of a version, which decide compatibility."""
    return tuple(version.partition("+")[0].split(".")[:2])


__all__ = ["Hosts", "probe"]
