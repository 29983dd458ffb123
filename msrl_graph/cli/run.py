"""msrl-run: flags in, exit code out.

Invariant: nothing of the runtime is loaded before the plan stands. Exit status as msrl-compile's, and 3: a run that
failed, 130: one that was ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..diagnostics import UNFIT, Diagnostic, Fault
from ..diagnostics.terminal_text import shown
from .common import guarded, load_plan, natural, tell

if TYPE_CHECKING:
    from ..compiler.sources import ProgramSource
    from ..ir.plan import Plan


def run_main(argv: Sequence[str] | None = None) -> int:
    """`msrl-run`."""
    return guarded("msrl-run", _run, list(sys.argv[1:] if argv is None else argv))


def parser() -> argparse.ArgumentParser:
    """What msrl-run takes; `run` of the Python API takes the same by keyword."""
    p = argparse.ArgumentParser(
        prog="msrl-run",
        description="Compile an .rlg program, or take a plan, and run it on Ray.",
        epilog="exit status: 0 fine, 1 a fault in the program or its data, 2 bad usage, 3 a process died or "
        "resources are missing, "
        "130 ended by Ctrl-C (once: after the iteration, with a checkpoint; twice: at once)",
        allow_abbrev=False,
    )
    p.add_argument("file", metavar="FILE", nargs="?", help="a program, or a plan that msrl-compile wrote (.json)")
    p.add_argument("--deploy", metavar="NAME", help="which deploy of the file")
    p.add_argument(
        "--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated"
    )
    p.add_argument("--iterations", metavar="N", type=natural, help="override the number of iterations")
    p.add_argument("--seed", metavar="N", type=natural, help="override the seed")
    p.add_argument(
        "--out",
        metavar="DIR",
        help="where metrics, curve, trace and weights go, a folder or a URL (default: a new folder under runs/)",
    )
    p.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with a run, or from a checkpoint, in a folder or at a URL; without --out, in the run's folder",
    )
    p.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the results of a run that --out holds, or checkpoints newer than --resume's",
    )
    p.add_argument(
        "--record",
        action="store_true",
        help="write the rows of each iteration and evaluation into the run's folder, as Parquet under rows/ and "
        "evaluation_rows/",
    )
    p.add_argument(
        "--replay", metavar="DIR", help="train on the responses of a run that was recorded, in place of generated ones"
    )
    p.add_argument(
        "--evaluate",
        action="store_true",
        help="do the program's evaluations once and train nothing, with the models' own weights or, with --resume, "
        "those of a checkpoint; results go to a folder of their own",
    )
    p.add_argument(
        "--export",
        metavar="DIR",
        help="write the weights of a checkpoint, or of a run's newest one, as Hugging Face folders, and start nothing; "
        "FILE is only needed where the run's folder is not there or the model was moved",
    )
    p.add_argument(
        "--to",
        metavar="DIR",
        help="where --export writes a folder for each worker, or, with --worker, that worker's (default: below "
        "exported/ in the run's folder)",
    )
    p.add_argument("--worker", metavar="NAME", help="the worker whose weights --export writes (default: all)")
    p.add_argument(
        "--dry-run", action="store_true", help="check all that can be checked, say what would run, and start nothing"
    )
    p.add_argument(
        "--verbose", action="store_true", help="show what the processes print, each line with its process in front"
    )
    p.add_argument(
        "--watch",
        action="store_true",
        help="serve a page on which the run can be watched, at an address that is printed; on a terminal show more too",
    )
    p.add_argument(
        "--metrics-port",
        metavar="N",
        type=natural,
        help="serve metrics for Prometheus at this port of 127.0.0.1; 0: a free one, which is printed",
    )
    p.add_argument(
        "--nice",
        metavar="N",
        type=natural,
        choices=range(20),
        default=0,
        help="let what computes be nicer than msrl-run is, by N",
    )
    p.add_argument(
        "--measure-memory",
        action="store_true",
        help="measure what a rank's tensors take, at each instruction of an iteration",
    )
    p.add_argument(
        "--diagnostics", choices=("full", "concise", "json"), default="full", help="how diagnostics are shown"
    )
    p.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour in diagnostics")
    return p


def _run(argv: Sequence[str]) -> int:
    p = parser()
    options = p.parse_args(argv)
    if any("=" not in s for s in options.sets):
        p.error("`--set` takes PARAM=VALUE")
    _go_together(p, options)
    program = _Program(options)
    try:
        if options.export:
            return _export(program, options)
        plan = program.plan(p)
        stated = {k: v for k, v in (("iterations", options.iterations), ("seed", options.seed)) if v is not None}
        plan = replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, **stated)))
        return _execute(plan, options)
    except Fault as fault:
        tell(fault.diagnostics, program.source, options)
        return 3 if any(d.code in UNFIT for d in fault.diagnostics) else 1


# The flags that go with --export; all others are of a run.
_OF_EXPORT = {"file", "export", "to", "worker", "deploy", "sets", "diagnostics", "color"}

_OF_TRAINING = {"iterations", "replay", "measure_memory"}


def _go_together(p: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with bad usage where flags of a run and of an export are mixed."""
    stated = {a.dest: a.option_strings[0] for a in p._actions if a.option_strings and a.dest != "help"}
    stated = {dest: flag for dest, flag in stated.items() if getattr(options, dest) != p.get_default(dest)}
    if not options.export:
        if alone := [flag for dest, flag in stated.items() if dest in ("to", "worker")]:
            p.error(f"`{alone[0]}` goes with `--export`")
        if options.file is None:
            p.error("the following arguments are required: FILE")
        if options.evaluate and (other := [f for d, f in stated.items() if d in _OF_TRAINING]):
            p.error(f"`--evaluate` trains nothing: `{other[0]}` does not go with it")
        return
    if of_run := [flag for dest, flag in stated.items() if dest not in _OF_EXPORT]:
        p.error(f"`--export` starts no run: `{of_run[0]}` does not go with it")
    if options.file is None and (options.sets or options.deploy):
        p.error("`--set` and `--deploy` go with a program")


class _Program:
    """Compile the program of FILE; `source` is its text, for messages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.source: ProgramSource | None = None

    def plan(self, p: argparse.ArgumentParser) -> Plan:
        """Compile it, or load it. Raises Fault."""
        options = self.options
        if options.file.endswith(".json"):
            if options.sets or options.deploy:
                p.error("a plan is compiled already: `--set` and `--deploy` go with a program")
            return load_plan(options.file, run=True)
        from ..compiler.pipeline import no_deploy, translate
        from ..compiler.sources import read

        self.source = read(options.file)
        sets = {key.strip(): value for key, _, value in (s.partition("=") for s in options.sets)}
        result = translate(self.source, deploy=options.deploy, sets=sets)
        # Of data its own check tells more: that they are not there is an error of the run.
        own = ("missing-file", "no-data", "few-rows", "not-installed")
        tell([w for w in result.warnings if w.code not in own], self.source, options)
        if result.plan is None:
            raise no_deploy()
        return result.plan


def _export(program: _Program, options: argparse.Namespace) -> int:
    """`--export`."""
    plan = program.plan(parser()) if options.file else None
    try:
        from ..runtime.driver.export import export
    except ModuleNotFoundError as error:
        return _not_installed(error)
    found = export(options.export, plan, options.worker or "", options.to or "")
    tell(found.warnings, program.source, options)
    for name, folder in found.folders.items():
        print(shown(f"{name}: {folder}"))
    return 0


def run_plan(text: str, out: str | None) -> int:
    """Runs the JSON text of a plan as `msrl-run` would: what the script of `--emit ray` calls. The exit status."""
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
            tell(fault.diagnostics, None, options)
            return 3 if any(d.code in UNFIT for d in fault.diagnostics) else 1

    return guarded("msrl-run", main, sys.argv[1:])


def _not_installed(error: ModuleNotFoundError) -> int:
    print(f"msrl-run: {error.name} is not installed; to run plans: pip install 'msrl-graph[run]'", file=sys.stderr)
    return 2


def _execute(plan: Plan, options: argparse.Namespace) -> int:
    try:
        from ..runtime.driver import supervisor
        from ..runtime.driver.outcome import Interrupted, RunFailed
    except ModuleNotFoundError as error:
        return _not_installed(error)
    resume = options.resume or ""
    watched = supervisor.WatchOptions(
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
        made = supervisor.prepare(plan, options.out, resume, watched)
        tell(made.warnings, None, options)
        made.drop()
        print(shown("\n".join(made.lines())))
        return 0
    try:
        outcome = supervisor.run(plan, options.out, resume, watched)
    except RunFailed as error:
        tell([Diagnostic("run-failed", str(error))], None, options)
        return 3
    except Interrupted as ended:
        return ended.status
    print(shown(f"results in {outcome.folder}"))
    for line in outcome.lines():
        print(line)
    return 0
