"""The command msrl-run.

Invariant: until the plan is complete, this process imports nothing of the runtime except the code that starts the
preload server, a process that imports heavy packages in advance. The exit status is 3 for a failed run, and 130 for an
interrupted run. In all other cases, the exit status is the same as for msrl-compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..backends.packages import make_extra_command
from ..diagnostics import MACHINE_FAULTS, Diagnostic, Fault
from ..diagnostics.terminal_text import make_printable
from ..ir.run_options import ExportOptions, RunOptions
from .common import load_plan, print_diagnostics, run_guarded
from .flags import add_display_flags, add_flags, add_program_flags, parse_sets

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan
    from ..runtime.process.preload import PreloadServer


def run_main(argv: Sequence[str] | None = None) -> int:
    """Run `msrl-run` and return the exit status."""
    return run_guarded("msrl-run", _run, list(sys.argv[1:] if argv is None else argv))


def parser() -> argparse.ArgumentParser:
    """Create the parser of msrl-run; the Python API's `run` has the same options."""
    command_line = argparse.ArgumentParser(
        prog="msrl-run",
        description="Compile an .rlg program, or take a plan, and run it on Ray.",
        epilog="exit status: 0 success, 1 a fault in the program or its data, 2 bad usage, 3 a process died or "
        "resources are missing, "
        "130 ended by Ctrl-C (once: after the iteration, with a checkpoint; twice: at once)",
        allow_abbrev=False,
    )
    command_line.add_argument(
        "file", metavar="FILE", nargs="?", help="a program, or a plan that msrl-compile wrote (.json)"
    )
    add_program_flags(command_line)
    add_flags(command_line, RunOptions)
    add_flags(command_line, ExportOptions)
    add_display_flags(command_line)
    return command_line


def _run(argv: Sequence[str]) -> int:
    command_line = parser()
    flags = command_line.parse_args(argv)
    options = RunOptions.collect(flags)
    export = ExportOptions.collect(flags)
    program = _Program(flags, parse_sets(command_line, flags))
    _check_flags(command_line, flags, options, export)
    if export.export:
        return program.execute(lambda: _export(program, export))
    if options.dry_run:
        return program.execute(lambda: _execute(program.plan(command_line), options, flags))
    try:
        from ..runtime.driver import preloading
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    with preloading.starting_early(flags.file) as server:  # the server imports packages during the compilation
        return program.execute(lambda: _execute(program.plan(command_line), options, flags, server))


def _check_flags(
    command_line: argparse.ArgumentParser, flags: argparse.Namespace, options: RunOptions, export: ExportOptions
) -> None:
    """Exit with the status for bad usage if flags are given that cannot be combined.

    For example, flags of a run cannot be combined with `--export`.
    """
    if not export.export:
        if stated := export.stated():
            command_line.error(f"`{stated[0].flag}` goes with `--export`")
        if flags.file is None:
            command_line.error("the following arguments are required: FILE")
        if conflict := options.find_conflict():
            command_line.error(f"`--evaluate` trains nothing: leave out `{conflict.flag}`")
        return
    if of_run := options.stated():
        command_line.error(f"`--export` starts no run: leave out `{of_run[0].flag}`")
    if flags.file is None and (flags.sets or flags.deploy):
        command_line.error("`--set` and `--deploy` go with a program")


class _Program:
    """The content of the command's argument FILE: a program or a plan.

    `source` is the program's text, for messages. `source` is None for a plan, and before the program is read.
    """

    def __init__(self, flags: argparse.Namespace, sets: dict[str, str]) -> None:
        self.flags = flags
        self.sets = sets
        self.source: ProgramSource | None = None

    def plan(self, command_line: argparse.ArgumentParser) -> Plan:
        """Return the plan: compile the program in FILE, or load the plan in FILE.

        Raises a Fault if there is no valid plan.
        """
        flags = self.flags
        if flags.file.endswith(".json"):
            if flags.sets or flags.deploy:
                command_line.error("a plan is compiled already: `--set` and `--deploy` go with a program")
            return load_plan(flags.file, run=True)
        from ..compiler.pipeline import no_deploy, translate
        from ..compiler.sources import read_source

        self.source = read_source(flags.file)
        result = translate(self.source, deploy=flags.deploy, sets=self.sets)
        # These warnings are not printed: the run's own checks report missing data in more detail, and as an error.
        own = ("missing-file", "no-data", "few-rows", "not-installed")
        print_diagnostics([warning for warning in result.warnings if warning.code not in own], self.source, flags)
        if result.plan is None:
            raise no_deploy()
        return result.plan

    def execute(self, action: Callable[[], int]) -> int:
        """Return the exit status of `action`; print the diagnostics of a Fault."""
        try:
            return action()
        except Fault as fault:
            print_diagnostics(fault.diagnostics, self.source, self.flags)
            return 3 if any(diagnostic.code in MACHINE_FAULTS for diagnostic in fault.diagnostics) else 1


def _export(program: _Program, options: ExportOptions) -> int:
    """Write the model folders that `--export` requests; return the exit status."""
    plan = program.plan(parser()) if program.flags.file else None
    try:
        from ..runtime.driver.export import export
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    exported = export(str(options.export), plan, options.worker or "", str(options.to or ""), options.merged)
    print_diagnostics(exported.warnings, program.source, program.flags)
    for name, folder in exported.folders.items():
        print(make_printable(f"{name}: {folder}"))
    return 0


def run_plan(text: str, out: str | None) -> int:
    """Run the JSON text of a plan as `msrl-run` does; return the exit status.

    The script that `--emit ray` writes calls this function.
    """
    from ..compiler.loading import load

    flags = argparse.Namespace(diagnostics="full", color="auto")

    def main(_: list[str]) -> int:
        load_run = partial(load, text.encode(), "the plan of this script", run=True)
        return _Program(flags, {}).execute(lambda: _execute(load_run(), RunOptions(out), flags))

    return run_guarded("msrl-run", main, sys.argv[1:])


def _report_missing_package(error: ModuleNotFoundError) -> int:
    command = make_extra_command("run")
    print(f"msrl-run: {error.name} is not installed; to run plans: {command}", file=sys.stderr)
    return 2


def _execute(plan: Plan, options: RunOptions, flags: argparse.Namespace, server: PreloadServer | None = None) -> int:
    try:
        from ..runtime.driver import supervisor
        from ..runtime.driver.outcome import Interrupted, RunFailed
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    if options.dry_run:
        prepared = supervisor.prepare(plan, options)
        print_diagnostics(prepared.warnings, None, flags)
        prepared.drop()
        print(make_printable("\n".join(prepared.lines())))
        return 0
    try:
        outcome = supervisor.run(plan, options, server=server)
    except RunFailed as error:
        print_diagnostics([Diagnostic("run-failed", str(error))], None, flags)
        return 3
    except Interrupted as ended:
        return ended.status
    print(make_printable(f"results in {outcome.folder}"))
    for line in outcome.lines():
        print(line)
    return 0
