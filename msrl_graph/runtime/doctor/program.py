"""Rules for a program: whether hosts have everything that the plan needs.

Invariant: the plan states everything that it needs from the hosts on which it runs. If a problem would make the driver
refuse the run before the start, these rules report an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...backends import ENGINES
from ...backends.packages import make_install_hint
from ...compiler.unsupported import find_unsupported, find_untested
from ...diagnostics.quantities import plural, size
from ...files.weights import PATTERNS
from ...hardware.device_kinds import ASCEND, CUDA, DeviceKind
from ...ir.plan import Plan
from ...model import peft_folder
from ...model.models import suggest_weights
from ..process import interpreters
from ..process.host_facts import Versions
from ..process.host_requirements import RANKS_A_CORE, files_read, row_memory
from . import ascend, cuda
from .devices import listed, seen
from .findings import ExaminedHost, Finding, asking, failed
from .host import SHARED, memory
from .machine import LONG, Command, HostQuery
from .output_parsers import DeviceEntry

SAME = "every host needs the same files at the same path: in a shared folder, or a copy on each"
DIES = {ASCEND.name: ascend.dies, CUDA.name: cuda.dies}


def wants(plan: Plan) -> HostQuery:
    """Return the query for each host: the facts that the rules about a plan need."""
    probes = [
        Command(words=command, each="", where="", seconds=LONG) for command in interpreters.commands(plan).values()
    ]
    return asking(sizes=sorted({path for paths in _files_read(plan).values() for path in paths}), commands=probes)


def _files_read(plan: Plan) -> dict[str, list[str]]:
    """Return, by title, the absolute paths of the files that a plan's hosts read.

    A title is, for example, `model policy`. The paths are absolute, because processes start in another folder.
    """
    paths_by_title = {
        title: paths for host in range(plan.cluster.nodes) for title, paths in files_read(plan, host).items()
    }
    return {title: [os.path.abspath(path) for path in paths] for title, paths in paths_by_title.items()}  # noqa: PTH100 (keeps links)


def findings(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Check whether the hosts have what a plan needs; yield the findings.

    If all findings are "ok", an additional first finding says that the plan can run.
    """
    support_findings = [*_check_support(plan)]
    rules = (_check_packages, _check_interpreters, _check_devices, _check_memory, _check_files)
    all_findings = [*support_findings, *(finding for rule in rules for finding in rule(plan, hosts))]
    if all(finding.state == "ok" for finding in all_findings):
        yield Finding("program", f"{plan.deploy.name} can run here: {plural(plan.cluster.nodes, 'host')} of "
                      f"{plan.cluster.devices_per_node} {plan.cluster.device.resource}")  # fmt: skip
    yield from all_findings


def _check_support(plan: Plan) -> Iterator[Finding]:
    for diagnostic in find_unsupported(plan):
        yield Finding("program", diagnostic.message, "wrong", diagnostic.help)
    for diagnostic in find_untested(plan):
        yield Finding("program", diagnostic.message, "warning", diagnostic.help)


def _check_packages(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Yield a finding for each engine that is missing on at least one host."""
    for name in dict.fromkeys(
        package.engine.name for package in interpreters.placements_of(plan) if package.engine.name in ENGINES
    ):
        needs = ENGINES[name].packages.on(plan.cluster.device.kind)
        missing_by_host = {host.title: [package for package in needs if package not in host.packages] for host in hosts}
        if missing := list(dict.fromkeys(package for packages in missing_by_host.values() for package in packages)):
            message = f"the engine {name} of the program needs {listed(missing)}"
            install = make_install_hint(name, missing, plan.cluster.device.backend)
            yield Finding(
                "plan-engines",
                message,
                "wrong",
                install,
                tuple(host_title for host_title, packages in missing_by_host.items() if packages),
            )


def _check_interpreters(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Check the Python interpreters of pools that have an interpreter of their own."""
    for python, command in interpreters.commands(plan).items():
        for host in hosts:
            output = host.said(command)
            failure = failed(output, python, LONG)
            versions = Versions(found={} if failure else json.loads(output["text"]), wrong=failure)
            host_versions = {**host.packages, "Python": host.seen["python"]}
            if difference := interpreters.find_mismatch(
                versions, {package: host_versions.get(package, "") for package in interpreters.SAME}
            ):
                message = f"the interpreter {python} {difference}"
                yield Finding("plan-engines", message, "wrong", interpreters.MEND, (host.title,))


def _check_devices(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    cluster = plan.cluster
    kind = cluster.device.kind
    per_host = cluster.devices_per_node
    device_counts = [_count_usable(host, kind) for host in hosts]
    able_hosts = sum(count >= per_host for count in device_counts)
    if able_hosts >= cluster.nodes:
        return
    request = f"the plan asks for {plural(cluster.nodes, 'host')} of {per_host} {kind.resource}"
    most = f"{max(device_counts, default=0):g}"
    available = (
        f"this machine has {most}"
        if len(hosts) == 1
        else f"{able_hosts} of {len(hosts)} have that, and the most is {most}"
    )
    message = f"{request}; {available}"
    fix = "lower `nodes` or `devices_per_node`, or set RAY_ADDRESS to a cluster that has them"
    yield Finding("plan-devices", message, "wrong", fix)


def _count_usable(host: ExaminedHost, kind: DeviceKind) -> float:
    """Return how many devices of the kind `kind` a run can use on a host."""
    if host.resources is not None:
        return host.resources.get(kind.resource, 0)
    if kind.is_host:
        return host.seen["cores"] * RANKS_A_CORE
    return seen(host, kind)


def _check_memory(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Compare the memory of hosts and devices with the plan's peak use of memory."""
    of_device = max((phase.total for phase in plan.memory if phase.place == "device"), default=0)
    of_host = max((phase.total for phase in plan.memory if phase.place == "host"), default=0)
    kind = plan.cluster.device.kind
    for host in hosts:
        free, total = memory(host)
        if total and total < of_host:
            message = f"the plan needs up to {size(of_host)} of a host's memory, but the host has {size(total)}"
            yield Finding("plan-memory", message, "wrong", "plan for more hosts, or for a smaller model", (host.title,))
        elif total and free < of_host:
            message = f"the plan needs up to {size(of_host)} of a host's memory, but {size(free)} are free"
            yield Finding(
                "plan-memory",
                message,
                "warning",
                "see which processes use it: ps aux --sort=-rss | head",
                (host.title,),
            )
        dies: list[DeviceEntry] = DIES[kind.name](host) if kind.name in DIES else []
        small = [die for die in dies if die.total < of_device]
        full = [die for die in dies if die.free < of_device <= die.total]
        plan_again = "name the device of this host in the program's cluster, and plan again"
        for affected, state, fix in (
            (small, "installed", plan_again),
            (full, "free", "see device-memory above for the processes that use the rest"),
        ):
            if affected:
                least = min(die.total if affected is small else die.free for die in affected)
                labels = listed([die.label for die in affected])
                message = f"the plan needs up to {size(of_device)} of a device: {size(least)} are {state} on {labels}"
                yield Finding("plan-memory", message, "wrong", fix, (host.title,))
        if (shared := host.seen["rooms"].get(SHARED, (0, 0))[0]) < row_memory(plan):
            message = f"a host's rows take {size(row_memory(plan))}, but {SHARED} has {size(shared)} free"
            yield Finding("plan-memory", message, "warning", "sudo mount -o remount,size=16G /dev/shm", (host.title,))


def _check_files(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Check that the hosts have the model files and data files that a plan reads.

    When a plan runs, its first host reads the data. Before the run, it is not known which host will be the first host.
    So every host is checked for all files.
    """
    models = plan.deploy.models
    for model in models.values():
        if not model.path:
            message = f"{model.name} is a preset: its shape is known, but its weights are missing"
            yield Finding("plan-files", message, "wrong", suggest_weights(model))
    for title, paths in _files_read(plan).items():
        kind, _, name = title.partition(" ")
        if kind == "model" and not models[name].path:
            continue
        if kind in ("model", "adapter") and len(paths) == 1:
            patterns = PATTERNS if kind == "model" else peft_folder.WEIGHTS
            message = f"{title}: {Path(paths[0]).parent} holds no weights ({' or '.join(patterns)})"
            yield Finding("plan-files", message, "wrong", "put the weights there, in the format of Hugging Face")
        affected_hosts = tuple(
            host.title for host in hosts if any(host.seen["sizes"].get(file, -1) < 0 for file in paths)
        )
        if affected_hosts:
            absent = [file for file in paths if any(host.seen["sizes"].get(file, -1) < 0 for host in hosts)]
            message = f"{title} is missing: {listed(absent)}"
            fix = SAME if len(hosts) > 1 else "put it there"
            # Only the first host of a run reads data.
            is_minor = kind == "data" and len(affected_hosts) < len(hosts)
            yield Finding("plan-files", message, "warning" if is_minor else "wrong", fix, affected_hosts)
