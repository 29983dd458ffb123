"""Each engine of this environment compared with transformers, for each model family on small layouts.

Prints a table of the largest differences (tests/support/conformance.py says of what) and, last, one line of JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import smoke

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import conformance
import ranks
from rich.console import Console
from rich.table import Table

from msrl_graph.backends import ENGINES, can_build, packages
from msrl_graph.hardware.device_kinds import HOST

KINDS = ("logits", "logp", "gradient", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=conformance.WRITTEN, default=[*conformance.WRITTEN])
    options = smoke.parse(parser, families=["qwen2"])
    able = {name: spec for name, spec in ENGINES.items() if can_build(name)}
    engines = [name for name, spec in able.items() if not packages.missing_packages(spec, HOST)]
    table = Table(title="largest differences from transformers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "engine", "layouts", *KINDS):
        table.add_column(heading)
    cells = refused = 0
    most = dict.fromkeys(KINDS, 0.0)
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            found = conformance.measure(family, engines, Path(folder))
            model = conformance.load(str(Path(folder) / family))
        cells += len(found)
        for engine in engines:
            own = {layout: values for (name, layout), values in found.items() if name == engine}
            if own:
                largest = {kind: max(values.get(kind, 0.0) for values in own.values()) for kind in KINDS}
                most = {kind: max(most[kind], largest[kind]) for kind in KINDS}
                shown = (f"{largest[kind]:.1e}" if largest[kind] else "" for kind in KINDS)
                table.add_row(family, engine, ", ".join(own), *shown)
            else:
                refused += 1
                table.add_row(
                    family, engine, "refused: " + ", ".join(model.list_lacking(ENGINES[engine].capabilities.features))
                )
    ranks.end()
    Console(width=120).print(table)
    print(json.dumps({"bench": "conformance", "cells": cells, "refused": refused, **most}))


if __name__ == "__main__":
    main()
