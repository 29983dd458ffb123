"""Programs whose generations are behind their updates, and what their runs leave."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from msrl_graph.runtime.weights import checkpoint

APART = [
    ("layout actor.update   { dp = 2, zero = 3 }", "layout actor.update { dp = 1 }"),
    ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 1 }\n  apart actor.generate, actor.update"),
    (
        "    advantage : f32[response]",
        "    advantage : f32[response]\n    gen_logp : f32[response]\n    made : i32[response]",
    ),
    ("-> response {", "-> response, gen_logp, made {"),
    ("clip(0.2)", "clip(0.2, old_logp = gen_logp)"),
    ("update(prompt, response, old_logp,", "update(prompt, response, gen_logp,"),
    ("  node actor.infer(prompt, response) -> old_logp\n", ""),
    ("    old_logp  : f32[response]\n", ""),
    ("-> actor.infer, reference.infer", "-> reference.infer"),
    ("  actor.infer, reference.infer", "  reference.infer"),
]


def stale(versions, every=1):
    edge = "actor.update => actor.generate"
    return (edge, f"{edge} {{ staleness = {versions}, every = {every} }}")


def saved(place, out, version):
    """The model with the actor's weights after so many iterations."""
    model = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=torch.float32)
    if version:
        folder = place.folder / out / "checkpoints" / f"{version:06d}"
        source = checkpoint.CheckpointSource(folder, checkpoint.read_manifest(folder))
        for name, parameter in model.named_parameters():
            parameter.data = source.read(f"actor/weights/{name}", tuple((0, n) for n in parameter.shape), torch.float32)
    return model


@torch.no_grad()
def off(model, row, temperature=1.0):
    """How far each token's is."""
    tokens = torch.tensor([[*row["prompt"], *row["response"]]])
    found = (model(tokens).logits[0, len(row["prompt"]) - 1 : -1] / temperature).log_softmax(-1)
    told = found.gather(1, tokens[0, len(row["prompt"]) :, None])[:, 0]
    return (told - torch.tensor(row["gen_logp"])).abs().numpy()


def named(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
