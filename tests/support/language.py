"""Programs through the front half of the compiler (parse, lower, checks) with the package's own names, for tests of the
language."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from msrl_graph import algorithms
from msrl_graph.backends import ENGINES
from msrl_graph.checks.table import check_graph
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import ProgramSource
from msrl_graph.diagnostics import Diagnostic, Fault, Span
from msrl_graph.dsl import ast
from msrl_graph.dsl.lower import LoweredProgram, LoweringContext, LoweringFault, lower
from msrl_graph.dsl.parse import parse
from msrl_graph.model import models
from msrl_graph.runtime.driver import supervisor

TESTS = Path(__file__).parent.parent
PROGRAMS = sorted((TESTS / "programs").glob("*.rlg"))


def context(
    folder: Path = TESTS / "programs",
    deploy: str | None = None,
    model: str | None = None,
    sets: Mapping[str, str] | None = None,
) -> LoweringContext:
    def load(target: str, is_file: bool, span: Span) -> ast.File:
        path = folder / target if is_file else algorithms.FOLDER / f"{target}.rlg"
        try:
            return parse(path.read_text(encoding="utf-8"), target if is_file else path.name)
        except (OSError, ValueError):
            raise Fault(Diagnostic("missing-file", f"nothing to import is called `{target}`", span)) from None

    return LoweringContext(load, algorithms.library(), ENGINES, models.load, folder, deploy, model, sets or {})


def lowered(text: str, within: LoweringContext | None = None, name: str = "program.rlg") -> LoweredProgram:
    return lower(parse(text, name), within or context())


def diagnose(text: str, within: LoweringContext | None = None, name: str = "program.rlg") -> list[Diagnostic]:
    """All that the front half tells of a program."""
    try:
        result = lowered(text, within, name)
    except LoweringFault as fault:
        more = check_graph(fault.graph, fault.library, fault.diagnostics, dropped=fault.dropped) if fault.graph else []
        return [*fault.diagnostics, *more]
    except Fault as fault:
        return list(fault.diagnostics)
    reported = {c for e in (result.deploy.evaluations if result.deploy else ()) for c in e.columns}
    return [*result.warnings, *check_graph(result.graph, result.library, result.warnings, reported, result.dropped)]


def head(program: str) -> tuple[str | None, str | None, dict[str, str]]:
    """What lines `# --deploy NAME`, `# --model NAME` and `# --set NAME=VALUE` of a program say in place of the command
    line."""
    options = dict(re.findall(r"^# --(deploy|model) (\S+)$", program, re.MULTILINE))
    return options.get("deploy"), options.get("model"), dict(re.findall(r"^# --set (\w+)=(.*)$", program, re.MULTILINE))


def told(text: str, folder: Path) -> list[Diagnostic]:
    """All that msrl-compile tells of a program in a folder and, after a line `# run`, what msrl-run does before it
    starts anything."""
    deploy, model, sets = head(text)
    with contextlib.chdir(folder):
        try:
            done = translate(ProgramSource("program.rlg", text, Path()), deploy=deploy, model=model, sets=sets)
            runs = "\n# run\n" in f"\n{text}" and done.plan is not None
            return [*done.warnings, *(supervisor.prepare(done.plan).warnings if runs else ())]
        except Fault as fault:
            return list(fault.diagnostics)
