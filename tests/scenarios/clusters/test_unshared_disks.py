"""Checkpoints of hosts that share no disk: each has its part, whoever dies while they are written; what a host lacks
comes from one that has it, and what none has is told."""

import json
import os
import subprocess
import sys

import pytest
from hosts import Hosts, possible
from place import EXAMPLE, SMALL, metrics, weights
from two_hosts import TWO

from msrl_graph.runtime.process import fault_points
from msrl_graph.runtime.weights.checkpoint import verify

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not possible(), reason="no hosts can be made here: needs root and iproute2"),
]


def test_hosts_without_a_shared_disk_save_their_parts_and_go_on_from_them(place):
    shared = place.folder / "bucket" / "run"
    own = place.folder / "own"
    named = place.folder / "named"
    own.mkdir()
    named.mkdir()
    # Each host has its own copy of a model at a URL.
    place.write(*TWO, ('"./model"', f'"file://{EXAMPLE}/model"'), evaluated=False)
    made = Hosts(2, hidden=[own], preloaded=True)

    def run(count, *arguments, **environment):
        main = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
        command = [
            *made.on(0, place.folder),
            sys.executable,
            "-c",
            main,
            "p.rlg",
            *SMALL,
            "--iterations",
            str(count),
            *arguments,
        ]
        variables = {**os.environ, **made.environment, "TMPDIR": str(place.temporary), "RAY_ADDRESS": made.address}
        done = subprocess.run(
            command, cwd=place.folder, env=variables | environment, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stderr

    try:
        # At a URL all lies together, whichever host wrote it; nothing stays of the working copies.
        code, err = run(3, "--out", f"file://{shared}", XDG_CACHE_HOME=str(own))
        assert code == 0, err
        manifest = verify(shared / "checkpoints" / "000003")
        assert len(manifest.hosts) == 2 and all(
            (shared / "checkpoints" / "000003" / f.name).is_file() for f in manifest.files
        )
        for host in (0, 1):
            assert not list(made.seen(host, own).glob("msrl_graph/runs/*"))

        # Killed when parts have their names, and there is no manifest of them yet.
        out = own / "out"
        there = made.seen(1, own / "out")
        fault_points.fault_file(named, "driver", "placed checkpoint 2").touch()
        code, err = run(2, "--out", str(out), MSRL_POINTS=str(named))
        assert code == 0 and "restarting from the checkpoint after 1 iteration" in err, err
        newest = out / "checkpoints" / "000002"
        manifest = json.loads((newest / "manifest.json").read_text())
        assert manifest["format_version"] == 3
        files = {host["address"]: set(host["files"]) for host in manifest["hosts"]}
        parts = {host: {p.name for p in made.seen(host, newest).glob("*.safetensors")} for host in (0, 1)}
        assert files == {made.ip(host): parts[host] for host in (0, 1)} and all(parts.values())
        assert (there / "checkpoints" / "000002" / "manifest.json").read_bytes() == (
            newest / "manifest.json"
        ).read_bytes()
        assert not list((there / "checkpoints").glob("*.partial")) + list((there / "checkpoints").glob("000000"))

        # A part that lies on another host than the one that wants it.
        (name,) = parts[1]
        part = there / "checkpoints" / "000002" / name
        (newest / name).write_bytes(part.read_bytes())
        part.unlink()
        code, err = run(3, "--resume", str(out))
        assert code == 0, err
        assert [line["loss"] for line in metrics(out)] == [line["loss"] for line in metrics(shared)]
        assert all((value == weights(shared)[tensor]).all() for tensor, value in weights(out).items())

        # A part that is cut short.
        host = json.loads((out / "checkpoints" / "000003" / "manifest.json").read_text())["hosts"][1]
        (name,), node = host["files"], host["node"][:12]
        assert host["address"] == made.ip(1)
        part = there / "checkpoints" / "000003" / name
        size = part.stat().st_size
        part.write_bytes(part.read_bytes()[:-8])
        code, err = run(4, "--resume", str(out))
        told = (
            f"error[bad-checkpoint]: the checkpoint {out}/checkpoints/000003 cannot be used: on {made.ip(1)} (Ray node "
        )
        assert code == 1 and f"{told}{node}) {name} has {size - 8} bytes of {size}" in err, err
        assert f"{newest} is complete: --resume {newest}, with --out another folder" in err, err
    finally:
        made.close()
