"""The command msrl-doctor: problems and speed of this machine or of a Ray cluster.

Invariant: the search for problems changes nothing, and imports no package that is slow to import. Only `--calibrate`,
which measures the speed, starts long-lived processes, and all of them have ended when the command ends. The exit status
is one of four:

- 0: no problem was found, or the measurement succeeded.
- 1: a run would fail.
- 2: bad usage.
- 3: the measurement failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.packages import make_extra_command
from ..diagnostics import Diagnostic, Fault
from ..hardware import calibration
from ..hardware.calibration import Calibration
from .common import load_plan, print_diagnostics, run_guarded
from .flags import add_program_flags, parse_sets

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan
    from ..runtime.doctor.findings import Finding


def main(argv: Sequence[str] | None = None) -> int:
    """Run `msrl-doctor` and return the exit status."""
    return run_guarded("msrl-doctor", _doctor, list(sys.argv[1:] if argv is None else argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msrl-doctor",
        description="Report what is wrong with this machine, or with the hosts of the Ray "
        "cluster that RAY_ADDRESS names, "
        "and the next step; measure how fast it is.",
        epilog="exit status: 0 nothing is wrong, or measured, 1 a run would fail, 2 bad usage, 3 measuring failed",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON (keys: docs/guides/setup.md)")
    parser.add_argument(
        "--program", metavar="FILE", help="also check that it has what this program or plan (.json) needs"
    )
    add_program_flags(parser, with_model=True)
    measures = 'measure this machine, for `device = "here"` and functions on its CPUs (a minute)'
    where = "file for the measurements (default: MSRL_HERE, else here.json in the user's settings)"
    parser.add_argument("--calibrate", action="store_true", help=measures)
    parser.add_argument("--out", metavar="FILE", help=where)
    return parser


def _doctor(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    options.diagnostics = "json" if options.json else "full"
    options.color = "auto"
    if options.out and not options.calibrate:
        parser.error("`--out` goes with `--calibrate`")
    if options.calibrate and (options.json or options.program):
        parser.error(f"`--calibrate` measures: leave out `{'--json' if options.json else '--program'}`")
    if (options.sets or options.deploy or options.model) and not options.program:
        parser.error("`--set`, `--deploy` and `--model` go with `--program`")
    sets = parse_sets(parser, options)
    path = Path(options.out) if options.out else calibration.location()[0]
    if options.calibrate:
        if path is None:
            parser.error("MSRL_HERE is empty: name a file for the measurements with `--out`")
        return _calibrate(path)
    source: list[ProgramSource] = []
    try:
        plan = _plan(options, sets, parser, source) if options.program else None
    except Fault as fault:
        print_diagnostics(fault.diagnostics, source[0] if source else None, options)
        return 1
    return _examine(path, plan, options.json)


def _plan(
    options: argparse.Namespace, sets: dict[str, str], parser: argparse.ArgumentParser, source: list[ProgramSource]
) -> Plan:
    """Return the plan of the file that `--program` names.

    If the file is a program, the program is compiled, and its text is appended to `source`, for messages. If the file
    is a plan, the plan is loaded. Raises a Fault if there is no valid plan.
    """
    if options.program.endswith(".json"):
        if options.sets or options.deploy or options.model:
            parser.error("a plan is compiled already: `--set`, `--deploy` and `--model` go with a program")
        return load_plan(options.program)
    from ..compiler.pipeline import no_deploy, translate
    from ..compiler.sources import read_source

    source.append(read_source(options.program))
    plan = translate(source[0], deploy=options.deploy, model=options.model, sets=sets).plan
    if plan is None:
        raise no_deploy()
    return plan


def _examine(path: Path | None, plan: Plan | None, as_json: bool) -> int:
    from ..runtime.doctor import report
    from ..runtime.doctor.examine import examine

    address = os.environ.get("RAY_ADDRESS", "")
    findings, hosts = examine(address, plan)
    calibrated = calibration.read(path) if path is not None and path.is_file() else None
    if not address:
        findings.append(_speed_finding(calibrated))
    if as_json:
        sys.stdout.write(report.document(findings, hosts))
        return report.status(findings)
    on_screen = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_screen or "COLUMNS" in os.environ else 120
    sys.stdout.write(report.table(findings, hosts, width, on_screen and "NO_COLOR" not in os.environ))
    if path is not None and isinstance(calibrated, Calibration) and not address:
        print()
        _show(calibrated, path)
    return report.status(findings)


def _speed_finding(calibrated: Calibration | Diagnostic | None) -> Finding:
    from ..runtime.doctor.findings import Finding

    measure = "msrl-doctor --calibrate"
    if calibrated is None:
        return Finding("speed", f"not measured: seconds are predicted from assumed figures ({measure})")
    if isinstance(calibrated, Diagnostic):
        return Finding("speed", calibrated.message, "warning", measure)
    return Finding("speed", f"measured {calibrated.date}, within {calibrated.noise:.1%}; see below")


def _calibrate(path: Path) -> int:
    try:
        from ..runtime.calibrate.measure import CalibrationError, measure
    except ModuleNotFoundError as error:
        command = make_extra_command("run")
        print(f"msrl-doctor: {error.name} is not installed; to measure: {command}", file=sys.stderr)
        return 2
    from ..compiler.pipeline import compile

    # A small program whose dock is measured; nothing is generated or trained.
    sizes = {"prompts": "64", "group": "8", "prompt_len": "16", "response_len": "16"}
    print("measuring this machine for about a minute; do not use it meanwhile", file=sys.stderr)
    try:
        measure(compile("grpo", model="tiny", sets=sizes), path)
    except (CalibrationError, OSError) as error:
        print(f"msrl-doctor: measuring failed: {error}", file=sys.stderr)
        return 3
    calibrated = calibration.read(path)
    assert isinstance(calibrated, Calibration)
    _show(calibrated, path)
    return 0


def _show(calibrated: Calibration, path: Path) -> None:
    """Print a table of a calibration's measurements."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120, force_jupyter=False)
    table = Table(
        title="How fast it is", title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2)
    )
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _figure_rows(calibrated, path):
        table.add_row(name, value)
    console.print(table)


def _figure_rows(calibrated: Calibration, path: Path) -> list[tuple[str, str]]:
    return [
        ("file", str(path)),
        (
            "measured",
            (
                f"{calibrated.date}, in {calibrated.seconds:.0f} s, with "
                f"{', '.join(f'{package} {version}' for package, version in calibrated.versions.items())}"
            ),
        ),
        ("noise", f"{calibrated.noise:.1%} between measurements of the same figure"),
        ("an iteration", f"{calibrated.turn * 1e3:.1f} ms to begin and end"),
        (
            "the dock",
            (
                f"{calibrated.handover * 1e3:.1f} ms from node to node, {calibrated.share * 1e3:.1f} "
                "ms of a processor per share"
            ),
        ),
        ("a Python function", f"{calibrated.function * 1e6:.0f} us per row at least"),
        *_rank_rows(calibrated),
    ]


def _rank_rows(calibrated: Calibration) -> list[tuple[str, str]]:
    """Return a table row for each number of ranks with which rates were measured.

    A row is a label and a text. The text has the rates of one rank while all ranks are busy: FLOP/s, memory bandwidth
    and others.
    """
    rows = []
    for ranks, busy in sorted(calibrated.busy.items()):
        device = calibration.device(calibrated, "here", ranks)
        text = f"{device.flops['f32'].value / 1e9:.0f} GFLOP/s f32, {device.flops['bf16'].value / 1e9:.0f} bf16, "
        text += (
            f"{device.memory_bandwidth.value / 1e9:.1f} GB/s, {busy.launch * 1e6:.1f} us per operator, "
            f"{busy.row * 1e6:.0f} us per row"
        )
        if busy.collectives:
            text += (
                f", {device.latency.value * 1e6:.0f} us and {device.device_link.value / 1e9:.2f} GB/s per collective"
            )
        threads = f"{busy.threads} thread{'s' * (busy.threads > 1)}"
        rows.append((f"{ranks} rank{'s' * (ranks > 1)} of {threads}", text))
    return rows


if __name__ == "__main__":
    sys.exit(main())
