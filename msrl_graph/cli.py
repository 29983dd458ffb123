"""The command line: flags in, exit code out.

Invariant: the result goes to stdout, diagnostics to stderr. Exit status 0: fine; 1: a fault in the input; 2: bad usage, or a mistake of
our own (one line and where to find what reproduces it; MSRL_DEBUG=1 gives the traceback).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import codes
from .diagnostics import Diagnostic, Fault, nearest, render, render_json

if TYPE_CHECKING:
    from .compile import Compilation, Source
    from .plan import Plan

COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "hint": "\x1b[1;36m"}


def compile_main(argv: Sequence[str] | None = None) -> int:
    """`msrl-compile`."""
    return guarded("msrl-compile", _compile, list(sys.argv[1:] if argv is None else argv))


# msrl-compile


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="msrl-compile",
        description="Compile an .rlg program: check it, place it on a cluster, show or write the plan.",
        epilog="exit status: 0 fine, 1 a fault in the program, 2 bad usage",
        allow_abbrev=False,
    )
    p.add_argument("file", nargs="?", metavar="FILE", help="a program; `-` reads stdin; a NAME is an algorithm of the package, as grpo")
    p.add_argument("--deploy", metavar="NAME", help="which deploy of the file")
    p.add_argument("--model", metavar="PRESET", help="the policy's model where the file has no deploy, on the machine at hand")
    p.add_argument("--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated")
    p.add_argument("--check", action="store_true", help="only check: print nothing if all is well")
    p.add_argument("--emit", choices=("ast", "graph", "placed", "plan", "ray"), help="what to show (default: plan; graph without a deploy)")
    p.add_argument("--format", choices=("text", "json"), default="text", help="how to show it")
    p.add_argument("-o", metavar="FILE", dest="output", help="write the result to a file instead of stdout")
    p.add_argument("--simulate", metavar="N", type=_count, help="show what N iterations take when rows differ, instead of the plan")
    p.add_argument("--lengths", metavar="SPEC", action="append", help="with --simulate: tokens, `[COLUMN=]lognormal(600, 0.8)` or a FILE")
    p.add_argument("--stragglers", metavar="SPEC", help="with --simulate: which share of the devices is how many times slower, `1%% x3`")
    p.add_argument("--function", metavar="NAME=SECONDS", action="append", help="with --simulate: what a function node takes of a row")
    p.add_argument("--trace", metavar="FILE", help="with --simulate: write who works when, for Perfetto")
    p.add_argument("--why", action="store_true", help="show why these layouts: what the search took, the runners-up, what each loses by")
    p.add_argument("--budget", metavar="SECONDS", type=_seconds, help="how long the search for layouts may take; then the best so far")
    p.add_argument("--print-after", metavar="PASS", help="show the plan as it is after a pass, on stderr")
    p.add_argument("--time-passes", action="store_true", help="show how long each pass took, on stderr")
    p.add_argument("--list-passes", action="store_true", help="list the passes and end")
    p.add_argument("--explain", metavar="CODE", help="show the page of a diagnostic's code and end")
    p.add_argument("--diagnostics", choices=("full", "concise", "json"), default="full", help="how diagnostics are shown")
    p.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour in text and diagnostics")
    return p


def _compile(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.explain is not None:
        if options.explain not in codes.known():
            known = nearest(options.explain, codes.known()) or "the codes stand in brackets"
            parser.error(f"no code is called `{options.explain}`; {known}")
        print(codes.shown(options.explain, *_screen(options)), end="")
        return 0
    from .compile import PASSES, read, translate

    names = [p.name for p in PASSES]
    if options.list_passes:
        print("\n".join(names))
        return 0
    if options.print_after is not None and options.print_after not in names:
        parser.error(f"no pass is called `{options.print_after}`; {nearest(options.print_after, names)}")
    if options.file is None:
        parser.error("a FILE is needed")
    if options.check and options.output is not None:
        parser.error("`--check` shows nothing, so there is nothing to write: leave out `-o`")
    if options.why and (options.check or options.format == "json" or options.emit not in (None, "plan")):
        parser.error("`--why` shows the search as text: it goes with no other stage, format or check")
    if options.emit == "ray" and options.format == "json":
        parser.error("`--emit ray` is a script; `--format json` does not apply")
    more = [f"--{name}" for name in ("lengths", "stragglers", "function", "trace") if getattr(options, name) is not None]
    if more and not options.simulate:
        parser.error(f"`{more[0]}` goes with `--simulate N`")
    if options.simulate and (options.emit or options.check):
        parser.error(f"`--simulate` shows what iterations take: leave out `{'--emit' if options.emit else '--check'}`")
    if any("=" not in f for f in options.function or ()):
        parser.error("`--function` takes NAME=SECONDS")
    sets = {key.strip(): value for key, _, value in (s.partition("=") for s in options.sets)}
    if any("=" not in s for s in options.sets):
        parser.error("`--set` takes PARAM=VALUE")

    times: list[tuple[str, float]] = []

    def after(name: str, seconds: float, plan: Plan) -> None:
        times.append((name, seconds))
        if name == options.print_after:
            from .emit.text import plan_text

            print(f"--- after {name}\n{plan_text(plan)}---", file=sys.stderr)

    source = None
    try:
        # A program from stdin is named as an editor would name it.
        source = read("<stdin>", sys.stdin.read()) if options.file == "-" else read(options.file)
        until = {"ast": "ast", "graph": "graph", "placed": "placed"}.get(options.emit or "plan", "plan")
        until = "plan" if options.check else until
        result = translate(source, deploy=options.deploy, model=options.model, sets=sets, until=until, after=after)
        output = "" if options.check else _simulated(result, options) if options.simulate else _result(result, options)
    except Fault as fault:
        _tell(fault.diagnostics, source, options)
        return 1
    _tell(result.warnings, source, options)
    if options.time_passes:
        for name, seconds in times:
            print(f"{name:<10} {seconds * 1e3:8.2f} ms", file=sys.stderr)
    if options.output is None:
        try:
            sys.stdout.write(output)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"msrl-compile: cannot write the result: {error.strerror}", file=sys.stderr)
            return 2
    elif not options.check:
        try:
            Path(options.output).write_text(output, encoding="utf-8")
        except OSError as error:
            print(f"msrl-compile: cannot write `{options.output}`: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def _simulated(result: Compilation, options: argparse.Namespace) -> str:
    from .compile import no_deploy
    from .simulation.flags import simulated

    if result.plan is None:
        raise no_deploy()
    return simulated(result.plan, options, *_screen(options))


def _result(result: Compilation, options: argparse.Namespace) -> str:
    """The text of the stage that was asked for."""
    from .compile import no_deploy

    stage = options.emit or ("plan" if result.plan is not None else "graph")
    if stage in ("placed", "plan", "ray") and result.placed is None:
        raise no_deploy()
    if options.format == "json":
        from .emit import json

        if stage == "ast":
            return json.tree_json(result.tree)
        if stage == "graph":
            assert result.graph is not None
            return json.graph_json(result.graph)
        assert result.placed is not None
        if stage == "placed":
            return json.placed_json(result.placed)
        assert result.plan is not None
        return json.plan_json(result.plan)
    if stage == "ast":
        from .dsl.ast import show

        return show(result.tree)
    if stage == "ray":
        from .emit.ray import ray_script

        assert result.plan is not None
        return ray_script(result.plan)
    from .emit import text

    width, colour = _screen(options)
    if stage == "graph":
        assert result.graph is not None
        return text.graph_text(result.graph, width, colour)
    assert result.placed is not None
    if stage == "placed":
        return text.placed_text(result.placed, width, colour)
    assert result.plan is not None
    if options.why:
        from .compile import unstated
        from .emit.why import why_text

        other = unstated(result.plan, options.budget) if result.plan.search is None else None
        return why_text(result.plan, other, width, colour)
    return text.plan_text(result.plan, width, colour)


def _screen(options: argparse.Namespace) -> tuple[int, bool]:
    """How wide a text is, and whether it has colour."""
    from .emit.text import WIDTH

    to_terminal = options.output is None and sys.stdout.isatty()
    colour = options.color == "always" or (options.color == "auto" and to_terminal and "NO_COLOR" not in os.environ)
    return max(80, os.get_terminal_size().columns) if to_terminal else WIDTH, colour


# msrl-run


def run_main(argv: Sequence[str] | None = None) -> int:
    """`msrl-run`."""
    return guarded("msrl-run", _run, list(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(
        prog="msrl-run",
        description="Compile an .rlg program, or take a plan, and run it on Ray.",
        epilog="exit status: 0 fine, 1 a fault in the program or its data, 2 bad usage, 3 a process died or resources are missing, "
        "130 ended by Ctrl-C (once: after the iteration, with a checkpoint; twice: at once)",
        allow_abbrev=False,
    )
    p.add_argument("file", metavar="FILE", help="a program, or a plan that msrl-compile wrote (.json)")
    p.add_argument("--deploy", metavar="NAME", help="which deploy of the file")
    p.add_argument("--set", metavar="K=V", action="append", default=[], dest="sets", help="override a param; may be repeated")
    p.add_argument("--iterations", metavar="N", type=_natural, help="override the number of iterations")
    p.add_argument("--seed", metavar="N", type=_natural, help="override the seed")
    p.add_argument("--out", metavar="DIR", help="where metrics, curve, trace and weights go (default: a new folder under runs/)")
    p.add_argument("--resume", metavar="DIR", help="go on with a run, or from a checkpoint; without --out, in the run's folder")
    p.add_argument("--record", action="store_true", help="write the rows of each iteration into the run's folder, as rows/*.parquet")
    p.add_argument("--replay", metavar="DIR", help="train on the responses of a run that was recorded, in place of generated ones")
    p.add_argument("--dry-run", action="store_true", help="check all that can be checked, say what would run, and start nothing")
    p.add_argument("--verbose", action="store_true", help="show what the processes print, each line with its process in front")
    p.add_argument("--measure-memory", action="store_true", help="measure what a rank's tensors take, at each instruction of an iteration")
    p.add_argument("--diagnostics", choices=("full", "concise", "json"), default="full", help="how diagnostics are shown")
    p.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour in diagnostics")
    options = p.parse_args(argv)
    if any("=" not in s for s in options.sets):
        p.error("`--set` takes PARAM=VALUE")
    source = None
    try:
        if options.file.endswith(".json"):
            if options.sets or options.deploy:
                p.error("a plan is compiled already: `--set` and `--deploy` go with a program")
            plan = _load_plan(options.file)
        else:
            from .compile import no_deploy, read, translate

            source = read(options.file)
            sets = {key.strip(): value for key, _, value in (s.partition("=") for s in options.sets)}
            result = translate(source, deploy=options.deploy, sets=sets)
            _tell(result.warnings, source, options)
            if result.plan is None:
                raise no_deploy()
            plan = result.plan
        stated = {k: v for k, v in (("iterations", options.iterations), ("seed", options.seed)) if v is not None}
        plan = replace(plan, deploy=replace(plan.deploy, run=replace(plan.deploy.run, **stated)))
        return _execute(plan, options)
    except Fault as fault:
        _tell(fault.diagnostics, source, options)
        return 3 if any(d.code == "no-resources" for d in fault.diagnostics) else 1


def run_plan(text: str, out: str | None) -> int:
    """Runs the JSON text of a plan as `msrl-run` would: what the script of `--emit ray` calls. The exit status."""

    def main(_: list[str]) -> int:
        from .plan import from_json

        options = argparse.Namespace(
            diagnostics="full",
            color="auto",
            out=out,
            resume=None,
            record=False,
            replay=None,
            dry_run=False,
            verbose=False,
            measure_memory=False,
        )
        try:
            return _execute(from_json(text), options)
        except Fault as fault:
            _tell(fault.diagnostics, None, options)
            return 3 if any(d.code == "no-resources" for d in fault.diagnostics) else 1

    return guarded("msrl-run", main, sys.argv[1:])


def _execute(plan: Plan, options: argparse.Namespace) -> int:
    try:
        from .runtime import supervisor
    except ModuleNotFoundError as error:
        print(f"msrl-run: {error.name} is not installed; to run plans: pip install 'msrl-graph[run]'", file=sys.stderr)
        return 2
    resume = options.resume or ""
    watched = supervisor.Options(options.measure_memory, options.verbose, options.record, options.replay or "")
    if options.dry_run:
        made = supervisor.prepare(plan, options.out, resume, watched)
        _tell(made.warnings, None, options)
        print("\n".join(made.lines()))
        return 0
    try:
        outcome = supervisor.run(plan, options.out, resume, watched)
    except supervisor.RunFailed as error:
        _tell([Diagnostic("run-failed", str(error))], None, options)
        return 3
    except supervisor.Interrupted as ended:
        return ended.status
    print(f"results in {outcome.folder}")
    for line in outcome.lines():
        print(line)
    return 0


def _load_plan(name: str) -> Plan:
    import msgspec

    from .compile import PASSES
    from .plan import FORMAT_VERSION, from_json

    try:
        plan = from_json(Path(name).read_bytes())
        if plan.format_version != FORMAT_VERSION:
            raise msgspec.ValidationError(f"its format is {plan.format_version}, this version reads {FORMAT_VERSION}")
        # A plan may have been edited: what each pass promises must still hold.
        for step in PASSES:
            if not step.holds(plan):
                raise msgspec.ValidationError(f"what the pass `{step.name}` fills is not whole")
        return plan
    except OSError as error:
        raise Fault(Diagnostic("missing-file", f"the plan {name} cannot be read: {error.strerror}")) from None
    except msgspec.MsgspecError as error:
        help = "write it anew: msrl-compile FILE --format json -o plan.json"
        raise Fault(Diagnostic("bad-plan", f"{name} is not a plan of this version: {error}", help=help)) from None


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"a number of seconds belongs here, not `{text}`")
    return float(text)


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**53:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^53 belongs here, not `{text}`")
    return int(text)


def _count(text: str) -> int:
    if not (number := _natural(text)):
        raise argparse.ArgumentTypeError("a whole number of 1 or more belongs here, not `0`")
    return number


# Shared by the commands


def _tell(diagnostics: Sequence[Diagnostic], source: Source | None, options: argparse.Namespace) -> None:
    """Diagnostics to stderr, in the order of the text."""
    from .compile import texts

    found = sorted(diagnostics, key=lambda d: (d.span.file, d.span.line, d.span.column, d.code, d.message))
    if options.diagnostics == "json":
        # A reader of JSON finds a list, even an empty one.
        print(render_json(found), file=sys.stderr)
        return
    sources = texts(source, found)
    colour = options.color == "always" or (options.color == "auto" and sys.stderr.isatty() and "NO_COLOR" not in os.environ)
    separator = "\n" if options.diagnostics == "concise" else "\n\n"
    shown = [render(d, sources, options.diagnostics) for d in found]
    if colour:
        heads = [f"{d.severity}[{d.code}]" for d in found]
        shown = [s.replace(h, f"{COLOURS[d.severity]}{h}\x1b[0m", 1) for s, h, d in zip(shown, heads, found, strict=True)]
    if shown:
        print(separator.join(shown), file=sys.stderr)


def guarded(program: str, main: object, argv: list[str]) -> int:
    """Runs a command; a mistake of our own becomes one line and a folder with what reproduces it."""
    assert callable(main)
    try:
        code = main(argv)
        assert isinstance(code, int)
        return code
    except BrokenPipeError:
        # Whoever read has seen enough. stdout is closed towards nothing, so that Python's own flush at exit does not complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("MSRL_DEBUG") == "1":
            raise
        where = _reproducer(program, argv)
        print(f"{program}: internal error: {type(error).__name__}: {error}; what reproduces it is in {where}", file=sys.stderr)
        return 2


def _reproducer(program: str, argv: Sequence[str]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="msrl-bug-"))
    (folder / "command.txt").write_text(f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([program, *argv])}\n", encoding="utf-8")
    (folder / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
    for argument in argv:
        path = Path(argument)
        if path.suffix == ".rlg" and path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


if __name__ == "__main__":
    sys.exit(compile_main())
