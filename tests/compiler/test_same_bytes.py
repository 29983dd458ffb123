"""The same input gives the same bytes, in every form, whatever order Python's sets happen to have in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# What a process with another seed of hashes does: every program of the project, each plan in every form, and
# the diagnostics of an eighth of the corpus.
PROCESS = """
import hashlib, json, sys
from broken import FILES, PLANNED, ROOT, compiled
from msrl_graph.compiler.sources import collect_texts
from msrl_graph.diagnostics import render
from msrl_graph.emit import html, picture
from msrl_graph.emit.dot import dot_text
from msrl_graph.emit.json import graph_json
from msrl_graph.emit.ray import ray_script
from msrl_graph.emit.text import plan_text
from msrl_graph.simulation.timeline import timeline

told = {}
corpus = [p for p in FILES if p.parent.name == "corpus"]
for path in [*(p for p in FILES if p not in corpus), *corpus[::8]]:
    name = str(path.relative_to(ROOT))
    result, found = compiled(path.read_text(encoding="utf-8"), folder=path.parent, **PLANNED.get(name, {}))
    shown = {"diagnostics": "".join(render(d, collect_texts(None, found)) for d in found)}
    if result is not None and name in PLANNED:
        plan = result.plan
        shown |= {"graph": graph_json(result.graph), "json": plan.to_json()}
        shown |= {"text": plan_text(plan), "script": ray_script(plan)}
        shown |= {"dot": dot_text(picture.plan_picture(plan)), "html": html.plan_html(plan, timeline(plan))}
    for form, text in shown.items():
        told[f"{name} {form}"] = hashlib.sha256(text.encode()).hexdigest()
json.dump(told, sys.stdout)
"""


@pytest.mark.slow
def test_another_order_of_hashes_changes_no_byte() -> None:
    path = os.pathsep.join((os.path.dirname(__file__), *sys.path))  # noqa: PTH120
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": s, "PYTHONPATH": path},
        )
        for s in ("1", "2")
    ]
    one, two = (json.loads(p.communicate(timeout=200)[0]) for p in processes)
    assert {p.returncode for p in processes} == {0}
    assert len(one) > 95 and sum(name.endswith(" html") for name in one) == 11
    assert [name for name in one if one[name] != two[name]] == []
