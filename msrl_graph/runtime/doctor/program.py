"""Rules of a program: whether hosts have what its plan takes.

Invariant: what a plan takes of its hosts is asked of the plan; what the driver would refuse before a run is an error
here too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from ...backends import ENGINES
from ...backends.packages import installing
from ...compiler.unsupported import unready, untried
from ...emit.humanize import many, size
from ...files.paths import hub_name
from ...hardware.device_kinds import ASCEND, CUDA, DeviceKind
from ...ir.plan import Plan
from ...model import presets
from ..process import interpreters
from ..process.host_facts import Versions
from ..process.host_requirements import RANKS_A_CORE, reads, room
from . import ascend, cuda
from .devices import listed, seen
from .findings import ExaminedHost, Finding, asking, failed
from .host import SHARED, memory
from .machine import LONG, Command, HostQuery
from .output_parsers import DeviceEntry

SAME = "the same files belong at the same path on every host: in a folder that they share, or a copy on each"
DIES = {ASCEND.name: ascend.dies, CUDA.name: cuda.dies}


def wants(plan: Plan) -> HostQuery:
    """What has to be read of hosts for a plan."""
    tell = [Command(words=c, each="", where="", seconds=LONG) for c in interpreters.commands(plan).values()]
    return asking(sizes=sorted({path for paths in _read(plan).values() for path in paths}), commands=tell)


def _read(plan: Plan) -> dict[str, list[str]]:
    """By title what the hosts of a plan read, by whole paths: their processes begin in another folder."""
    found = {title: paths for host in range(plan.cluster.nodes) for title, paths in reads(plan, host).items()}
    return {title: [os.path.abspath(path) for path in paths] for title, paths in found.items()}  # noqa: PTH100 (keeps links)


def findings(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """What lacks of a plan on these hosts."""
    before = [*_runs(plan)]
    rules = (_packages, _interpreters, _devices, _memory, _files)
    found = [*before, *(f for rule in rules for f in rule(plan, hosts))]
    if all(f.state == "ok" for f in found):
        yield Finding("program", f"{plan.deploy.name} can run here: {many(plan.cluster.nodes, 'host')} of "
                      f"{plan.cluster.devices_per_node} {plan.cluster.device.resource}")  # fmt: skip
    yield from found


def _runs(plan: Plan) -> Iterator[Finding]:
    for told in unready(plan):
        yield Finding("program", told.message, "wrong", told.help)
    for told in untried(plan):
        yield Finding("program", told.message, "warning", told.help)


def _packages(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Engines that are not installed on every host."""
    for name in dict.fromkeys(p.engine.name for p in interpreters.placed(plan) if p.engine.name in ENGINES):
        needs = plan.cluster.device.kind.packages(ENGINES[name].needs)
        lacks = {h.title: [p for p in needs if p not in h.packages] for h in hosts}
        if missing := list(dict.fromkeys(p for packages in lacks.values() for p in packages)):
            told = f"the engine {name} of the program needs {listed(missing)}"
            install = installing(name, missing, plan.cluster.device.backend)
            yield Finding("plan-engines", told, "wrong", install, tuple(t for t, packages in lacks.items() if packages))


def _interpreters(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Those of pools that have their own."""
    for python, command in interpreters.commands(plan).items():
        for host in hosts:
            said = host.said(command)
            wrong = failed(said, python, LONG)
            found = Versions(found={} if wrong else json.loads(said["text"]), wrong=wrong)
            here = {**host.packages, "Python": host.seen["python"]}
            if lacks := interpreters.lacking(found, {p: here.get(p, "") for p in interpreters.SAME}):
                told = f"the interpreter {python} {lacks}"
                yield Finding("plan-engines", told, "wrong", interpreters.MEND, (host.title,))


def _devices(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    cluster = plan.cluster
    kind = cluster.device.kind
    each = cluster.devices_per_node
    having = [_having(host, kind) for host in hosts]
    able = sum(count >= each for count in having)
    if able >= cluster.nodes:
        return
    asked = f"the plan asks for {many(cluster.nodes, 'host')} of {each} {kind.resource}"
    most = f"{max(having, default=0):g}"
    there = (
        f"this machine has {most}" if len(hosts) == 1 else f"{able} of {len(hosts)} are such, and the most is {most}"
    )
    told = f"{asked}; {there}"
    mend = "lower `nodes` or `devices_per_node`, or set RAY_ADDRESS to a cluster that has them"
    yield Finding("plan-devices", told, "wrong", mend)


def _having(host: ExaminedHost, kind: DeviceKind) -> float:
    """How many devices a run may have of a host."""
    if host.resources is not None:
        return host.resources.get(kind.resource, 0)
    if kind.is_host:
        return host.seen["cores"] * RANKS_A_CORE
    return seen(host, kind)


def _memory(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Memory of hosts and devices against what phases of the plan hold at once."""
    of_device = max((m.total for m in plan.memory if m.place == "device"), default=0)
    of_host = max((m.total for m in plan.memory if m.place == "host"), default=0)
    kind = plan.cluster.device.kind
    for host in hosts:
        free, total = memory(host)
        if total and total < of_host:
            told = f"the plan needs up to {size(of_host)} of a host's memory, which has {size(total)}"
            yield Finding("plan-memory", told, "wrong", "plan for more hosts, or for a smaller model", (host.title,))
        elif total and free < of_host:
            told = f"the plan needs up to {size(of_host)} of a host's memory, of which {size(free)} are free"
            yield Finding("plan-memory", told, "warning", "see who has it: ps aux --sort=-rss | head", (host.title,))
        dies: list[DeviceEntry] = DIES[kind.name](host) if kind.name in DIES else []
        small = [die for die in dies if die.total < of_device]
        full = [die for die in dies if die.free < of_device <= die.total]
        anew = "name the device that is here in the program's cluster, and let it be planned anew"
        for ill, which, mend in (
            (small, "there", anew),
            (full, "free", "see device-memory above: who has the rest"),
        ):
            if ill:
                least = min(die.total if ill is small else die.free for die in ill)
                who = listed([die.label for die in ill])
                told = f"the plan needs up to {size(of_device)} of a device: {size(least)} are {which} on {who}"
                yield Finding("plan-memory", told, "wrong", mend, (host.title,))
        if (shared := host.seen["rooms"].get(SHARED, (0, 0))[0]) < room(plan):
            told = f"a host's rows have {size(room(plan))}, and {SHARED} has {size(shared)} free"
            yield Finding("plan-memory", told, "warning", "sudo mount -o remount,size=16G /dev/shm", (host.title,))


def _files(plan: Plan, hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Models and data. Which host is the plan's first is known once it runs: each is asked for all."""
    models = plan.deploy.models
    for model in models.values():
        if not model.path:
            hub = hub_name(model.name)
            help = presets.download(hub) if hub else 'name a folder: model policy = "./my-model"'
            told = f"{model.name} is a preset: its shape is known, its weights are not there"
            yield Finding("plan-files", told, "wrong", help)
    for title, paths in _read(plan).items():
        what, _, name = title.partition(" ")
        if what == "model" and not models[name].path:
            continue
        if what == "model" and len(paths) == 1:
            told = f"{title}: {models[name].path} holds no *.safetensors"
            yield Finding("plan-files", told, "wrong", "put the weights there, as Hugging Face has them")
        lacking = tuple(h.title for h in hosts if any(h.seen["sizes"].get(p, -1) < 0 for p in paths))
        if lacking:
            absent = [p for p in paths if any(h.seen["sizes"].get(p, -1) < 0 for h in hosts)]
            told = f"{title} is not there: {listed(absent)}"
            mend = SAME if len(hosts) > 1 else "put it there"
            # Only the first host of a run reads data.
            slight = what == "data" and len(lacking) < len(hosts)
            yield Finding("plan-files", told, "warning" if slight else "wrong", mend, lacking)
