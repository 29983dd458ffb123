"""msrl-doctor: what is wrong with this machine, or the hosts of a Ray cluster, and the next step; and how fast it is.

Invariant: looking changes nothing and loads no heavy package here; `--calibrate` alone starts processes that last, all
of which have ended when it ends. Exit status 0: nothing is wrong, or measured; 1: something is that a run would fail
of; 2: bad usage; 3: measuring failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..diagnostics import Diagnostic, Fault
from ..hardware import calibration
from ..hardware.calibration import Calibration
from .common import guarded, load_plan, tell

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan
    from ..runtime.doctor.findings import Finding


def main(argv: Sequence[str] | None = None) -> int:
    """`msrl-doctor`."""
    return guarded("msrl-doctor", _doctor, list(sys.argv[1:] if argv is None else argv))


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="msrl-doctor",
        description="Say what is wrong with this machine, or with the hosts of the Ray cluster that RAY_ADDRESS names, "
        "and the next step; measure how fast it is.",
        epilog="exit status: 0 nothing is wrong, or measured, 1 a run would fail of something, 2 bad usage, "
        "3 measuring failed",
        allow_abbrev=False,
    )
    p.add_argument("--json", action="store_true", help="show what is found as JSON: docs/clusters.md has its keys")
    p.add_argument(
        "--program", metavar="FILE", help="say too whether it has what this program takes, or a plan (.json) of one"
    )
    p.add_argument("--deploy", metavar="NAME", help="which deploy of the program")
    p.add_argument("--model", metavar="PRESET", help="the policy's model where the program has no deploy")
    p.add_argument(
        "--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated"
    )
    measures = 'measure this machine, for `device = "here"` and what runs on its CPUs (a minute)'
    where = "where what was measured goes (default: MSRL_HERE, else here.json among the user's settings)"
    p.add_argument("--calibrate", action="store_true", help=measures)
    p.add_argument("--out", metavar="FILE", help=where)
    return p


def _doctor(argv: Sequence[str]) -> int:
    p = _parser()
    options = p.parse_args(argv)
    options.diagnostics = "json" if options.json else "full"
    options.color = "auto"
    if options.out and not options.calibrate:
        p.error("`--out` goes with `--calibrate`")
    if options.calibrate and (options.json or options.program):
        p.error(f"`--calibrate` measures: leave out `{'--json' if options.json else '--program'}`")
    if (options.sets or options.deploy or options.model) and not options.program:
        p.error("`--set`, `--deploy` and `--model` go with `--program`")
    if any("=" not in s for s in options.sets):
        p.error("`--set` takes PARAM=VALUE")
    path = Path(options.out) if options.out else calibration.location()[0]
    if options.calibrate:
        if path is None:
            p.error("MSRL_HERE is empty: say with `--out` where what is measured goes")
        return _calibrate(path)
    source: list[ProgramSource] = []
    try:
        plan = _plan(options, p, source) if options.program else None
    except Fault as fault:
        tell(fault.diagnostics, source[0] if source else None, options)
        return 1
    return _examine(path, plan, options.json)


def _plan(options: argparse.Namespace, parser: argparse.ArgumentParser, source: list[ProgramSource]) -> Plan:
    """The plan of the program; `source` is given what it was read from. Raises Fault."""
    if options.program.endswith(".json"):
        if options.sets or options.deploy or options.model:
            parser.error("a plan is compiled already: `--set`, `--deploy` and `--model` go with a program")
        return load_plan(options.program)
    from ..compiler.pipeline import no_deploy, translate
    from ..compiler.sources import read

    source.append(read(options.program))
    sets = {key.strip(): value for key, _, value in (s.partition("=") for s in options.sets)}
    plan = translate(source[0], deploy=options.deploy, model=options.model, sets=sets).plan
    if plan is None:
        raise no_deploy()
    return plan


def _examine(path: Path | None, plan: Plan | None, as_json: bool) -> int:
    from ..runtime.doctor import report
    from ..runtime.doctor.examine import examine

    address = os.environ.get("RAY_ADDRESS", "")
    findings, hosts = examine(address, plan)
    found = calibration.read(path) if path is not None and path.is_file() else None
    if not address:
        findings.append(_speed(found))
    if as_json:
        sys.stdout.write(report.document(findings, hosts))
        return report.status(findings)
    on_screen = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_screen or "COLUMNS" in os.environ else 120
    sys.stdout.write(report.table(findings, hosts, width, on_screen and "NO_COLOR" not in os.environ))
    if path is not None and isinstance(found, Calibration) and not address:
        print()
        _show(found, path)
    return report.status(findings)


def _speed(found: Calibration | Diagnostic | None) -> Finding:
    from ..runtime.doctor.findings import Finding

    measure = "msrl-doctor --calibrate"
    if found is None:
        return Finding("speed", f"not measured: seconds are predicted from assumed figures ({measure})")
    if isinstance(found, Diagnostic):
        return Finding("speed", found.message, "warning", measure)
    return Finding("speed", f"measured {found.date}, within {found.noise:.1%}; see below")


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
    found = calibration.read(path)
    assert isinstance(found, Calibration)
    _show(found, path)
    return 0


def _show(found: Calibration, path: Path) -> None:
    """What was measured."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120, force_jupyter=False)
    table = Table(
        title="How fast it is", title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2)
    )
    table.add_column(no_wrap=True)
    table.add_column()
    for name, what in _figures(found, path):
        table.add_row(name, what)
    console.print(table)


def _figures(found: Calibration, path: Path) -> list[tuple[str, str]]:
    return [
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
        *_ranks(found),
    ]


def _ranks(found: Calibration) -> list[tuple[str, str]]:
    """What each of so many ranks reaches while all are busy."""
    rows = []
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
