"""Log-probabilities, norms and updates by torch alone."""

import math

import numpy as np
import torch
from stage import EXAMPLE

from msrl_graph.runtime.process.task import Task

TASK = Task("train", 3, 4, 2)


def net(stage, worker, kind="ForCausalLM"):
    """A worker's model as transformers has it, in float64."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(EXAMPLE / "model", num_labels=1)
    model = getattr(transformers, f"Qwen2{kind}")(config).double()
    wrong = model.load_state_dict(
        {s.name: s.tensor.double() for s in stage.engines.trainers[worker].shards()}, strict=True
    )
    assert not wrong.missing_keys
    return model


def sequence(columns, i, *names):
    return torch.from_numpy(np.concatenate([columns[c][i] for c in names]).astype(np.int64))[None]


def token_logps(model, columns, i, scored, temperature=1.0):
    """The log-probabilities of the whole vocabulary before each token of a row's scored column, and the tokens."""
    ids = sequence(columns, i, "prompt", scored)
    tokens = columns[scored][i].astype(np.int64)
    logits = model(ids).logits[0, len(columns["prompt"][i]) - 1 : -1] / temperature
    return logits.log_softmax(-1), torch.from_numpy(tokens)[:, None]


def close(got, expected, **more):
    return np.allclose(
        got, np.concatenate([e.detach().numpy() for e in expected]), **{"rtol": 1e-5, "atol": 1e-5, **more}
    )


def norm(model):
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
