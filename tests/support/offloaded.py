"""An engine that offloads beside the same one that does not: the same bits, and what lies where between steps."""

import gc
import json
import time
from pathlib import Path

import engines
import numpy as np
import torch
from safetensors.torch import save_file
from stage import Stage, one_rank

from msrl_graph.algorithms.optimizers import adamw, muon, sgd
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.ir.optimizer_spec import with_moments
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.rank.micro_batches import pack

OPTIMIZERS = {
    "adamw": lambda: adamw(lr=0.0, weight_decay=0.1),
    "sgd": lambda: sgd(lr=0.0, momentum=0.9, nesterov=True),
    "muon": lambda: muon(lr=0.0),
    "rounded": lambda: with_moments(adamw(lr=0.0, weight_decay=0.1), 2),
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "model"


def model(folder, dtype, **changes):
    """A small model of a vocabulary that is more than a part of it, with weights at random."""
    config = json.loads((EXAMPLE / "config.json").read_text())
    config |= {"vocab_size": 300, "dtype": str(dtype).removeprefix("torch."), **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    found = models.load(str(folder), folder)
    draw = torch.Generator().manual_seed(0)
    weights = {t.name: (torch.randn(t.shape, generator=draw) * 0.1).to(dtype) for t in found.weights}
    save_file(weights, folder / "model.safetensors")
    return found


def batches(layout, rank):
    draw = np.random.default_rng(0)
    contexts = ragged([draw.integers(0, 300, n) for n in draw.integers(3, 9, 12)], np.int32)
    responses = ragged([draw.integers(0, 300, n) for n in draw.integers(1, 7, 12)], np.int32)
    own = np.arange(12).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    return [pack([contexts], [responses], rows) for rows in own.reshape(2, -1)]


def loss(made, _):
    return (made.logp * torch.linspace(-1, 1, len(made.logp))).sum() + 0.1 * made.entropy.sum()


def stepped(engine, micro, times, loss=loss):
    norms = []
    for _ in range(times):
        engine.train(micro, loss, ForwardRequest(0.8, entropy=True))
        norms.append(engine.step(StepRequest(1e-2, 1.0)))
    return norms


def kept(engine):
    """Copies of weights and moments by kind and name; of other stages there is nothing."""
    found = {"weights": engine.shards(), **engine.moments()}
    return {(kind, s.name): s.tensor.clone() for kind, shards in found.items() for s in shards if s.tensor.numel()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def same_steps(rank, _, name, folder, cases, **options):
    """Of each case three steps, and two more of an engine that takes over what these keep: bit for bit."""
    for number, (layout, optimizer, dtype) in enumerate(cases):
        _same_steps(rank, name, model(Path(folder) / f"{rank}-{number}", dtype), layout, optimizer, options)


def _same_steps(rank, name, of, layout, optimizer, options):
    made = {}
    micro = batches(layout, rank)
    at = engines.mesh(layout)

    def built(offload):
        return engines.built(name, of, layout, rank, at, OPTIMIZERS[optimizer](), offload=offload, **options)

    for offload in ("none", "optimizer", "phase"):
        gc.collect()
        before = memory.live_bytes()
        engine = built(offload)
        norms = []
        for _ in range(3):  # each as an update of its own
            engine.fetch_states()
            norms += stepped(engine, micro, 1)
            engine.release_states()
        time.sleep(0.2)  # a thread of gloo's lets go of what it summed a moment after it has told of it
        gc.collect()
        made[offload] = engine, norms, {place: size - before[place] for place, size in memory.live_bytes().items()}
    plain, norms, beside = made.pop("none")
    found = kept(plain)
    more = None
    for offload, (away, theirs, held) in made.items():
        assert norms == theirs
        assert_same(found, kept(away))
        # All that was kept beside the weights has left but for counts of steps, and nothing is held twice.
        left = beside["device"] - held["device"]
        assert beside["host"] == 0 and abs(held["host"] - left) <= 0.02 * left, (offload, beside, held)
        moments = {kind: {s.name: s.tensor.clone() for s in shards} for kind, shards in away.moments().items()}
        again = built(offload)
        for s in again.shards():
            if s.tensor.numel():
                s.tensor.copy_(found["weights", s.name])
        again.restore(moments, 3)
        more = more or (stepped(plain, micro, 2), kept(plain))
        assert stepped(again, micro, 2) == more[0]
        assert_same(more[1], kept(again))


def same_gradients(rank, _, name, folder, cases, **options):
    """Of each case two steps with activations kept and offloaded: bit for bit."""
    gc.collect()
    before = memory.live_bytes()["host"]  # which other tests of this process left
    for number, (layout, dtype, recompute) in enumerate(cases):
        of = model(Path(folder) / f"{rank}-{number}", dtype)
        micro = batches(layout, rank)
        at = engines.mesh(layout)
        found = []
        between = []

        def told(made, i, between=between):
            between.append(memory.live_bytes()["host"] > before)
            return loss(made, i)

        for activations in ("keep", "offload"):
            engine = engines.built(
                name, of, layout, rank, at, adamw(lr=0.0), recompute=recompute, activations=activations, **options
            )
            found.append((stepped(engine, micro, 2, told), kept(engine)))
            assert {*between} <= {activations == "offload"}, (layout, dtype, recompute)
            between.clear()
        assert found[0][0] == found[1][0], (layout, dtype, recompute)
        assert_same(found[0][1], found[1][1])
        gc.collect()
        assert memory.live_bytes()["host"] <= before


def frozen_turns(rank, _):
    """A reference whose weights are there in its turns alone gives what one gives that keeps them."""
    at = "  layout actor.generate"
    kept = Stage(one_rank())
    away = Stage(one_rank((at, f"  engine reference.infer = fsdp {{ offload = weights }}\n{at}")))
    node = away.plan.graph.node("reference.infer")
    shards = away.engines.trainers["reference"].shards()
    columns = kept.sampled()
    wanted = kept.act(node.name, columns)["ref_logp"]
    for _turn in range(2):
        assert not any(s.tensor.untyped_storage().nbytes() for s in shards)
        away.engines.begin_phase(node)
        found = away.act(node.name, columns)["ref_logp"]
        away.engines.end_phase(node)
        assert np.array_equal(found.values, wanted.values)
    assert not any(s.tensor.untyped_storage().nbytes() for s in shards)
