"""Context parallelism: nodes divided over ranks give what one rank gives, by a ring and by Ulysses, of attention alone
and of a trainer."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import engines
import numpy as np
import packed_reference
import pytest
import ranks
import torch
from folders import ROOT
from hypothesis import example, given
from hypothesis import strategies as st
from mixture import latent
from sample import examples
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import sgd
from msrl_graph.backends import devices, kernels, prefix_tree, ring_attention, row_blocks
from msrl_graph.backends.context_parallel import ContextGroup
from msrl_graph.backends.engine_protocols import ForwardRequest, Outputs, StepRequest
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.hardware.device_kinds import HOST
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, slices

EXAMPLE = ROOT / "examples" / "arithmetic"
HEADS = 12


def packed_rows(rows):
    contexts, responses = (ragged([np.array(r[i], np.int32) for r in rows], np.int32) for i in (0, 1))
    return pack([contexts], [responses], np.arange(len(rows)))


def without_kernels(tensor):
    """Return a device that has no fused kernel for attention, as all but host cores."""
    return replace(devices.device_of(tensor), kind=replace(HOST, is_host=False))


def working(rank):
    row_blocks.FEW = 0  # rows of different lengths are several blocks, those of the trainer on one rank are one
    groups = {}
    for size in (1, 2, 3, 4):
        # All ranks have as many groups: by their number torch names those that only their ranks make.
        groups[size] = dist.new_group(range(size))
        _ = dist.new_group(range(size, 4)) if size < 4 else None

    def attend(rows, size, ulysses, kv_heads, window, fused, cap=None, dtype=torch.float64):
        """Return how far attention divided over the first `size` ranks is from attending alone."""
        if rank >= size:
            return None
        ring_attention.devices = devices if fused else SimpleNamespace(device_of=without_kernels)
        packed = packed_rows(rows)
        rule = kernels.ScoreRule(0.3, window, cap)
        tree = prefix_tree.build_tree(packed)
        draw = torch.Generator().manual_seed(0)
        shapes = [(HEADS, len(tree.ids), 8), *[(kv_heads, len(tree.ids), 8)] * 2, (len(tree.before), HEADS, 8)]
        *states, slope = (torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes)
        whole = [x.clone().requires_grad_() for x in states]
        right = tree.attend(*whole, rule)[tree.before]
        (right * slope).sum().backward()
        context = ContextGroup(size, rank, groups[size], ulysses)
        part, known = context.share(tree, packed)
        assert torch.equal(known["token"], packed["token"][part.tokens]) if size > 1 else known is packed
        # Which nodes this rank has, of all: those of its depths, in order.
        own = torch.nonzero(tree.depth % size == rank).flatten()
        assert torch.equal(part.ids[: len(own)], tree.ids[own]) and torch.equal(part.depth[: len(own)], tree.depth[own])
        mine = [x[:, own].requires_grad_() for x in states]
        more = len(part.ids) - len(own)
        if fused:
            part = part.with_kernels(packed_reference.KERNELS)
        assert (part.packed_attention is not None) == fused and (part.packed is None) == (not ulysses and size > 1)
        out = part.attend(
            *(torch.nn.functional.pad(x, (0, 0, 0, more)) for x in mine), kernels.ScoreRule(0.3, window, cap)
        )
        made = context.gather_outputs(Outputs(out.index_select(0, part.before)), part).logp
        (made * slope).sum().backward()
        assert len(part.rows) == len(tree.rows)
        laid_out = sum(block.numel() for block in part.rows)
        per_rank = 1 if ulysses else size
        total = int(tree.packed.begins[-1])
        assert laid_out <= row_blocks.bound_row_tokens(total) / per_rank + len(tree.packed.ends)
        pairs = [(made, right), *((x.grad, y.grad[:, own]) for x, y in zip(mine, whole, strict=True))]
        return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs]

    def train(of, layout, how):
        """What a trainer tells, and its weights by box; where four ranks are two layouts, on each."""
        meshes = [engines.mesh(layout, first) for first in range(0, 4, layout.devices)]
        return trained(of, layout, rank % layout.devices, meshes[rank // layout.devices], **how)

    return lambda what, *case: (attend if what == "attend" else train)(*case)


def model(dtype=None, scores=False):
    found = models.load("./model", EXAMPLE, dtype, NOWHERE)
    return found.scoring if scores else found


def micro_batches(of, layout, rank):
    """A data-parallel group's of four, each of four rows that begin alike; the last has one token, so that fewer nodes
    than ranks are asked for."""
    draw = np.random.default_rng(0)
    lengths = [*draw.integers(0, 7, 12), 0, 1, 0, 0]
    prompts = [draw.integers(2, 16, n) for n in (3, 6, 2, 1)]
    contexts = ragged([prompts[i // 4] for i in range(16)], np.int32)
    responses = ragged([draw.integers(2, 16, n) for n in lengths], np.int32)

    def packed(rows):
        token = torch.from_numpy(np.concatenate([responses[r] for r in rows]).astype(np.int64))
        made = pack([contexts], [responses], rows)
        if not of.scores:
            made["given"] = torch.stack([token, 15 - token], 1)
        return made

    return [packed(np.arange(4 * i, 4 * i + 4)) for i in range(layout.coordinates(rank).dp, 4, layout.dp)]


def loss(made, _):
    if made.values is not None:
        return (made.values**2).sum()
    return (made.logp * torch.linspace(-1, 1, len(made.logp))).sum() + 0.1 * made.entropy.sum() + made.given.sum()


def trained(of, layout, rank=0, mesh=None, recompute="none"):
    """Outputs before three steps, the norms of these, and by weight its box, what it was and what it is then."""
    engine = engines.trainer(of, layout, rank, mesh, sgd(lr=0.0, momentum=0.9), recompute)
    if of.scores:  # the folder has no head of scores
        with torch.no_grad():
            engine.shards()[-1].tensor.fill_(0.1)
    begun = [s.tensor.clone() for s in engine.shards()]
    batches = micro_batches(of, layout, rank)
    told = engine.score(batches, ForwardRequest(0.8, entropy=not of.scores, best=0 if of.scores else 3))
    norms = []
    for _ in range(3):
        engine.train(batches, loss, ForwardRequest(0.8, entropy=not of.scores))
        norms.append(engine.step(StepRequest(0.1, 1.0)))
    pieces = zip(engine.shards(), begun, strict=True)
    return [tuple(out) for out in told], norms, {s.name: (s.box, old, s.tensor.clone()) for s, old in pieces}


@cache
def alone(of):
    return trained(of, Layout())


@pytest.fixture(scope="module")
def four():
    team = ranks.Team(4, working)
    yield team
    team.close()


tokens = st.lists(st.integers(0, 2), max_size=5)
cases = st.tuples(
    st.lists(st.tuples(tokens.filter(len), tokens), min_size=1, max_size=5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 2, 6, 12]),
    st.sampled_from([None, None, 1, 2, 4]),
    st.booleans(),
    st.sampled_from([None, None, 0.7]),
)
LONG = [([1] * 40, [2, 0] * 20), ([1] * 40, [0] * 3), ([0] * 9, [1] * 80)]


@pytest.mark.parametrize("ulysses", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_attention_is_that_of_one_rank(four, size, ulysses):
    for fused in (True, False):
        for found in four.ask("attend", LONG, size, ulysses, 2, None, fused)[:size]:
            assert max(found) < 1e-12, fused


@given(cases)
@examples(60)
@example(([([0], [1])], 4, False, 2, None, True, None))  # one node, four ranks
@example(([([0], [])], 3, True, 1, None, True, None))  # nothing is asked for
def test_attention_over_any_tree_is_that_of_one_rank(four, case):
    for found in four.ask("attend", *case)[: case[1]]:
        assert max(found) < 1e-12


def named(layout):
    sizes = [f"{a} {getattr(layout, a)}" for a in ("cp", "tp", "dp") if getattr(layout, a) > 1]
    return " ".join([layout.cp_kind, *sizes, *([f"zero {layout.zero}"] if layout.dp > 1 else [])])


LAYOUTS = [
    Layout(cp=2),
    Layout(cp=2, cp_kind="ulysses"),
    Layout(cp=4),
    Layout(cp=2, tp=2),
    Layout(cp=2, tp=2, cp_kind="ulysses"),
    Layout(cp=2, dp=2, zero=0, cp_kind="ulysses"),
    Layout(cp=2, dp=2, zero=1),
    Layout(cp=2, dp=2, zero=2),
    Layout(cp=2, dp=2, zero=3, cp_kind="ulysses"),
]


def check(four, layout, of, close=(1e-5, 1e-4, 1e-4), **how):
    right, norms, weights = alone(of)
    for rank, (told, some, held) in enumerate(four.ask("train", of, layout, how)):
        assert some == pytest.approx(norms, rel=close[1])
        for one, other in zip(told, right[layout.coordinates(rank % layout.devices).dp :: layout.dp], strict=True):
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None)
                if a is not None and (a.is_floating_point() or close[0] < 1e-3):  # in bf16 some ids are as likely
                    assert torch.allclose(a, b, atol=close[0]), (a - b).abs().max()
        for name, (box, begun, values) in held.items():
            wanted = weights[name][2][slices(box)]
            if values.numel():
                rounding = 3 * torch.finfo(values.dtype).eps * values.abs().max()
                assert (values - wanted).abs().max() < close[2] * (wanted - begun).abs().max() + rounding, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=map(named, LAYOUTS))
def test_a_trainer_computes_and_steps_as_on_one_rank(four, layout):
    check(four, layout, model())


@pytest.mark.slow
def test_so_it_does_where_layers_are_computed_again(four):
    check(four, Layout(cp=2), model(), recompute="full")
    check(four, Layout(cp=2, dp=2, zero=3), model(), recompute="full")


@pytest.mark.slow
def test_so_does_a_model_that_scores(four):
    check(four, Layout(cp=2), model(scores=True))
    check(four, Layout(cp=2, dp=2, zero=3, cp_kind="ulysses"), model(scores=True))


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return models.load(latent(tmp_path_factory.mktemp("latent")), Path("/"), None, NOWHERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, tp=2, cp_kind="ulysses"),
        Layout(cp=2, dp=2, ep=2, zero=3),
        Layout(tp=2, dp=2, ep=4),
        Layout(tp=2, dp=2, zero=2),
    ],
    ids=str,
)
def test_so_does_latent_attention(four, layout, latents):
    """Whose keys and values differ in size; with a layer without experts, and shared ones."""
    check(four, layout, latents)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_so_it_does_in_bf16(four, kind):
    check(four, Layout(cp=2, cp_kind=kind), model("bf16"), (0.2, 0.05, 0.1))
