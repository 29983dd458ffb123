"""The hosts that are looked at: this machine, or all of the Ray cluster that RAY_ADDRESS names.

Invariant: within WITHIN seconds each host has answered or is named. Ray is loaded in a process of its own, which is
killed where it lasts longer; a host needs neither this package nor any other but what Ray brings.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from ...diagnostics import Fault
from ..process import host_facts
from ..process.cluster_join import greet, job_config, living
from . import machine
from .findings import ExaminedHost, Finding
from .machine import HostQuery, Machine, MachineProber, look

# Seconds in which Ray has told of all hosts, in which hosts have answered, and that a clock is waited for.
WITHIN = 55.0
ANSWER = 45.0
CLOCK = 2.0
STATUS = "see `ray status`, and the logs of its raylet in /tmp/ray/session_latest/logs there"


def here(asked: HostQuery) -> list[ExaminedHost]:
    """This machine."""
    return [ExaminedHost(look(Machine(), asked))]


def joined(address: str, asked: HostQuery) -> tuple[list[ExaminedHost], list[Finding]]:
    """The hosts of a cluster, and what is wrong with those that are not among them."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(json.dumps({"address": address, "asked": asked}), timeout=WITHIN)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return [], [Finding("ray", f"the Ray cluster at {address} does not tell of its hosts in time", "wrong", STATUS)]
    if process.returncode != 0 or not out.strip():
        said = (err.strip().splitlines() or ["nothing"])[-1]
        step = f"see what is wrong with it: {sys.executable} -c 'import ray; ray.init()'"
        return [], [Finding("ray", f"Ray does not join the cluster at {address}: {said}", "wrong", step)]
    told = json.loads(out.strip().splitlines()[-1])
    if "refused" in told:
        return [], [Finding("ray", told["refused"], "wrong", told["help"])]
    found = told["hosts"]
    silent = told["silent"]
    findings = [Finding("ray", "does not answer in time", "wrong", STATUS, (name,)) for name in silent]
    hosts = [
        ExaminedHost(h["seen"], h["address"], h["resources"], h["apart"], len(found) + len(silent) - 1) for h in found
    ]
    return hosts, findings


def _told(address: str, asked: HostQuery) -> dict[str, Any]:
    """What this process, which Ray is loaded into, tells of a cluster."""
    until = time.monotonic() + ANSWER
    try:
        greet(address)
    except Fault as fault:
        return {"refused": fault.diagnostics[0].message, "help": fault.diagnostics[0].help}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(address=address, job_config=job_config(), log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError) as error:
        said = " ".join(str(error).split())
        return {"refused": f"no Ray cluster could be joined at {address}: {said}", "help": STATUS}
    for module in (machine, host_facts):
        ray.cloudpickle.register_pickle_by_value(module)
    nodes = sorted(living(), key=lambda node: str(node["NodeManagerAddress"]))
    actor = ray.remote(num_cpus=0)(MachineProber)
    probers = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote()
        for n in nodes
    ]
    answers = [prober.look.remote(asked) for prober in probers]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=max(1.0, until - time.monotonic()))
    hosts = []
    silent = []
    for node, prober, answer in zip(nodes, probers, answers, strict=True):
        address = node["NodeManagerAddress"]
        try:
            seen = ray.get(answer) if answer in ready else None
            apart = _apart(prober) if seen else 0.0
        except ray.exceptions.RayError:
            seen = None
        if seen is None:
            silent.append(address)
        else:
            hosts.append({"address": address, "seen": seen, "resources": node["Resources"], "apart": apart})
    return {"hosts": hosts, "silent": silent}


def _apart(prober: Any) -> float:
    """Seconds by which a host's clock is ahead of this one's, by no more than is certain."""
    import ray

    before = time.time()
    there: float = ray.get(prober.clock.remote(), timeout=CLOCK)
    after = time.time()
    return there - after if there > after else there - before if there < before else 0.0


if __name__ == "__main__":
    question = json.load(sys.stdin)
    print("\n" + json.dumps(_told(question["address"], question["asked"])))
