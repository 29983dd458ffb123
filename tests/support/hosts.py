"""Hosts on this machine: network namespaces with addresses of their own on one bridge, and a Ray node in each.

A host has a mount namespace too, in which Ray's temporary folder is its own, the machine's name has the address
127.0.0.1 as on a fresh Debian, and folders can be hidden. Names bear this process's id, so that several tests may have
hosts.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
TOKEN = "a-token-of-a-test-that-nobody-else-has"


def possible():
    """Whether this machine lets its user make hosts."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare", "mount"))
    return tools and not subprocess.run(["unshare", "-nm", "true"], check=False, capture_output=True).returncode


class Hosts:
    """Two or more hosts with a Ray cluster that asks for a token; `hidden` are folders that host 1 sees empty."""

    def __init__(self, count, hidden=()):
        self.name = f"m{os.getpid() % 100000}"
        self.network = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
        self.folder = Path(tempfile.mkdtemp(prefix="h", dir="/tmp"))
        self.nodes = {}
        self.spaces = [f"{self.name}s", *(f"{self.name}h{i}" for i in range(count))]
        try:
            self._connect(count)
            for i in range(count):
                self._start(i, hidden if i else ())
        except BaseException:
            self.close()
            raise

    @property
    def address(self):
        return f"{self.ip(0)}:6379"

    def ip(self, host):
        return f"{self.network}.{host + 10}"

    def on(self, host):
        """The start of a command on a host."""
        return ["ip", "netns", "exec", f"{self.name}h{host}"]

    def stop(self, host):
        """Ends a host's Ray node, and waits until it is gone."""
        node = self.nodes.pop(host)
        for pid in self._pids(f"{self.name}h{host}"):
            os.kill(pid, 9)
        node.wait()

    def close(self):
        for space in self.spaces:
            until = time.monotonic() + 20
            while (pids := self._pids(space)) and time.monotonic() < until:
                for pid in pids:
                    try:
                        os.kill(pid, 9)
                    except ProcessLookupError:
                        continue
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
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
            host, here, there = f"{name}h{i}", f"{name}v{i}", f"{name}w{i}"
            ip("link", "add", here, "netns", host, "type", "veth", "peer", "name", there, "netns", f"{name}s")
            ip("-n", host, "link", "set", here, "name", "eth0")
            ip("-n", host, "addr", "add", f"{self.ip(i)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", f"{name}s", "link", "set", there, "master", "bridge0", "up")

    def _start(self, host, hidden):
        names = self.folder / "hosts"
        names.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        own = self.folder / str(host)
        own.mkdir()
        mounts = [f"mount --bind {names} /etc/hosts", *(f"mount -t tmpfs none {path}" for path in hidden)]
        where = ["--head", "--port=6379", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
        options = [f"--node-ip-address={self.ip(host)}", "--num-cpus=1", "--object-store-memory=200000000", "--block"]
        head = [f"--temp-dir={own}"] if host == 0 else []
        command = " && ".join([*mounts, 'exec "$@"'])
        environment = {**os.environ, **self.environment, "RAY_TMPDIR": str(own), "RAY_USAGE_STATS_ENABLED": "0"}
        with (self.folder / f"{host}.log").open("wb") as log:
            self.nodes[host] = subprocess.Popen(
                [*self.on(host), "unshare", "-m", "sh", "-c", command, "sh", *RAY, "start", *where, *options, *head],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + 60
        while "Ray runtime started" not in (said := (self.folder / f"{host}.log").read_text()):
            assert self.nodes[host].poll() is None and time.monotonic() < until, said
            time.sleep(0.1)

    @property
    def environment(self):
        """What a process needs to join."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
