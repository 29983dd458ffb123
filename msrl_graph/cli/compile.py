"""The command msrl-compile.

Invariant: the result goes to stdout, and diagnostics go to stderr. The exit status is 0 for success, 1 for a fault in
the input, and 2 for bad usage or an internal error. An internal error is reported in one line, with the folder that
reproduces it; MSRL_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..diagnostics import Fault, codes, nearest
from ..diagnostics.terminal_text import make_printable
from .common import load_plan, print_diagnostics, run_guarded
from .flags import add_display_flags, add_program_flags, parse_natural, parse_sets

if TYPE_CHECKING:
    from ..compiler.pipeline import Compilation
    from ..ir.plan import Plan

PICTURES = ("dot", "html")


def compile_main(argv: Sequence[str] | None = None) -> int:
    """Run `msrl-compile` and return the exit status."""
    return run_guarded("msrl-compile", _compile, list(sys.argv[1:] if argv is None else argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msrl-compile",
        description="Compile an .rlg program: check it, place it on a cluster, show or write the plan.",
        epilog="exit status: 0 success, 1 a fault in the program, 2 bad usage",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a program; `-` reads stdin; a NAME is an algorithm of the package, such as grpo",
    )
    add_program_flags(parser, with_model=True)
    parser.add_argument("--check", action="store_true", help="only check; print nothing if there is no error")
    parser.add_argument(
        "--emit",
        choices=("ast", "graph", "placed", "plan", "ray"),
        help="what to show (default: plan; graph without a deploy)",
    )
    parser.add_argument(
        "--format", choices=("text", "json", *PICTURES), default="text", help="how to show it; dot: for Graphviz"
    )
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the result to a file instead of stdout")
    parser.add_argument(
        "--simulate",
        metavar="N",
        type=_count,
        help="show the time of N iterations with varying rows, instead of the plan",
    )
    parser.add_argument(
        "--lengths",
        metavar="SPEC",
        action="append",
        help="with --simulate: tokens, `[COLUMN=]lognormal(600, 0.8)` or a FILE",
    )
    parser.add_argument(
        "--stragglers",
        metavar="SPEC",
        help="with --simulate: slow devices, as their share and slowdown: `1%% x3`",
    )
    parser.add_argument(
        "--function",
        metavar="NAME=SECONDS",
        action="append",
        help="with --simulate: seconds per row of a function node",
    )
    parser.add_argument("--trace", metavar="FILE", help="with --simulate: write a timeline for Perfetto")
    parser.add_argument(
        "--diff", metavar="OLD.json", help="show what changed from a plan that `--format json -o OLD.json` wrote"
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="show why these layouts were chosen: the search's effort and the runners-up with their losses",
    )
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=_seconds,
        help="time limit of the layout search; it then uses the best so far",
    )
    parser.add_argument("--print-after", metavar="PASS", help="show the plan after a pass, on stderr")
    parser.add_argument("--time-passes", action="store_true", help="show how long each pass took, on stderr")
    parser.add_argument("--list-passes", action="store_true", help="list the passes and exit")
    parser.add_argument(
        "--explain", metavar="NAME", help="explain a code, a statement, an attribute or a function, and exit"
    )
    add_display_flags(parser)
    return parser


def _compile(argv: Sequence[str]) -> int:
    parser = _parser()
    if "--explain" in argv[:-1]:  # the name may be `->`, which argparse would take for a flag
        index = argv.index("--explain")
        argv = [*argv[:index], f"--explain={argv[index + 1]}", *argv[index + 2 :]]
    options = parser.parse_args(argv)
    if options.explain is not None:
        page = _find_page(options.explain)
        print(
            codes.shown(page, *_screen_size(options)) if page else make_printable(_unknown_name_text(options.explain)),
            end="",
            file=sys.stdout if page else sys.stderr,
        )
        return 0 if page else 2
    from ..compiler.pipeline import PASSES, translate
    from ..compiler.sources import read_source
    from ..files.program_text import decode

    names = [pass_.name for pass_ in PASSES]
    if options.list_passes:
        print("\n".join(names))
        return 0
    if options.print_after is not None and options.print_after not in names:
        parser.error(f"no pass is called `{options.print_after}`; {nearest(options.print_after, names)}")
    if options.file is None:
        parser.error("a FILE is needed")
    if options.check and options.output is not None:
        parser.error("`--check` has no output: leave out `-o`")
    if options.why and (options.check or options.format != "text" or options.emit not in (None, "plan")):
        parser.error(
            "`--why` shows the search as text: it cannot be combined with another stage or format or `--check`"
        )
    if options.emit == "ray" and options.format != "text":
        parser.error(f"`--emit ray` is a script; `--format {options.format}` does not apply")
    if options.diff is not None and (other := _flag_against_diff(options)):
        parser.error(f"`--diff` compares plans, as text or JSON: leave out `{other}`")
    if options.format in PICTURES and (options.emit == "ast" or options.simulate):
        parser.error(
            f"`--format {options.format}` draws graph, placed and plan, "
            f"not `{'--simulate' if options.simulate else '--emit ast'}`"
        )
    more = [
        f"--{name}" for name in ("lengths", "stragglers", "function", "trace") if getattr(options, name) is not None
    ]
    if more and not options.simulate:
        parser.error(f"`{more[0]}` goes with `--simulate N`")
    if options.simulate and (options.emit or options.check):
        parser.error(
            f"`--simulate` shows the time of iterations: leave out `{'--emit' if options.emit else '--check'}`"
        )
    if any("=" not in function for function in options.function or ()):
        parser.error("`--function` takes NAME=SECONDS")
    sets = parse_sets(parser, options)

    times: list[tuple[str, float]] = []

    def after(name: str, seconds: float, plan: Plan) -> None:
        times.append((name, seconds))
        if name == options.print_after:
            from ..emit.text import plan_text

            print(f"--- after {name}\n{plan_text(plan)}---", file=sys.stderr)

    source = None
    try:
        # Editors use the name `<stdin>`.
        source = (
            read_source("<stdin>", decode(sys.stdin.buffer.read(), "<stdin>"))
            if options.file == "-"
            else read_source(options.file)
        )
        until = {"ast": "ast", "graph": "graph", "placed": "placed"}.get(options.emit or "plan", "plan")
        until = "plan" if options.check else until
        arguments = {"deploy": options.deploy, "model": options.model, "sets": sets, "budget": options.budget}
        result = translate(source, until=until, after=after, **arguments)
        output = (
            ""
            if options.check
            else _simulation_text(result, options)
            if options.simulate
            else _result_text(result, options)
        )
    except Fault as fault:
        print_diagnostics(fault.diagnostics, source, options)
        return 1
    print_diagnostics(result.warnings, source, options)
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
            print(f"msrl-compile: cannot write `{make_printable(options.output)}`: {error.strerror}", file=sys.stderr)
            return 2
    return 0


def _find_page(name: str) -> str:
    """Return the text about a name: a diagnostic code's page, or a reference entry.

    Returns "" if `name` is neither a diagnostic code nor the name of an entry in the language reference.
    """
    if name in codes.known():
        return codes.page(name)
    from .. import reference

    return reference.entry(name) if name in reference.names() else ""


def _unknown_name_text(name: str) -> str:
    from .. import reference

    known = nearest(name, {*codes.known(), *reference.names()})
    near = known if known.startswith("did") else "codes are shown in brackets"
    return f"msrl-compile: no code, statement, attribute or function is called `{name}`; {near}\n"


def _simulation_text(result: Compilation, options: argparse.Namespace) -> str:
    from ..compiler.pipeline import no_deploy
    from ..simulation.flags import simulate_by_flags

    if result.plan is None:
        raise no_deploy()
    return simulate_by_flags(result.plan, options, *_screen_size(options))


def _result_text(result: Compilation, options: argparse.Namespace) -> str:
    """Return the result of the requested stage as text, in the requested format.

    The flags in `options` select the stage and the format.
    """
    from ..compiler.pipeline import no_deploy

    stage = options.emit or ("plan" if result.plan is not None or options.diff else "graph")
    if stage in ("placed", "plan", "ray") and result.placed is None:
        raise no_deploy()
    if options.diff is not None:
        assert result.plan is not None
        return _diff_text(result.plan, options)
    if options.format == "json":
        from ..emit import json

        if stage == "ast":
            return json.tree_json(result.tree)
        if stage == "graph":
            assert result.graph is not None
            return json.graph_json(result.graph)
        assert result.placed is not None
        if stage == "placed":
            return json.placed_json(result.placed)
        assert result.plan is not None
        return result.plan.to_json()
    if options.format in PICTURES:
        return _picture_text(result, stage, options.format)
    if stage == "ast":
        from ..dsl.tree_text import show

        return show(result.tree)
    if stage == "ray":
        from ..emit.ray import ray_script

        assert result.plan is not None
        return ray_script(result.plan)
    from ..emit import text
    from ..emit.diff import extension_text

    width, colour = _screen_size(options)
    if stage == "graph":
        assert result.graph is not None
        graph = text.graph_text(result.graph, width, colour)
        if not options.emit:
            return f"{graph}No deploy, so no plan: add one, or `--model PRESET` plans for the machine at hand.\n"
        base = result.base()
        return f"{graph}\n{extension_text(base, result.graph, width, colour)}" if base else graph
    assert result.placed is not None
    if stage == "placed":
        return text.placed_text(result.placed, width, colour)
    assert result.plan is not None
    if options.why:
        from ..compiler.pipeline import search_unstated
        from ..emit.search_report import why_text

        other = search_unstated(result.plan, options.budget)
        return why_text(result.plan, other, width, colour)
    return text.plan_text(result.plan, width, colour)


def _flag_against_diff(options: argparse.Namespace) -> str:
    """Return the first given flag that cannot be combined with `--diff`.

    Returns "" if all given flags can be combined with `--diff`.
    """
    flags = {"--check": options.check, "--why": options.why, "--simulate": options.simulate}
    flags[f"--emit {options.emit}"] = options.emit not in (None, "plan")
    flags[f"--format {options.format}"] = options.format in PICTURES
    return next((flag for flag, is_given in flags.items() if is_given), "")


def _diff_text(plan: Plan, options: argparse.Namespace) -> str:
    from ..data.plan_paths import make_existing_absolute
    from ..emit.diff import diff_json, diff_text, difference

    changes = difference(
        load_plan(options.diff), make_existing_absolute(plan)
    )  # a plan from a file has paths relative to it
    return (
        diff_json(changes, options.diff)
        if options.format == "json"
        else diff_text(changes, options.diff, *_screen_size(options))
    )


def _picture_text(result: Compilation, stage: str, form: str) -> str:
    """Return a picture of the result of a stage, as Graphviz text or an HTML page."""
    graph = result.graph
    plan = result.placed if stage == "placed" else result.plan
    assert graph is not None
    if form == "dot":
        from ..emit import picture
        from ..emit.dot import dot_text

        if stage == "graph":
            return dot_text(picture.graph_picture(graph))
        assert plan is not None
        return dot_text(picture.placed_picture(plan) if stage == "placed" else picture.plan_picture(plan))
    from ..emit import html

    if stage == "graph":
        return html.graph_html(graph)
    assert plan is not None
    if stage == "placed":
        return html.placed_html(plan)
    from ..simulation.timeline import timeline

    return html.plan_html(plan, timeline(plan))


def _screen_size(options: argparse.Namespace) -> tuple[int, bool]:
    """Return the width of the output in columns, and whether the output has color."""
    from ..diagnostics.text_page import WIDTH

    to_terminal = options.output is None and sys.stdout.isatty()
    colour = options.color == "always" or (options.color == "auto" and to_terminal and "NO_COLOR" not in os.environ)
    return max(80, os.get_terminal_size().columns) if to_terminal else WIDTH, colour


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of seconds, not `{text}`")
    return float(text)


def _count(text: str) -> int:
    if not (number := parse_natural(text)):
        raise argparse.ArgumentTypeError("expected a whole number of 1 or more, not `0`")
    return number
