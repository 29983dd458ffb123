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
from ..diagnostics.shown import shown
from .common import guarded, load_plan, natural, tell

if TYPE_CHECKING:
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
    p.add_argument("file", metavar="FILE", help="a program, or a plan that msrl-compile wrote (.json)")
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
        help="write the rows of each iteration into the run's folder, as Parquet under rows/",
    )
    p.add_argument(
        "--replay", metavar="DIR", help="train on the responses of a run that was recorded, in place of generated ones"
    )
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
    source = None
    try:
        if options.file.endswith(".json"):
            if options.sets or options.deploy:
                p.error("a plan is compiled already: `--set` and `--deploy` go with a program")
            plan = load_plan(options.file, run=True)
        else:
            from ..compiler.pipeline import no_deploy, translate
            from ..compiler.sources import read

            source = read(options.file)
            sets = {key.strip(): value for key, _, value in (s.partition("=") for s in options.sets)}
            result = translate(source, deploy=options.deploy, sets=sets)
            # Of data its own check tells more: that they are not there is an error of the run.
            own = ("missing-file", "no-data", "few-rows", "not-installed")
            tell([w for w in result.warnings if w.code not in own], source, options)
            if result.plan is None:
                raise no_deploy()
            plan = result.plan
        stated = {k: v for k, v in (("iterations", options.iterations), ("seed", options.seed)) if v is not None}
        plan = replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, **stated)))
        return _execute(plan, options)
    except Fault as fault:
        tell(fault.diagnostics, source, options)
        return 3 if any(d.code in UNFIT for d in fault.diagnostics) else 1


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


def _execute(plan: Plan, options: argparse.Namespace) -> int:
    try:
        from ..runtime.driver import supervisor
    except ModuleNotFoundError as error:
        print(f"msrl-run: {error.name} is not installed; to run plans: pip install 'msrl-graph[run]'", file=sys.stderr)
        return 2
    resume = options.resume or ""
    watched = supervisor.Options(
        options.measure_memory,
        options.verbose,
        options.record,
        options.replay or "",
        options.overwrite,
        options.nice,
        options.watch,
        options.metrics_port,
    )
    if options.dry_run:
        made = supervisor.prepare(plan, options.out, resume, watched)
        tell(made.warnings, None, options)
        made.drop()
        print(shown("\n".join(made.lines())))
        return 0
    try:
        outcome = supervisor.run(plan, options.out, resume, watched)
    except supervisor.RunFailed as error:
        tell([Diagnostic("run-failed", str(error))], None, options)
        return 3
    except supervisor.Interrupted as ended:
        return ended.status
    print(shown(f"results in {outcome.folder}"))
    for line in outcome.lines():
        print(line)
    return 0
