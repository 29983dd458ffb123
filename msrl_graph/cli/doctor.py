"""msrl-doctor: what this machine is, what runs here, and how fast it is.

Invariant: looking changes nothing and loads no heavy package; `--calibrate` alone starts processes, all of which have
ended when it ends. Exit status 0: said or measured; 2: bad usage; 3: measuring failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..backends import ENGINES, runs
from ..backends.packages import version
from ..diagnostics import Diagnostic, render
from ..hardware import calibration
from ..hardware.calibration import Calibration
from ..hardware.device_kinds import DEVICE_KINDS
from .common import guarded

# What each command needs; what engines need, they say.
NEEDS = {
    "msrl-compile": ("lark", "networkx", "jinja2", "rich", "msgspec"),
    "msrl-run": ("torch", "ray", "transformers", "tokenizers", "safetensors", "psutil", "pyarrow"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """`msrl-doctor`."""
    return guarded("msrl-doctor", _doctor, list(sys.argv[1:] if argv is None else argv))


def _doctor(argv: Sequence[str]) -> int:
    about = "Say what this machine is and what runs here; measure how fast it is."
    status = "exit status: 0 said or measured, 2 bad usage, 3 measuring failed"
    p = argparse.ArgumentParser(prog="msrl-doctor", description=about, epilog=status, allow_abbrev=False)
    measures = 'measure this machine, for `device = "here"` and what runs on its CPUs (a minute)'
    where = "where what was measured goes (default: MSRL_HERE, else here.json among the user's settings)"
    p.add_argument("--calibrate", action="store_true", help=measures)
    p.add_argument("--out", metavar="FILE", help=where)
    options = p.parse_args(argv)
    if options.out and not options.calibrate:
        p.error("`--out` goes with `--calibrate`")
    path = Path(options.out) if options.out else calibration.location()[0]
    if not options.calibrate:
        _show(path)
        return 0
    if path is None:
        p.error("MSRL_HERE is empty: say with `--out` where what is measured goes")
    return _calibrate(path)


def _calibrate(path: Path) -> int:
    try:
        from ..runtime.calibrate.measure import CalibrationError, measure
    except ModuleNotFoundError as error:
        print(f"msrl-doctor: {error.name} is not installed; to measure: pip install 'msrl-graph[run]'", file=sys.stderr)
        return 2
    from ..compiler.pipeline import compile

    # A small program whose dock is tried; nothing of it is generated or trained.
    sizes = {"prompts": "64", "group": "8", "prompt_len": "16", "response_len": "16"}
    print("measuring this machine, about a minute; leave it alone meanwhile", file=sys.stderr)
    try:
        measure(compile("grpo", model="tiny", sets=sizes), path)
    except (CalibrationError, OSError) as error:
        print(f"msrl-doctor: measuring failed: {error}", file=sys.stderr)
        return 3
    _show(path)
    return 0


def _show(path: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for heading, rows in _sections(path):
        table = Table(
            title=heading, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2, 0, 2)
        )
        table.add_column(no_wrap=True)
        table.add_column()
        for name, what in rows:
            table.add_row(name, what)
        console.print(table)
        console.print()


def _sections(path: Path | None) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    machine = calibration.this_machine()
    yield (
        "This machine",
        [
            ("processor", machine.words),
            ("memory", f"{machine.memory / 2**30:.1f} GiB"),
            ("system", f"{platform.system()} {platform.release()}"),
            (
                "accelerators",
                ", ".join(
                    f"{n} {k.resource} ({k.name})" for k in DEVICE_KINDS.values() if not k.is_host and (n := k.here())
                )
                or "none found",
            ),
            (
                "Ray",
                f"joins the cluster at {ray}" if (ray := os.environ.get("RAY_ADDRESS")) else "starts on this machine",
            ),
        ],
    )
    wanted = NEEDS | {f"engine {name}": spec.needs for name, spec in ENGINES.items()}
    packages = ["msrl-graph", *dict.fromkeys(p for needs in wanted.values() for p in needs)]
    yield "Versions", [("Python", platform.python_version()), *((p, version(p) or "not installed") for p in packages)]
    here = []
    for what, needs in wanted.items():
        missing = [n for n in needs if not version(n)]
        told = f"needs {', '.join(missing)}" if missing else "yes"
        if what not in NEEDS and not runs(what.removeprefix("engine ")):
            told = "can be planned for, does not run yet"
        here.append((what, told))
    yield "What runs here", here
    yield "How fast it is", _speed(path)


def _speed(path: Path | None) -> list[tuple[str, str]]:
    if path is None or not path.is_file():
        return [("not measured", "seconds are predicted from assumed figures: run `msrl-doctor --calibrate`")]
    found = calibration.read(path)
    if isinstance(found, Diagnostic):
        return [("not known", render(found, {}, "concise"))]
    return _figures(found, path)


def _figures(found: Calibration, path: Path) -> list[tuple[str, str]]:
    rows = [
        ("file", str(path)),
        (
            "measured",
            f"{found.date}, in {found.seconds:.0f} s, with {', '.join(f'{k} {v}' for k, v in found.versions.items())}",
        ),
        ("noise", f"{found.noise:.1%} between measurements of the same figure"),
        ("an iteration", f"{found.turn * 1e3:.1f} ms to begin and end"),
        (
            "the dock",
            f"{found.handover * 1e3:.1f} ms from state to state, {found.share * 1e3:.1f} ms of a processor a share",
        ),
        ("a Python function", f"{found.function * 1e6:.0f} us a row at least"),
    ]
    for ranks, busy in sorted(found.busy.items()):
        device = calibration.device(found, "here", ranks)
        told = f"{device.flops['f32'].value / 1e9:.0f} GFLOP/s f32, {device.flops['bf16'].value / 1e9:.0f} bf16, "
        told += (
            f"{device.memory_bandwidth.value / 1e9:.1f} GB/s, {busy.launch * 1e6:.1f} us an operator, "
            f"{busy.row * 1e6:.0f} us a row"
        )
        if busy.collectives:
            told += f", {device.latency.value * 1e6:.0f} us and {device.device_link.value / 1e9:.2f} GB/s a collective"
        threads = f"{busy.threads} thread{'s' * (busy.threads > 1)}"
        rows.append((f"{ranks} rank{'s' * (ranks > 1)} of {threads}", told))
    return rows


if __name__ == "__main__":
    sys.exit(main())
