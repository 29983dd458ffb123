"""Two small programs with all that a training half computes: rollouts with a critic, a reward model and a teacher;
pairs from data."""

import re
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from stage import EXAMPLE, PROMPTS, Stage

from msrl_graph import algorithms, compile
from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.sharding.layout import slices

ROLLOUT = """
algorithm tiny {
  columns {
    prompt    : i32[<= 6]
    response  : i32[<= 5]
    mask      : bool[response]
    old_logp  : f32[response]
    ref_logp  : f32[response]
    top_logp  : f32[response, 3]
    top_ids   : i32[response, 3]
    value     : f32[response]
    score     : f32
    advantage : f32[response]
    returns   : f32[response]
  }
  worker actor   : policy
  worker teacher : policy frozen
  worker critic  : value
  worker judge   : reward_model frozen
  worker host    : function
  source(4) -> prompt
  node actor.generate(prompt) -> response, mask { samples = 2, temperature = 0.8 }
  node actor.infer(prompt, response) -> old_logp
  node teacher.infer(prompt, response) -> ref_logp, top_logp, top_ids
  node critic.infer(prompt, response) -> value
  node judge.infer(prompt, response) -> score
  node host.gae(response, score, value) -> advantage, returns { call = gae(), per = batch }
  node critic.update(prompt, response, mask, value, returns) { loss = value_clip(0.5), optimizer = adamw(lr = 1e-3) }
  node actor.update(prompt, response, mask, old_logp, ref_logp, advantage, top_logp, top_ids) {
    loss = clip(0.2, ratio = sequence) + 0.1 * kl() - 0.01 * entropy() + 0.1 * distil(reverse)
    optimizer = adamw(lr = 1e-3)
  }
  source -> actor.generate -> actor.infer, teacher.infer, critic.infer, judge.infer -> host.gae
  host.gae -> critic.update, actor.update
  actor.update => actor.generate
}
"""
PAIRS = """
algorithm pairs {
  columns {
    prompt       : i32[<= 6]
    chosen       : i32[<= 5]
    rejected     : i32[<= 5]
    ref_chosen   : f32[chosen]
    ref_rejected : f32[rejected]
  }
  worker actor     : policy
  worker reference : policy frozen
  source(8) -> prompt, chosen, rejected
  node reference.infer(prompt, chosen, rejected) -> ref_chosen, ref_rejected
  node actor.update(prompt, chosen, rejected, ref_chosen, ref_rejected) {
    loss = dpo(0.1), optimizer = adamw(lr = 1e-3)
  }
  source -> reference.infer -> actor.update
}
"""
SCORES = """
algorithm scores {
  columns {
    prompt       : i32[<= 6]
    chosen       : i32[<= 5]
    rejected     : i32[<= 5]
  }
  worker judge : reward_model
  source(8) -> prompt, chosen, rejected
  node judge.update(prompt, chosen, rejected) { loss = bradley_terry(), optimizer = adamw(lr = 1e-3) }
  source -> judge.update
}
"""
WHERE = """
cluster laptop { device = "cpu", nodes = 1, devices_per_node = RANKS }
deploy here on laptop {
  data source = "train.jsonl" { prompt = "prompt" }
  MORE
}
"""


def planned(text, *changes, ranks=1, more="", judge="./model"):
    """The plan of a program, its text changed."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    models = {"policy": "./model", "value": "./model", "reward_model": judge}
    stated = [f'model {kind} = "{path}"' for kind, path in models.items() if f": {kind}" in text]
    where = WHERE.replace("RANKS", str(ranks)).replace("MORE", "\n  ".join([*stated, more]))
    if given := re.search(r"source\(8\) -> (.*)", text):
        fields = ("prompt", *["answer"] * 2)
        stated = [f'{c} = "{field}"' for c, field in zip(given[1].split(", "), fields, strict=False)]
        where = where.replace('{ prompt = "prompt" }', f"{{ {', '.join(stated)} }}")
    return compile(EXAMPLE / "tiny.rlg", text=text + where.replace("deploy here", f"deploy {text.split()[1]}"))


def scoring(folder, seed=0, architecture="Qwen2ForSequenceClassification"):
    """The example's model with a head of scores."""
    shutil.copytree(EXAMPLE / "model", folder)
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace("Qwen2ForCausalLM", architecture).replace("{", '{"id2label": {"0": "score"},', 1)
    )
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    torch.manual_seed(seed)
    save_file({**tensors, "score.weight": torch.randn(1, 128)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rollout(stage):
    """Eight responses with all that the updates read."""
    prompts = ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2))
    draw = np.random.default_rng(0)
    response = ragged([draw.integers(3, 13, n) for n in (3, 5, 1, 4, 2, 5, 3, 2)], np.int32)
    mask = ColumnData(draw.random(len(response.values)) < 0.7, response.offsets)
    mask.values[:3] = False  # of the first row nothing is left
    columns = {
        "prompt": prompts,
        "response": response,
        "mask": mask,
        "response.logp": ColumnData(np.zeros(25, np.float32), response.offsets),
    }
    for name in ("teacher.infer", "critic.infer", "judge.infer"):
        columns |= stage.act(name, columns)
    old = stage.act("actor.infer", columns)["old_logp"]
    columns["old_logp"] = ColumnData(old.values + draw.normal(size=25).astype(np.float32) * 0.2, old.offsets)
    rows = {c: [columns[c][i] for i in range(8)] for c in ("response", "score", "value")}
    for name, found in zip(("advantage", "returns"), algorithms.load("function", "gae")(*rows.values()), strict=True):
        columns[name] = ragged(found, np.float32)
    columns["returns"].values[:] += draw.normal(size=25)  # some of the values are clipped
    return columns


def pairs(stage):
    """Eight pairs."""
    draw = np.random.default_rng(0)
    columns = {"prompt": ragged(PROMPTS, np.int32).take(np.repeat(np.arange(4), 2))}
    for name, sizes in (("chosen", (3, 5, 1, 4, 2, 5, 3, 2)), ("rejected", (1, 2, 5, 4, 4, 3, 1, 1))):
        columns[name] = ragged([draw.integers(3, 13, n) for n in sizes], np.int32)
    return columns | (stage.act("reference.infer", columns) if "reference" in stage.engines.trainers else {})


def apart(stage):
    """The weights of a critic's head are no longer zero, and a policy's not those of its teacher."""
    torch.manual_seed(1)
    with torch.no_grad():
        for worker, name, shape in (("critic", "score.weight", (1, 128)), ("actor", "model.norm.weight", (128,))):
            noise = torch.randn(shape) * 0.1
            for piece in stage.engines.trainers[worker].shards() if worker in stage.engines.trainers else ():
                if piece.name == name:
                    piece.tensor.add_(noise[slices(piece.box)])
    return stage


def staged(text, *changes, rank=0, **options):
    """A stage on a plan."""
    stage = apart(Stage(planned(text, *changes, **options), rank))
    stage.context.watch.comparison = None  # what it is handed was not drawn
    return stage


def built(text, *changes, **options):
    """A stage on a plan, and the rows that its updates read."""
    stage = staged(text, *changes, **options)
    return stage, (pairs if "chosen" in text else rollout)(stage)
