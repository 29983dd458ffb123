"""Hosts on this machine: network namespaces with addresses of their own on one bridge, and a Ray node in each.

A host has namespaces of mounts and processes too: Ray's temporary folder is its own, the machine's name has the address
127.0.0.1 as on a fresh Debian, folders can be hidden, and no process of another host is seen. Names bear this process's
id, so that several tests may have hosts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from warm_preload import HostServer

RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
PRELOADED = "from msrl_graph.runtime.process.preload import PreloadAddress; PreloadAddress({!r}).use(); "
TOKEN = "a-token-of-a-test-that-nobody-else-has"


def possible():
    """Whether this machine lets its user make hosts."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare", "mount"))
    return tools and not subprocess.run(["unshare", "-nm", "true"], check=False, capture_output=True).returncode


def _counted(space, link):
    told = ["tc", "-s", "-j", "qdisc", "show", "dev", link, "root"]
    done = subprocess.run(["ip", "netns", "exec", space, *told], check=True, capture_output=True)
    return json.loads(done.stdout)[0]["bytes"]


def inner(pid):
    """The process that the one which enters or makes a host has started there."""
    until = time.monotonic() + 20
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return int(children[0])


class Hosts:
    """One or more hosts with a Ray cluster that asks for a token; `hidden` are folders that all but host 0 see empty.
    With a `rate`, as tc has it (100mbit; 12.5mbps are megabytes), their links take so much each way. `twice`: a second
    link to each, eth1, in a network of its own. Each has one CPU, or as many as `cpus` says, and the head Ray's
    `dashboard` at this port (0: none). Those that are `bare` have no Ray, and a
    default route. On hosts that are `preloaded`, workers of Ray's node are forked by a preload server, which saves
    seconds of CPU time for each; else the node starts them as on the hosts of users."""

    def __init__(self, count, hidden=(), rate="", twice=False, cpus=(), dashboard=0, bare=False, preloaded=False):
        self.rate = rate
        self.twice = twice
        self.cpus = cpus
        self.dashboard = dashboard
        self.name = f"m{os.getpid() % 100000}"
        self.network = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.folder = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))
        self.preloaded = preloaded
        self.nodes = {}
        self.servers = {}
        self.spaces = [f"{self.name}s", *(f"{self.name}h{i}" for i in range(count))]
        try:
            self._connect(count)
            if bare:
                self._route(count)
            for i in range(0 if bare else count):
                self._start(i, hidden if i else ())
        except BaseException:
            self.close()
            raise

    @property
    def address(self):
        return f"{self.ip(0)}:6379"

    def ip(self, host):
        return f"{self.network}.{host + 10}"

    def on(self, host, folder="/"):
        """The start of a command in a folder of a host, which sees what Ray's node there sees."""
        spaces = ["--mount", "--net", "--pid", f"--wdns={folder}"]
        return ["nsenter", f"--target={inner(self.nodes[host].pid)}", *spaces]

    def inside(self, host):
        """The start of a command that sees the network as a host does."""
        return ["ip", "netns", "exec", f"{self.name}h{host}"]

    def listening(self, host):
        """Of each listening TCP socket of a host the address, the port, and the names of the processes that have it."""
        done = subprocess.run([*self.inside(host), "ss", "-ltnpH"], check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            address, _, port = line.split()[3].rpartition(":")
            yield address.removeprefix("[::ffff:").rstrip("]"), int(port), line.partition("users:")[2]

    def left(self, within=10.0):
        """What runs have left among the hosts' temporary files, some seconds after their end."""
        until = time.monotonic() + within
        while (found := [*self.folder.glob("*/msrl-run-*")]) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def seen(self, host, path):
        """A path as a host sees it."""
        return Path(f"/proc/{inner(self.nodes[host].pid)}/root{path}")

    def stop(self, host):
        """Ends a host's Ray node, and waits until it is gone."""
        node = self.nodes.pop(host)
        if host in self.servers:
            self.servers.pop(host).close()
        for pid in self._pids(f"{self.name}h{host}"):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        node.wait()

    def runs(self, host, name):
        """Whether a process of Ray's with this in its name runs there."""
        lines = [Path(f"/proc/{pid}/cmdline") for pid in self._pids(f"{self.name}h{host}")]
        return any(name.encode() in p.read_bytes() for p in lines if p.exists())

    def cut(self, host):
        """Takes a host's link away."""
        subprocess.run(["ip", "-n", f"{self.name}h{host}", "link", "set", "eth0", "down"], check=True)

    def close(self):
        for space in self.spaces:
            until = time.monotonic() + 20
            while (pids := self._pids(space)) and time.monotonic() < until:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, 9)
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        for server in self.servers.values():
            server.close()
        for node in self.nodes.values():
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pids(self, space):
        done = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def _connect(self, count):
        name = self.name

        def ip(*words):
            subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)

        for space in self.spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", f"{name}s", "link", "add", "bridge0", "type", "bridge")
        ip("-n", f"{name}s", "link", "set", "bridge0", "up")
        for i in range(count):
            host = f"{name}h{i}"
            here = f"{name}v{i}"
            there = f"{name}w{i}"
            ip("link", "add", here, "netns", host, "type", "veth", "peer", "name", there, "netns", f"{name}s")
            ip("-n", host, "link", "set", here, "name", "eth0")
            ip("-n", host, "addr", "add", f"{self.ip(i)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", f"{name}s", "link", "set", there, "master", "bridge0", "up")
            if self.twice:
                ip("link", "add", f"{here}b", "netns", host, "type", "veth", "peer", "name", f"{there}b",
                   "netns", f"{name}s")  # fmt: skip
                ip("-n", host, "link", "set", f"{here}b", "name", "eth1")
                ip("-n", host, "addr", "add", f"192.168.77.{i + 10}/24", "dev", "eth1")
                ip("-n", host, "link", "set", "eth1", "up")
                ip("-n", f"{name}s", "link", "set", f"{there}b", "master", "bridge0", "up")
            if self.rate:
                for space, link in ((host, "eth0"), (f"{name}s", there)):
                    ip("-n", space, "link", "set", link, "mtu", 9000)
                    tc = ["tc", "qdisc", "replace", "dev", link, "root", "tbf", "rate", self.rate]
                    subprocess.run(
                        ["ip", "netns", "exec", space, *tc, "burst", "128kb", "latency", "300ms"],
                        check=True,
                        capture_output=True,
                    )

    def _route(self, count):
        """Gives each host a way out, by which programs find their own address."""
        for i in range(count):
            route = ["route", "add", "default", "via", self.ip((i + 1) % count)]
            subprocess.run(["ip", "-n", f"{self.name}h{i}", *route], check=True, capture_output=True)

    def links(self):
        """By host the bytes that its link has taken from it, and brought to it, so far, as tc counts them; links need a
        `rate` for that."""
        name = self.name
        ends = [((f"{name}h{i}", "eth0"), (f"{name}s", f"{name}w{i}")) for i in range(len(self.spaces) - 1)]
        return [tuple(_counted(*end) for end in link) for link in ends]

    def wire(self, link="eth0"):
        """By host the bytes that it has sent so far over a link."""
        count = len(self.spaces) - 1
        read = ["cat", f"/sys/class/net/{link}/statistics/tx_bytes"]
        inside = [["ip", "netns", "exec", f"{self.name}h{i}"] for i in range(count)]
        return [int(subprocess.run([*on, *read], check=True, capture_output=True).stdout) for on in inside]

    def _start(self, host, hidden):
        names = self.folder / "hosts"
        names.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        own = self.folder / str(host)
        own.mkdir(exist_ok=True)
        mounts = [f"mount --bind {names} /etc/hosts"]
        if host:  # Ray's head names the folder for all, which is another one on each machine
            mounts.append(f"mount --bind {own} {self.folder / '0'}")
        mounts += [*(f"mount -t tmpfs none {path}" for path in hidden)]
        where = ["--head", "--port=6379", *self._board()] if host == 0 else [f"--address={self.address}"]
        options = [
            f"--node-ip-address={self.ip(host)}",
            f"--num-cpus={self.cpus[host] if self.cpus else 1}",
            "--object-store-memory=200000000",
            "--block",
        ]
        head = [f"--temp-dir={own}"] if host == 0 else []
        command = " && ".join([*mounts, 'exec "$@"'])
        environment = {
            **os.environ,
            **self.environment,
            "RAY_TMPDIR": str(own),
            "TMPDIR": str(own),
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        server = HostServer(own) if self.preloaded else None
        ray = [*RAY[:2], PRELOADED.format(server.socket) + RAY[2]] if server else RAY
        with (self.folder / f"{host}.log").open("wb") as log:
            spaces = ["ip", "netns", "exec", f"{self.name}h{host}", "unshare", "-mpf", "--mount-proc"]
            self.nodes[host] = subprocess.Popen(
                [*spaces, "sh", "-c", command, "sh", *ray, "start", *where, *options, *head],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        if server:
            server.start(inner(self.nodes[host].pid), environment)
            self.servers[host] = server
        until = time.monotonic() + 60
        while "Ray runtime started" not in (said := (self.folder / f"{host}.log").read_text()):
            assert self.nodes[host].poll() is None and time.monotonic() < until, said
            time.sleep(0.1)

    def _board(self):
        if not self.dashboard:
            return ["--include-dashboard=false"]
        return ["--include-dashboard=true", f"--dashboard-host={self.ip(0)}", f"--dashboard-port={self.dashboard}"]

    @property
    def environment(self):
        """What a process needs to join."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
