"""The command msrl-run.

Invariant: until the plan is complete, this process imports nothing of the runtime except the code that starts the
preload server, a process that imports heavy packages in advance. The exit status is 3 for a failed run, and 130 for an
interrupted run. In all other cases, the exit status is the same as for msrl-compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..backends.packages import make_extra_command
from ..diagnostics import MACHINE_FAULTS, Diagnostic, Fault
from ..diagnostics.terminal_text import make_printable
from .common import load_plan, parse_natural, print_diagnostics, run_guarded

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
    command_line.add_argument("--deploy", metavar="NAME", help="deploy of the file to use")
    command_line.add_argument(
        "--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated"
    )
    command_line.add_argument("--iterations", metavar="N", type=parse_natural, help="override the number of iterations")
    command_line.add_argument("--seed", metavar="N", type=parse_natural, help="override the seed")
    command_line.add_argument(
        "--out",
        metavar="DIR",
        help="folder or URL for metrics, curve, trace and weights (default: a new folder under runs/)",
    )
    command_line.add_argument(
        "--resume",
        metavar="DIR",
        help="resume a run or a checkpoint from a folder or URL; without --out, write to the run's folder",
    )
    command_line.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the results of a run in --out, or checkpoints newer than --resume's",
    )
    command_line.add_argument(
        "--record",
        action="store_true",
        help="write the rows of each iteration and evaluation to the run's folder, as Parquet under rows/ and "
        "evaluation_rows/",
    )
    command_line.add_argument(
        "--replay", metavar="DIR", help="train on the responses of a recorded run instead of generated ones"
    )
    command_line.add_argument(
        "--evaluate",
        action="store_true",
        help="run the program's evaluations once without training, with the models' own weights or, with --resume, "
        "those of a checkpoint; results go to a folder of their own",
    )
    command_line.add_argument(
        "--export",
        metavar="DIR",
        help="write the weights of a checkpoint, or of a run's newest one, as Hugging Face folders, without a run; "
        "FILE is only needed if the run's folder is missing or the model was moved",
    )
    command_line.add_argument(
        "--to",
        metavar="DIR",
        help="folder for --export, with a folder for each worker or, with --worker, that "
        "worker's files (default: under "
        "exported/ in the run's folder)",
    )
    command_line.add_argument(
        "--worker", metavar="NAME", help="the worker whose weights --export writes (default: all)"
    )
    command_line.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that can be checked and show what would run, without starting it",
    )
    command_line.add_argument(
        "--verbose", action="store_true", help="show the output of the processes, each line prefixed with its process"
    )
    command_line.add_argument(
        "--watch",
        action="store_true",
        help="serve a page that shows the run and print its address; also show more on the terminal",
    )
    command_line.add_argument(
        "--metrics-port",
        metavar="N",
        type=parse_natural,
        help="serve metrics for Prometheus on this port of 127.0.0.1; 0: use a free port and print it",
    )
    command_line.add_argument(
        "--nice",
        metavar="N",
        type=parse_natural,
        choices=range(20),
        default=0,
        help="add N to the niceness of compute processes",
    )
    command_line.add_argument(
        "--measure-memory",
        action="store_true",
        help="measure the memory of a rank's tensors at each instruction of an iteration",
    )
    command_line.add_argument(
        "--diagnostics", choices=("full", "concise", "json"), default="full", help="how diagnostics are shown"
    )
    command_line.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colour in diagnostics"
    )
    return command_line


def _run(argv: Sequence[str]) -> int:
    command_line = parser()
    options = command_line.parse_args(argv)
    if any("=" not in setting for setting in options.sets):
        command_line.error("`--set` takes PARAM=VALUE")
    _check_flags(command_line, options)
    if options.export or options.dry_run:
        return _run_program(command_line, options, None)
    try:
        from ..runtime.driver import preloading
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    with preloading.starting_early(options.file) as server:  # the server imports packages during the compilation
        return _run_program(command_line, options, server)


def _run_program(
    command_line: argparse.ArgumentParser, options: argparse.Namespace, server: PreloadServer | None
) -> int:
    program = _Program(options)
    try:
        if options.export:
            return _export(program, options)
        plan = program.plan(command_line)
        stated = {
            key: value
            for key, value in (("iterations", options.iterations), ("seed", options.seed))
            if value is not None
        }
        plan = replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, **stated)))
        return _execute(plan, options, server)
    except Fault as fault:
        print_diagnostics(fault.diagnostics, program.source, options)
        return 3 if any(diagnostic.code in MACHINE_FAULTS for diagnostic in fault.diagnostics) else 1


# The flags that go with --export; all others belong to a run.
_EXPORT_FLAGS = {"file", "export", "to", "worker", "deploy", "sets", "diagnostics", "color"}

_TRAINING_FLAGS = {"iterations", "replay", "measure_memory"}


def _check_flags(command_line: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with the status for bad usage if flags are given that cannot be combined.

    For example, flags of a run cannot be combined with `--export`.
    """
    stated = {
        action.dest: action.option_strings[0]
        for action in command_line._actions
        if action.option_strings and action.dest != "help"
    }
    stated = {dest: flag for dest, flag in stated.items() if getattr(options, dest) != command_line.get_default(dest)}
    if not options.export:
        if alone := [flag for dest, flag in stated.items() if dest in ("to", "worker")]:
            command_line.error(f"`{alone[0]}` goes with `--export`")
        if options.file is None:
            command_line.error("the following arguments are required: FILE")
        if options.evaluate and (
            other := [option_string for name, option_string in stated.items() if name in _TRAINING_FLAGS]
        ):
            command_line.error(f"`--evaluate` trains nothing: leave out `{other[0]}`")
        return
    if of_run := [flag for dest, flag in stated.items() if dest not in _EXPORT_FLAGS]:
        command_line.error(f"`--export` starts no run: leave out `{of_run[0]}`")
    if options.file is None and (options.sets or options.deploy):
        command_line.error("`--set` and `--deploy` go with a program")


class _Program:
    """The content of the command's argument FILE: a program or a plan.

    `source` is the program's text, for messages. `source` is None for a plan, and before the program is read.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.source: ProgramSource | None = None

    def plan(self, command_line: argparse.ArgumentParser) -> Plan:
        """Return the plan: compile the program in FILE, or load the plan in FILE.

        Raises a Fault if there is no valid plan.
        """
        options = self.options
        if options.file.endswith(".json"):
            if options.sets or options.deploy:
                command_line.error("a plan is compiled already: `--set` and `--deploy` go with a program")
            return load_plan(options.file, run=True)
        from ..compiler.pipeline import no_deploy, translate
        from ..compiler.sources import read_source

        self.source = read_source(options.file)
        sets = {key.strip(): value for key, _, value in (setting.partition("=") for setting in options.sets)}
        result = translate(self.source, deploy=options.deploy, sets=sets)
        # These warnings are not printed: the run's own checks report missing data in more detail, and as an error.
        own = ("missing-file", "no-data", "few-rows", "not-installed")
        print_diagnostics([warning for warning in result.warnings if warning.code not in own], self.source, options)
        if result.plan is None:
            raise no_deploy()
        return result.plan


def _export(program: _Program, options: argparse.Namespace) -> int:
    """Write the model folders that `--export` requests; return the exit status."""
    plan = program.plan(parser()) if options.file else None
    try:
        from ..runtime.driver.export import export
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    exported = export(options.export, plan, options.worker or "", options.to or "")
    print_diagnostics(exported.warnings, program.source, options)
    for name, folder in exported.folders.items():
        print(make_printable(f"{name}: {folder}"))
    return 0


def run_plan(text: str, out: str | None) -> int:
    """Run the JSON text of a plan as `msrl-run` does; return the exit status.

    The script that `--emit ray` writes calls this function.
    """
    from ..compiler.loading import load

    def main(_: list[str]) -> int:
        options = argparse.Namespace(
            diagnostics="full",
            color="auto",
            out=out,
            resume=None,
            overwrite=False,
            record=False,
            replay=None,
            dry_run=False,
            evaluate=False,
            verbose=False,
            measure_memory=False,
            nice=0,
            watch=False,
            metrics_port=None,
        )
        try:
            return _execute(load(text.encode(), "the plan of this script", run=True), options)
        except Fault as fault:
            print_diagnostics(fault.diagnostics, None, options)
            return 3 if any(diagnostic.code in MACHINE_FAULTS for diagnostic in fault.diagnostics) else 1

    return run_guarded("msrl-run", main, sys.argv[1:])


def _report_missing_package(error: ModuleNotFoundError) -> int:
    command = make_extra_command("run")
    print(f"msrl-run: {error.name} is not installed; to run plans: {command}", file=sys.stderr)
    return 2


def _execute(plan: Plan, options: argparse.Namespace, server: PreloadServer | None = None) -> int:
    try:
        from ..runtime.driver import supervisor
        from ..runtime.driver.outcome import Interrupted, RunFailed
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    resume = options.resume or ""
    watch_options = supervisor.WatchOptions(
        options.measure_memory,
        options.verbose,
        options.record,
        options.replay or "",
        options.overwrite,
        options.nice,
        options.watch,
        options.metrics_port,
        options.evaluate,
    )
    if options.dry_run:
        attempt = supervisor.prepare(plan, options.out, resume, watch_options)
        print_diagnostics(attempt.warnings, None, options)
        attempt.drop()
        print(make_printable("\n".join(attempt.lines())))
        return 0
    try:
        outcome = supervisor.run(plan, options.out, resume, watch_options, server=server)
    except RunFailed as error:
        print_diagnostics([Diagnostic("run-failed", str(error))], None, options)
        return 3
    except Interrupted as ended:
        return ended.status
    print(make_printable(f"results in {outcome.folder}"))
    for line in outcome.lines():
        print(line)
    return 0
