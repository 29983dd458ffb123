"""Random programs with staleness for the simulation: with pools, refills, evaluations, checkpoints, rows whose lengths
differ, slow devices and slow functions.

Invariant: each compiles, and its generations may be behind its update.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from msrl_graph.simulation import Simulation

PROGRAM = """algorithm a {{
  columns {{
    prompt    : i32[<= 64]
    answer    : text
    response  : i32[<= 512]
    gen_logp  : f32[response]
    reward    : f32
    score     : f32
    advantage : f32[response]
  }}
  worker actor  : policy
  worker judge  : reward_model frozen {{ model = judge }}
  worker host   : function
  source({prompts}) -> prompt, answer
  node actor.generate(prompt) -> response, gen_logp {{ samples = {samples} }}
  node judge.infer(prompt, response) -> score
  node host.reward(response, answer) -> reward {{ call = exact_match() }}
  node host.advantage(response, reward) -> advantage {{ call = group_norm(), per = prompt }}
  node actor.update(prompt, response, gen_logp, score, advantage) {{
    loss = clip(0.2, old_logp = gen_logp), optimizer = adamw(lr = 1e-6), mini_batch = {mini_batch}
  }}
  source -> actor.generate, judge.infer, host.reward, actor.update
  actor.generate -> judge.infer, host.reward -> host.advantage -> actor.update
  judge.infer -> actor.update
  {filter}
  actor.update => actor.generate {{ staleness = {staleness}, every = {every} }}
}}
cluster c {{ device = "cpu", devices_per_node = 3 }}
deploy a on c {{
  model policy = "tiny"
  model judge  = "tiny"
  data source  = "tiny.jsonl" {{ prompt = "prompt", answer = "answer" }}
  data test    = "tiny.jsonl" {{ prompt = "prompt", answer = "answer" }}
  {places}
  {evaluate}
  run {{ iterations = 250{save}, deterministic = {deterministic} }}
}}
"""
REFILL = """node host.keep(reward) { keep = reward > 0, per = prompt, refill = 4 }
  host.reward -> host.keep -> actor.update"""


@dataclass(frozen=True)
class Stale:
    """A program, how old its weights may be, which of them are sent, and what to simulate it with."""

    text: str
    staleness: int
    sent: tuple[int, ...]  # multiples of these
    options: dict[str, Any]


def stale(draw: random.Random) -> Stale:
    staleness = draw.randint(1, 4)
    prompts = draw.choice([4, 8])
    samples = draw.choice([2, 4])
    deterministic = draw.random() < 0.2
    every = draw.choice([1, draw.randint(1, staleness + 1)])
    refills = not deterministic and draw.random() < 0.4
    places = ["apart actor.generate, actor.update", "apart actor.generate, actor.update, judge.infer"]
    if every == 1 and not refills:  # else nothing may be ahead of itself
        together = "place actor.generate, actor.update together"
        places += [
            f"{together}\n  apart actor.update, judge.infer",
            f"{together}\n  place actor.update, judge.infer together",
        ]
    evaluate = draw.choice([0, draw.randint(1, 7)])
    save = draw.choice([0, 0, 5])
    text = PROGRAM.format(
        prompts=prompts,
        samples=samples,
        mini_batch=prompts * samples // draw.choice([1, 2]),
        filter=REFILL if refills else "",
        staleness=staleness,
        every=every,
        places=draw.choice(places),
        evaluate=f"evaluate test {{ every = {evaluate}, samples = 1, report = [score] }}" if evaluate else "",
        save=f", save = {save}" if save else "",
        deterministic=str(deterministic).lower(),
    )
    lengths = f"lognormal({draw.choice([10, 100, 300])}, {draw.choice([0.5, 1, 1.5])})"
    slow = {"host.reward": f"lognormal({draw.choice([0.0001, 0.01, 0.3])}, 1)"}
    options = {"lengths": lengths, "function_seconds": slow, "seed": draw.randrange(1000)}
    sent = tuple(n for n in (every, evaluate, save) if n)
    return Stale(text, staleness, sent, options | {"stragglers": draw.choice(["", "30% x3", "60% x10"])})


def ages(found: Simulation, program: Stale) -> Counter[int]:
    """How many rows of a simulation are how many versions old; fails where one is older than it may be, or of a version
    that is not sent, older than that of those before it, or yet to come."""
    counted: Counter[int] = Counter()
    last = 0
    for number, iteration in enumerate(found.iterations):
        version = number - iteration.most_stale
        assert iteration.staleness == iteration.most_stale, "all rows of an iteration are of one version"
        least = max(0, number - program.staleness)
        assert least <= version <= number and version >= last, (number, version, last)
        assert any(version % many == 0 for many in program.sent), (version, program.sent)
        counted[iteration.most_stale] += found.plan.graph.rows[-1]
        last = version
    return counted
