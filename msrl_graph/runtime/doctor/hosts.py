"""The hosts to examine: this machine, or all hosts of the cluster in RAY_ADDRESS.

Invariant: after at most WITHIN seconds, each host has either answered or is named by a finding as a host that does not
answer. Ray is loaded in a separate process, which is killed after WITHIN seconds. A host needs only the packages that
come with Ray. msrl_graph itself need not be installed on a host.
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
from ..process.cluster_join import check_cluster, job_config, live_nodes, measure_clock_offset
from . import machine
from .findings import ExaminedHost, Finding
from .machine import HostQuery, Machine, MachineProber, look

# Time limits in seconds: for Ray's list of all hosts, for the hosts' answers, and for a clock.
WITHIN = 55.0
ANSWER = 45.0
CLOCK = 2.0
STATUS = "see `ray status`, and the logs of its raylet in /tmp/ray/session_latest/logs on that host"


def here(query: HostQuery) -> list[ExaminedHost]:
    """Examine this machine; the result has one entry."""
    return [ExaminedHost(look(Machine(), query))]


def joined(address: str, query: HostQuery) -> tuple[list[ExaminedHost], list[Finding]]:
    """Examine the hosts of the Ray cluster at `address`.

    Returns the hosts that answered, and findings. A finding reports that the cluster, or some of its hosts, did not
    answer.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(json.dumps({"address": address, "asked": query}), timeout=WITHIN)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return [], [Finding("ray", f"the Ray cluster at {address} does not report its hosts in time", "wrong", STATUS)]
    if process.returncode != 0 or not out.strip():
        last_line = (err.strip().splitlines() or ["nothing"])[-1]
        step = f"see what is wrong with it: {sys.executable} -c 'import ray; ray.init()'"
        return [], [Finding("ray", f"Ray cannot join the cluster at {address}: {last_line}", "wrong", step)]
    reply = json.loads(out.strip().splitlines()[-1])
    if "refused" in reply:
        return [], [Finding("ray", reply["refused"], "wrong", reply["help"])]
    answered = reply["hosts"]
    silent = reply["silent"]
    findings = [Finding("ray", "does not answer in time", "wrong", STATUS, (name,)) for name in silent]
    hosts = [
        ExaminedHost(
            entry["seen"], entry["address"], entry["resources"], entry["apart"], len(answered) + len(silent) - 1
        )
        for entry in answered
    ]
    return hosts, findings


def _query_cluster(address: str, query: HostQuery) -> dict[str, Any]:
    """Query the hosts of a cluster, in a process that loads Ray.

    The result has the key `hosts` with the answers, and the key `silent` with the addresses of hosts that did not
    answer. If the cluster cannot be joined, the result has the keys `refused` and `help` with texts for the user.
    """
    deadline = time.monotonic() + ANSWER
    try:
        check_cluster(address)
    except Fault as fault:
        return {"refused": fault.diagnostics[0].message, "help": fault.diagnostics[0].help}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(address=address, job_config=job_config(), log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError) as error:
        message = " ".join(str(error).split())
        return {"refused": f"no Ray cluster could be joined at {address}: {message}", "help": STATUS}
    for module in (machine, host_facts):
        ray.cloudpickle.register_pickle_by_value(module)
    nodes = sorted(live_nodes(), key=lambda node: str(node["NodeManagerAddress"]))
    actor = ray.remote(num_cpus=0)(MachineProber)
    probers = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    answers = [prober.look.remote(query) for prober in probers]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=max(1.0, deadline - time.monotonic()))
    hosts = []
    silent = []
    for node, prober, answer in zip(nodes, probers, answers, strict=True):
        address = node["NodeManagerAddress"]
        clock_difference = 0.0
        try:
            readings = ray.get(answer) if answer in ready else None
            if readings:
                with suppress(ray.exceptions.GetTimeoutError):  # a host that is only busy has answered everything else
                    clock_difference = measure_clock_offset(prober, CLOCK)
        except ray.exceptions.RayError:
            readings = None
        if readings is None:
            silent.append(address)
        else:
            hosts.append(
                {"address": address, "seen": readings, "resources": node["Resources"], "apart": clock_difference}
            )
    return {"hosts": hosts, "silent": silent}


if __name__ == "__main__":
    question = json.load(sys.stdin)
    print("\n" + json.dumps(_query_cluster(question["address"], question["asked"])))
