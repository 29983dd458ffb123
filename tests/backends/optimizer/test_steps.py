"""Epochs of uneven mini-batches, with schedules, decay and clipping of gradients, by each optimizer: weights and norms
are those of torch alone, in float64, and rates those of transformers."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import ranks
import torch
from safetensors.torch import load_file
from stage import same, share
from tiny import ROLLOUT, built, scoring, staged
from torch import distributed as dist
from training_math import TASK, net, token_logps
from transformers import get_scheduler

from msrl_graph.algorithms.optimizers import adamw, muon, sgd
from msrl_graph.backends.devices import Devices, TorchDevice
from msrl_graph.backends.engine_protocols import Shard, StepRequest
from msrl_graph.backends.optimizer.steps import Steps
from msrl_graph.runtime.dock.messages import Batch
from msrl_graph.runtime.process.task_report import Report
from msrl_graph.runtime.rank.context import NodeBatch
from msrl_graph.runtime.weights import checkpoint
from msrl_graph.sharding.layout import Layout, full_box
from msrl_graph.sharding.tensors import Tensor

ROUNDS = [[0, 4, 7], [1, 2, 6], [3, 5], [2, 3, 7], [0, 1, 5], [4, 6]]  # two epochs of eight rows
LOSS = (
    "loss = clip(0.2, ratio = sequence) + 0.1 * kl() - 0.01 * entropy() + 0.1 * distil(reverse)",
    "loss = clip(0.2) + 0.1 * kl(mse)",
)
STATED = {
    "adamw": "adamw(lr = 1e-3, warmup = 4, weight_decay = 0.1, betas = [0.8, 0.95], eps = 1e-3)",
    "sgd": "sgd(lr = linear(0.05, warmup = 2, steps = 6), momentum = 0.9, nesterov = true, weight_decay = 0.01)",
    "muon": "muon(lr = cosine(1e-3, warmup = 2, min = 1e-4, steps = 6), eps = 1e-3)",
}
LAYOUTS = ("dp = 2, zero = 1", "dp = 2, zero = 3", "tp = 2", "cp = 2")
LONG = [pytest.param(f"dp = 2, zero = {n}", marks=pytest.mark.long) for n in (0, 2)]
pytestmark = pytest.mark.filterwarnings(
    "ignore::msrl_graph.diagnostics.ProgramWarning"
)  # columns that the shorter loss leaves


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Eight rows, and what torch makes of the model by them: its weights, and the norm of each step's gradient."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("steps")
    store = dist.FileStore(str(folder / "store"), 1)
    judge = str(scoring(folder / "judge"))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    stage, columns = built(ROLLOUT, changes("adamw"), LOSS, judge=judge)
    yield judge, columns, {name: alone(name, stage, columns) for name in STATED}, folder
    dist.destroy_process_group()


def changes(optimizer):
    return "optimizer = adamw(lr = 1e-3)\n  }", f"optimizer = {STATED[optimizer]}\n    clip_grad = 0.05\n  }}"


def alone(name, stage, columns):
    """What torch makes of the model: its weights, the norm of each step's gradient, and the rate."""
    model = net(stage, "actor")
    norms = []
    rates = []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = optimizers(name, model)
    plans = {
        "adamw": ("constant_with_warmup", 4, None),
        "sgd": ("linear", 2, None),
        "muon": ("cosine_with_min_lr", 2, {"min_lr": 1e-4}),
    }
    kind, warmup, more = plans[name]
    schedules = [get_scheduler(kind, o, warmup, len(ROUNDS), scheduler_specific_kwargs=more) for o in made]
    for rows in ROUNDS:
        model.zero_grad()
        torch.cat([loss(model, columns, row) for row in rows]).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        for optimizer, schedule in zip(made, schedules, strict=True):
            with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
                warnings.simplefilter("ignore")  # its first step has the rate 0: ours counts from 1
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # Muon is in float64 as all else
                schedule.step()
                optimizer.step()
        rates.append(made[0].param_groups[0]["lr"])
    after = {name: p.detach() for name, p in model.named_parameters()}
    assert min(norms) > 0.1 and max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3
    return after, norms, rates


def optimizers(name, model):
    """torch's own, for the parameters that are theirs."""
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3)]
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)]
    matrices = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    others = [p for n, p in model.named_parameters() if not (".layers." in n and p.ndim == 2)]
    assert len(matrices) == 7 * model.config.num_hidden_layers and len(others) > 3
    return [
        torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1, eps=1e-3),
    ]


def loss(model, columns, row):
    """clip(0.2) + 0.1 kl(mse) of each token that the mask leaves."""
    where = torch.from_numpy(columns["mask"][row])
    whole, tokens = (x[where] for x in token_logps(model, columns, row, "response", 0.8))
    logp = whole.gather(1, tokens)[:, 0]
    old, ref, advantage = (
        torch.from_numpy(columns[c][row]).double()[where] for c in ("old_logp", "ref_logp", "advantage")
    )
    r = (logp - old).exp()
    return torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.2)) + 0.1 * (logp - ref) ** 2 / 2


def learn(rank, _, layout, judge, columns, micro, out):
    """The same steps by a rank of a plan, whose first group has most of each mini-batch, by one optimizer after
    another."""
    for name in STATED:
        steps(rank, name, layout, judge, columns, micro, out)


def steps(rank, name, layout, judge, columns, micro, out):
    world = dist.get_world_size()
    more = f"layout actor.update, critic.update, teacher.infer, judge.infer {{ {layout} }}"
    stage = staged(ROLLOUT, changes(name), LOSS, rank=rank, ranks=world, judge=judge, more=more)
    node = stage.plan.graph.node("actor.update")
    placement = stage.plan.placement("actor.update")
    told = []
    placement.engine.options["micro_batch"] = micro
    for number, rows in enumerate(ROUNDS):
        if number == 3:  # what a checkpoint would hold
            trainer = stage.engines.trainers["actor"]
            trainer.restore(
                {kind: {s.name: s.tensor.clone() for s in of} for kind, of in trainer.moments().items()}, number
            )
        parts = [rows[1:], rows[:1]] if placement.layout.dp == 2 else [rows]
        report = Report("")
        mine = np.array(parts[placement.layout.coordinates(rank).dp])
        elements = {c: int(columns[c].lengths[rows].sum()) for c in node.reads}
        part = share(mine, max(map(len, parts)), len(rows), elements)
        stage.training.update(
            NodeBatch(node, TASK, Batch(part, mine, {c: columns[c].take(mine) for c in node.reads}), report)
        )
        told += [[report.sums[key][0] for key in ("grad_norm", "lr")]] if rank == 0 else []
    stage.checkpoints.save("actor", str(out / name / "actor"))
    if rank == 0:
        torch.save(told, out / name / "told")


def check(learnt, out):
    for name, (expected, norms, rates) in learnt[2].items():
        found = load_file(out / name / "actor" / "model.safetensors")
        told = torch.load(out / name / "told")
        assert [lr for _, lr in told] == pytest.approx(rates, rel=1e-12), name
        assert [norm for norm, _ in told] == pytest.approx(norms, rel=2e-5), name
        for tensor, weights in found.items():
            assert torch.allclose(weights.double(), expected[tensor], rtol=1e-6, atol=2e-6), (name, tensor)


@pytest.mark.parametrize("micro", [0, 1])
def test_steps_are_those_of_torch(learnt, micro, tmp_path):
    judge, columns, *_ = learnt
    learn(0, None, "dp = 1", judge, columns, micro, tmp_path)
    check(learnt, tmp_path)


@pytest.mark.parametrize("name", STATED)
def test_a_run_that_goes_on_takes_the_same_steps(learnt, name, tmp_path):
    judge, columns, *_ = learnt
    stage = staged(ROLLOUT, changes(name), LOSS, judge=judge)
    again = staged(ROLLOUT, changes(name), LOSS, judge=judge)
    for _ in range(2):
        stage.act("actor.update", columns)
    partial = checkpoint.begin(tmp_path, 1)
    files, counts, _ = stage.checkpoints.write(str(partial), {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 1, 0, counts, {}, tuple(files))
    again.checkpoints.resume(str(checkpoint.commit(partial, manifest, 2)), manifest)
    rates = []
    for one in (stage, again):
        one.told = Report("rank")
        one.act("actor.update", columns)
        rates.append(one.told.sums["lr"])
    assert same(stage.whole()[:1], again.whole()[:1]) and rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(learnt[2][name][2][2])


OPTIMIZERS = {"adamw": adamw(lr=0.1), "sgd": sgd(lr=0.1, momentum=0.9), "muon": muon(lr=0.1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residency", ["always", "parts", "phase"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_weight_that_is_a_part_of_another_tensor_steps_as_one_of_its_own(optimizer, residency, dtype):
    """As gate and up of Megatron's experts are. In float32 no copy of it is kept."""
    tensors = Tensor("model.layers.0.mlp.experts.*.gate_proj.weight", (3, 6, 4), experts=True), Tensor("norm", (4,))
    torch.manual_seed(0)
    both = torch.randn(3, 12, 4).to(dtype)
    inside = both[:, :6]
    own = both[:, :6].clone()
    rest = both[:, 6:].clone()
    made = []
    start = own.clone()
    for weight in (inside, own):
        weights = weight, torch.ones(4, dtype=dtype)
        shards = [Shard(t.name, full_box(t.shape), w) for t, w in zip(tensors, weights, strict=True)]
        made.append(Steps(optimizer, tensors, shards, Layout(), Devices(TorchDevice(), 0, None), False, residency))
    for gradient in torch.randn(3, 3, 6, 4):
        request = StepRequest(0.1, 1.0, True, optimizer)
        one, other = (each.step([gradient.clone(), torch.ones(4)], request) for each in made)
        assert one == other
    assert torch.equal(inside, own) and torch.equal(both[:, 6:], rest)
    assert not any(torch.equal(*pair) for pair in zip(own, start, strict=True))
    ours, theirs = (each.moments() for each in made)
    assert all(torch.equal(a.tensor, b.tensor) for k in theirs for a, b in zip(ours[k], theirs[k], strict=True))
    if dtype == torch.float32:
        held = {m.untyped_storage().data_ptr() for part in made[0].parts for m in part.masters}
        assert held == {s.tensor.untyped_storage().data_ptr() for s in made[0].shards}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("residency", ["always", "parts", "phase"])
def test_a_weight_that_was_frozen_starts_with_empty_states_and_the_others_keep_theirs(residency, dtype):
    optimizer = OPTIMIZERS["adamw"]
    full = Tensor("first", (4, 3)), Tensor("second", (3,)), Tensor("third", (2, 3))
    torch.manual_seed(0)
    weights = [torch.randn(t.shape).to(dtype) for t in full]

    def make(tensors):
        shards = [Shard(t.name, full_box(t.shape), w) for t, w in zip(tensors, weights, strict=True)]
        return Steps(optimizer, tensors, shards, Layout(), Devices(TorchDevice(), 0, None), False, residency)

    before = make((full[0], replace(full[1], frozen=True), full[2]))
    kept = weights[1].clone()
    for _ in range(2):
        before.step([torch.randn(4, 3), torch.randn(2, 3)], StepRequest(0.1, 1.0, True, optimizer))
    assert torch.equal(weights[1], kept)
    states = {kind: {s.name: s.tensor.clone() for s in of} for kind, of in before.moments().items()}
    assert {name for of in states.values() for name in of} == {"first", "third"}
    after = make(full)
    after.restore(states, 2)
    assert after.steps_taken == 2
    for kind, shards in after.moments().items():
        for shard in shards:
            empty = kept.float() if kind == "master" else torch.zeros(3)
            assert torch.equal(shard.tensor, states[kind].get(shard.name, empty)), (kind, shard.name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *LONG])
def test_steps_of_two_ranks_are_those_of_torch(learnt, layout, tmp_path):
    judge, columns, *_ = learnt
    ranks.run(2, learn, layout, judge, columns, 1, tmp_path)
    check(learnt, tmp_path)
