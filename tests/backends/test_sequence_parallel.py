"""Tensor parallelism that shares tokens: what tp ranks exchange, and what an embedding learns."""

from collections import Counter
from types import SimpleNamespace

import engines
import held
import numpy as np
import pytest
import ranks
import torch
from gathers import Collectives
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import sequence_parallel
from msrl_graph.backends.engine_protocols import ForwardRequest
from msrl_graph.ir.workload import Workload
from msrl_graph.sharding.layout import Layout

LAYERS = 3


def exchange(rank, _, model, layout, halves):
    """Compare the collectives with those of `halves` that gather tokens."""
    engine = engines.built("fsdp", model, layout, rank, engines.mesh(layout), adamw(lr=0.0))
    batch = held._batch(np.random.default_rng(0), Workload(model, layout, model.dtype, 8, 2, 12, 30))
    passes = {
        # Of the embedding, sums are scattered; for the head, tokens are gathered.
        (1 + halves, 1 + halves): lambda: engine.score([batch], ForwardRequest()),
        # A backward pass gathers the inputs of products again.
        (2 + 3 * halves, 2 + 2 * halves): lambda: engine.train([batch], held._loss, ForwardRequest()),
    }
    for (gathers, scatters), compute in passes.items():
        with Collectives() as found:
            compute()
        names = Counter(name for name, _, _ in found.found)
        assert (names["_allgather_base_"], names["_reduce_scatter_base_"]) == (gathers, scatters)
        # The head adds up a few numbers of each requested token, never hidden states.
        assert all(size <= 3 * 8 * 30 for name, _, size in found.found if name == "allreduce_")


@pytest.mark.parametrize(
    ("layout", "experts", "halves"),
    [(Layout(tp=2), {}, 2 * LAYERS), (Layout(tp=2, ep=2), held.EXPERTS, LAYERS)],
    ids=["dense", "experts"],
)
def test_a_half_gathers_its_tokens_once_for_all_projections(layout, experts, halves, tmp_path):
    model = held.small(tmp_path, num_hidden_layers=LAYERS, **experts)
    ranks.run(layout.devices, exchange, model, layout, halves)


def embed(rank, _, padding):
    """Compare a sharded embedding with a whole one, of which the padding learns nothing."""
    whole = torch.nn.Embedding(8, 4, padding_idx=padding)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(32.0).view(8, 4))
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 3, 5]])
    slopes = torch.linspace(-1, 1, 40).view(1, 10, 4)
    expected = whole(ids)
    (expected * slopes).sum().backward()

    sharded = torch.nn.Embedding(8, 4, padding_idx=padding)
    sharded.load_state_dict(whole.state_dict())
    mesh = DeviceMesh("cpu", torch.arange(2))
    tokens = sequence_parallel.TokenGroup(mesh.get_group())
    sequence_parallel._shard_parameters(sharded, ["weight"], 0, mesh)
    sequence_parallel._shard_embedding(sharded, tokens)
    own = slice(5 * rank, 5 * rank + 5)
    output = sharded(ids)
    torch.testing.assert_close(output, expected[:, own])
    (output * slopes[:, own]).sum().backward()
    torch.testing.assert_close(sharded.weight.grad.to_local(), whole.weight.grad[4 * rank : 4 * rank + 4])
    dist.barrier()


@pytest.mark.parametrize("padding", [None, 0, 5])
def test_an_embedding_learns_what_a_whole_one_learns(padding):
    ranks.run(2, embed, padding)


def test_a_mixer_that_reads_its_argument_is_seen():
    tokens = SimpleNamespace(group=SimpleNamespace(size=lambda: 2))
    forward = sequence_parallel.LayerInput(tokens, 1).wrap(lambda states: states * 2)
    output = forward(torch.ones(1, 3, 4))
    assert output.shape == (1, 6, 4) and output.isnan().all()


def gather(rank, _):
    """Gather 3 tokens of each rank, and compute with all of them: each rank a share of the result, or all of it."""
    tokens = sequence_parallel.TokenGroup(DeviceMesh("cpu", torch.arange(2)).get_group())
    slopes = torch.linspace(-1, 1, 24).view(6, 4)
    own = slice(3 * rank, 3 * rank + 3)
    for gathered, share in ((tokens.gather, slopes * (0.25 + 0.5 * rank)), (tokens.gather_copies, slopes)):
        states = torch.full((3, 4), float(rank), requires_grad=True)
        whole = gathered(states)
        assert whole.tolist() == [[0.0] * 4] * 3 + [[1.0] * 4] * 3
        (whole * share).sum().backward()
        torch.testing.assert_close(states.grad, slopes[own])
    dist.barrier()


def test_a_gathered_token_learns_once_from_ranks_that_share_a_result_and_from_ranks_that_repeat_it():
    ranks.run(2, gather)
