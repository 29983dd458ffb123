"""Weights of draws that a user's function gives."""

from __future__ import annotations

import json
from pathlib import Path

from stage import EXAMPLE

from msrl_graph import compile
from msrl_graph.runtime.data.dataset import Dataset
from msrl_graph.runtime.functions.draw_weights import DrawWeights

PROGRAM = """
import grpo
algorithm mine extends grpo {{
  columns {{ difficulty : f32 }}
  {state}
  source(prompts) -> prompt, answer, difficulty {{ weights = {weights} }}
}}
cluster laptop {{ device = "cpu" }}
deploy mine on laptop {{
  set prompts = 2
  set prompt_len = 6
  set response_len = 5
  model policy = "{model}"
  data source  = "rows.jsonl"
}}
"""


ROWS = [("37+48=", "85", 3.0), ("a prompt longer than its bound", "x", 9.0), ("2+2=", "4", 1.0), ("5+5=", "10", 2.0)]


def weigher(folder: Path, weights: str, source: str = "", state: str = "") -> DrawWeights:
    (folder / "mine.py").write_text(source)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "answer": a, "difficulty": d}) + "\n" for p, a, d in ROWS)
    )
    program = PROGRAM.format(weights=weights, state=state, model=EXAMPLE / "model")
    plan = compile(str(folder / "p.rlg"), text=program)
    return DrawWeights(plan, Dataset(plan.deploy.data["source"], plan))
