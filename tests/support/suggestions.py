"""Programs in which one word is wrong, and the one diagnostic of them."""

from __future__ import annotations

from pathlib import Path

from language import context, diagnose

from msrl_graph.diagnostics import Diagnostic

PROGRAM = """algorithm mine {
  columns {
    prompt    : i32[<= 6]
    answer    : text
    response  : i32[<= 5]
    old_logp  : f32[response]
    ref_logp  : f32[response]
    reward    : f32
    advantage : f32[response]
  }
  worker actor     : policy
  worker reference : policy frozen
  worker host      : function
  source(8) -> prompt, answer
  node actor.generate(prompt) -> response { samples = 4 }
  node actor.infer(prompt, response) -> old_logp
  node reference.infer(prompt, response) -> ref_logp
  node host.reward(response, answer) -> reward { call = exact_match() }
  node host.advantage(response, reward) -> advantage { call = group_norm(), per = prompt }
  node actor.update(prompt, response, old_logp, ref_logp, advantage) {
    loss       = clip(0.2) + 0.01 * kl(low_var)
    optimizer  = adamw(lr = 2e-4)
    mini_batch = 16
  }
  source -> actor.generate
  actor.generate -> actor.infer, reference.infer, host.reward
  host.reward -> host.advantage
  actor.infer, reference.infer, host.advantage -> actor.update
  actor.update => actor.generate
}
"""


EVALUATION = """cluster laptop { device = "cpu", devices_per_node = 2 }
deploy mine on laptop {
  model policy = "qwen2.5-0.5b"
  data source = "train.jsonl"
  data test = "test.jsonl"
  evaluate test { report = reward }
}
"""


def change(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    return text


def only(program: str, folder: Path = Path()) -> Diagnostic:
    """The one error of a program."""
    (found,) = (d for d in diagnose(program, context(folder)) if d.severity == "error")
    return found
