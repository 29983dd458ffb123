"""Epochs of uneven mini-batches, with warmup, decay and clipping of gradients: weights and norms are those of torch alone, in float64."""

import numpy as np
import pytest
import ranks
import torch
from safetensors.torch import load_file
from stage import share
from test_training import TASK, net, token_logps
from tiny import ROLLOUT, built, scoring, staged
from torch import distributed as dist

from msrl_graph.runtime.dock import Batch
from msrl_graph.runtime.report import Report

ROUNDS = [[0, 4, 7], [1, 2, 6], [3, 5], [2, 3, 7], [0, 1, 5], [4, 6]]  # two epochs of eight rows
CHANGES = (
    ("loss = clip(0.2, ratio = sequence) + 0.1 * kl() - 0.01 * entropy() + 0.1 * distil(reverse)", "loss = clip(0.2) + 0.1 * kl(mse)"),
    (
        "optimizer = adamw(lr = 1e-3)\n  }",
        "optimizer = adamw(lr = 1e-3, warmup = 4, weight_decay = 0.1, betas = [0.8, 0.95], eps = 1e-3)\n    clip_grad = 0.05\n  }",
    ),
)
LAYOUTS = ("dp = 2, zero = 0", "dp = 2, zero = 1", "dp = 2, zero = 2", "dp = 2, zero = 3", "tp = 2")
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # columns that the shorter loss leaves


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Eight rows, and what torch makes of the model by them: its weights, and the norm of each step's gradient."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("steps")
    store, judge = dist.FileStore(str(folder / "store"), 1), str(scoring(folder / "judge"))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    stage, columns = built(ROLLOUT, *CHANGES, judge=judge)
    model, norms = net(stage, "actor"), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3)
    for step, rows in enumerate(ROUNDS, 1):
        optimizer.zero_grad()
        torch.cat([loss(model, columns, row) for row in rows]).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.param_groups[0]["lr"] = 1e-3 * min(step / 4, 1)
        optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert min(norms) > 0.1 and max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3
    yield judge, columns, after, norms, folder
    dist.destroy_process_group()


def loss(model, columns, row):
    """clip(0.2) + 0.1 kl(mse) of each token that the mask leaves."""
    where = torch.from_numpy(columns["mask"][row])
    whole, tokens = (x[where] for x in token_logps(model, columns, row, "response", 0.8))
    logp = whole.gather(1, tokens)[:, 0]
    old, ref, advantage = (torch.from_numpy(columns[c][row]).double()[where] for c in ("old_logp", "ref_logp", "advantage"))
    r = (logp - old).exp()
    return torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.2)) + 0.1 * (logp - ref) ** 2 / 2


def learn(rank, _, layout, judge, columns, micro, out):
    """The same steps by a rank of a plan, whose first group has most of each mini-batch."""
    world = dist.get_world_size()
    more = f"layout actor.update, critic.update, teacher.infer, judge.infer {{ {layout} }}"
    stage = staged(ROLLOUT, *CHANGES, rank=rank, ranks=world, judge=judge, more=more)
    node, placement, norms = stage.plan.graph.node("actor.update"), stage.plan.placement("actor.update"), []
    placement.engine.options["micro_batch"] = micro
    for rows in ROUNDS:
        parts, report = [rows[1:], rows[:1]] if placement.layout.dp == 2 else [rows], Report("")
        mine = np.array(parts[placement.layout.coordinates(rank).dp])
        elements = {c: int(columns[c].lengths[rows].sum()) for c in node.reads}
        part = share(mine, max(map(len, parts)), len(rows), elements)
        stage._update(node, TASK, Batch(part, mine, {c: columns[c].take(mine) for c in node.reads}), report)
        norms += [report.sums["grad_norm"][0]] if rank == 0 else []
    stage.save("actor", str(out / "actor"))
    if rank == 0:
        torch.save(norms, out / "norms")


def check(learnt, out):
    _, _, expected, norms, _ = learnt
    found = load_file(out / "actor" / "model.safetensors")
    assert torch.load(out / "norms") == pytest.approx(norms, rel=2e-5)
    for name, weights in found.items():
        assert torch.allclose(weights.double(), expected[name], rtol=1e-6, atol=2e-6), name


@pytest.mark.parametrize("micro", [0, 1])
def test_steps_are_those_of_torch(learnt, micro, tmp_path):
    judge, columns, *_ = learnt
    learn(0, None, "dp = 1", judge, columns, micro, tmp_path)
    check(learnt, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_two_ranks_are_those_of_torch(learnt, layout, tmp_path):
    judge, columns, *_ = learnt
    ranks.run(2, learn, layout, judge, columns, 1, tmp_path)
    check(learnt, tmp_path)
