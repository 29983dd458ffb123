"""A program of three generations: problems are made of prompts, of problems solutions and one attempt beside them, and
some solutions are trained on twice. Its functions are those of this file; `columns` is an iteration of it, by hand."""

from pathlib import Path

import numpy as np

PROGRAM = """
algorithm self_play {
  columns {
    prompt    : i32[<= 6]
    answer    : text
    problem   : i32[<= 5]
    solution  : i32[<= 5]
    attempt   : i32[<= 5]
    old_logp  : f32[solution]
    right     : f32
    plain     : f32
    baseline  : f32 per problem
    advantage : f32[solution]
  }
  worker actor : policy
  worker host  : function
  source(4) -> prompt, answer
  node propose: actor.generate(prompt) -> problem { samples = 2 }
  node solve: actor.generate(prompt, problem) -> solution { samples = 4 }
  node try_once: actor.generate(prompt, problem) -> attempt { samples = 1, temperature = 0 }
  node host.posed(problem) { keep = "generations.py:posed" }
  node host.right(solution, answer) -> right { call = "generations.py:right" }
  node host.plain(attempt, answer) -> plain { call = "generations.py:right"(solution = attempt) }
  node host.baseline(plain) -> baseline { call = "generations.py:mean", per = problem }
  node host.twice(right) { select = "generations.py:twice", per = problem }
  node host.advantage(solution, right, baseline) -> advantage { call = "generations.py:over" }
  node actor.infer(prompt, problem, solution) -> old_logp
  node actor.update(prompt, problem, solution, old_logp, advantage) { loss = clip(0.2), optimizer = adamw(lr = 1e-4) }
  source -> propose -> host.posed -> solve, try_once
  solve -> host.right -> host.twice -> actor.infer, host.advantage
  try_once -> host.plain -> host.baseline -> host.advantage
  actor.infer, host.advantage -> actor.update
  actor.update => propose, solve, try_once
}
cluster laptop { device = "cpu", nodes = 1, devices_per_node = RANKS }
deploy self_play on laptop {
  model policy = "./model"
  data source = "train.jsonl" { prompt = "prompt", answer = "answer" }
  LAYOUT
  run { iterations = 2, seed = 1 }
}
"""


def posed(problem: str) -> bool:
    return len(problem) != 2


def right(solution: str, answer: str) -> float:
    return float(solution[:1] in answer and len(solution) > 1)


def mean(plain):
    return float(np.mean(plain))


def twice(right):
    """The second and the third of four, and the second again."""
    return [1, 2, 1]


def over(solution, right, baseline):
    return np.full(len(solution), right - baseline)


def program(folder: Path, ranks: int = 1, layout: str = "") -> Path:
    """The program in a folder that holds its model and its data."""
    (folder / "generations.py").unlink(missing_ok=True)
    (folder / "generations.py").symlink_to(__file__)
    (folder / "p.rlg").write_text(PROGRAM.replace("RANKS", str(ranks)).replace("LAYOUT", layout))
    return folder / "p.rlg"


def columns():
    """Problems 3 and 5 of eight are kept; of the first one's solutions the second goes on twice, of the other one's
    thrice."""
    from msrl_graph.runtime.data.columns import ColumnData, ColumnRows, Verdicts, ragged, texts

    draw = np.random.default_rng(0)

    def tokens(name, rows):
        ids = ragged([draw.integers(3, 13, draw.integers(1, 6)) for _ in rows], np.int32)
        logp = ColumnData(draw.normal(size=len(ids.values)).astype(np.float32), ids.offsets)
        return {name: ColumnRows(rows, ids), f"{name}.logp": ColumnRows(rows, logp)}

    prompts = np.arange(4)
    problems = np.arange(8)
    kept = np.array([3, 5])
    solutions = np.concatenate([np.arange(12, 16), np.arange(20, 24)])
    chosen = np.array([13, 14, 21, 23, 32 + 13, 32 + 21, 64 + 21])
    made = {"prompt": tokens("prompt", prompts)["prompt"], "answer": ColumnRows(prompts, texts(["21", "ä", "", "1"]))}
    made |= tokens("problem", problems) | tokens("solution", solutions) | tokens("attempt", kept)
    for name in ("old_logp", "advantage"):
        made[name] = tokens("", chosen)[".logp"]
    for name, rows in (("right", solutions), ("plain", kept), ("baseline", kept)):
        made[name] = ColumnRows(rows, ColumnData(draw.normal(size=len(rows)).astype(np.float32)))
    made["host.posed.times"] = Verdicts(problems, ColumnData(np.isin(problems, kept).astype(np.int64)))
    made["host.twice.times"] = Verdicts(solutions, ColumnData(np.array([0, 2, 1, 0, 0, 3, 0, 1])))
    return made
