"""What a process of a run is asked when this machine is measured: rates at several sizes, an operator's overhead,
collectives.

Invariant: a probe is the very operation that it stands for, called as the engines call it, while all other ranks do the
same; a figure is the median of several stretches. What an operator takes at least is `launch`, and is left out of the
rates.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.profiler import ProfilerActivity, profile

from ...backends import prefix_tree
from ..data.columns import ragged
from ..rank.micro_batches import pack
from ..rank.packing import flat

MATRICES = (64, 128, 256, 512, 1024)
BYTES = tuple(2**k for k in range(15, 27, 2))
# Rows, heads, tokens, a head's size: from short rows, whose overhead is most of it, to long ones.
ATTENTION = ((512, 4, 4, 32), (256, 4, 12, 32), (64, 4, 48, 32), (16, 4, 192, 64), (2, 4, 768, 64))
AWAY = 1 << 24  # bytes
TOKENS = (16, 128, 512, 2048, 8192)
CHAIN = 35  # operators of `layer`
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(action: Callable[[], Any], budget: float = 0.06, stretches: int = 5) -> float:
    """What a call takes: the median over stretches of equal numbers of calls, of some `budget` seconds in all."""
    action()
    start = time.perf_counter()
    action()
    calls = max(1, int(budget / stretches / max(time.perf_counter() - start, 1e-6)))
    found = []
    for _ in range(stretches):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def away(make: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Operands in turn, together more than a core's own cache: a pass comes back to none before it has met all
    others."""
    first = make()
    size = sum(t.nbytes for t in first)
    return itertools.cycle([first, *(make() for _ in range(min(AWAY // size, 255)))])


def beside(action: Callable[[], Any], least: float, budget: float = 0.06) -> float:
    """What a call takes beside what its operators take at least; at least a tenth of it, since both are measured."""
    taken = seconds(action, budget)
    return max(taken - least, taken / 10)


def matrix(dtype: torch.dtype) -> list[tuple[float, float]]:
    """(FLOP of a product, FLOP/s)."""
    found = []
    small = torch.ones(4, 4, dtype=dtype)
    least = seconds(lambda: small @ small, 0.01)
    for n in MATRICES:
        operands = away(lambda n=n: [torch.randn(n, n).to(dtype) for _ in range(2)])  # type: ignore[misc]
        found.append((2.0 * n**3, 2.0 * n**3 / beside(lambda some=operands: torch.mm(*next(some)), least)))  # type: ignore[misc]
    return found


def memory() -> list[tuple[float, float]]:
    """(bytes that an operation reads and writes, bytes/s), of a sum into fresh memory, as eager operators make it."""
    found = []
    small = torch.ones(4)
    least = seconds(lambda: small + small, 0.01)
    for size in BYTES:
        operands = away(lambda size=size: [torch.randn(size // 12) for _ in range(2)])  # type: ignore[misc]
        found.append((float(size), size / beside(lambda some=operands: torch.add(*next(some)), least)))  # type: ignore[misc]
    return found


def layer() -> list[tuple[float, float]]:
    """(bytes that an operator on hidden states reads and writes, bytes/s), of what an eager layer does between its
    products, on so many tokens: two norms, rotation of queries and keys, gating, two residuals, and rows laid out for
    attention; bytes as cost/time.py counts them."""
    heads = 4
    size = 32
    hidden = 128
    wide = 448
    small = torch.ones(hidden)
    least = CHAIN * seconds(lambda: small + small, 0.01)
    found = []
    for tokens in TOKENS:
        order = torch.arange(tokens)
        shapes = (
            (tokens, hidden),
            (tokens, wide),
            (tokens, wide),
            (hidden,),
            (1, heads, tokens, size),
            (1, 1, tokens, size),
        )
        operands = away(lambda shapes=shapes: [torch.randn(s) for s in shapes])  # type: ignore[misc]

        def once(operands: Any = operands, order: torch.Tensor = order) -> Any:
            x, gate, up, weight, queries, cosine = next(operands)
            half = size // 2
            for _ in range(2):
                x = x + weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
                rotated = queries * cosine + torch.cat((-queries[..., half:], queries[..., :half]), -1) * cosine
                laid = rotated[0].transpose(0, 1).index_select(0, order)
            return x, laid, silu(gate) * up

        moved = tokens * 4.0 * (20 * hidden + 2 * 10 * heads * size + 2 * 2 * heads * size + 5 * wide)
        found.append((tokens * hidden * 12.0, moved / beside(once, least, 0.1)))
    return found


def attention() -> list[tuple[float, float]]:
    """(FLOP of a row's head, FLOP/s), of causal attention; FLOP as though it were not causal."""
    found = []
    for rows, heads, tokens, size in ATTENTION:
        shape = (rows, heads, tokens, size)
        operands = away(lambda shape=shape: [torch.randn(shape) for _ in range(3)])  # type: ignore[misc]
        taken = seconds(lambda some=operands: scaled_dot_product_attention(*next(some), is_causal=True))  # type: ignore[misc]
        found.append((4.0 * tokens**2 * size, rows * heads * 4.0 * tokens**2 * size / taken))
    return found


def copy() -> float:
    """Bytes/s of a copy into memory that the process did not have, as what is released and taken again is."""
    x = torch.randn(1 << 24)  # larger than what the allocator keeps
    return x.nbytes / seconds(x.clone, 0.2)


def launch() -> float:
    """What an operator takes at least, Python's part of it in: a small model of transformers on two tokens, divided by
    the operators in it that are not called by another one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, **sizes)).eval()
    ids = torch.ones(1, 2, dtype=torch.long)
    with torch.no_grad():
        taken = seconds(lambda: model(input_ids=ids, use_cache=False), 0.3)
        return taken / operators(lambda: model(input_ids=ids, use_cache=False))


def operators(action: Callable[[], Any]) -> int:
    """How many operators a call makes, those called by another one left out."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        action()
    events = [e for e in found.events() if e.name.startswith("aten::")]
    return sum(not (e.cpu_parent and e.cpu_parent.name.startswith("aten::")) for e in events)


def row() -> float:
    """What a row takes on its way into tensors and out of them."""
    rng = np.random.default_rng(0)
    count = 512
    prompt = 6
    response = 6
    columns = [ragged(list(rng.integers(0, 1000, (count, n)).astype(np.int32)), np.int32) for n in (prompt, response)]
    values = ragged(list(rng.random((count, response), np.float32)), np.float32)
    rows = np.arange(count)

    def once() -> None:
        prefix_tree.tree(pack(columns[:1], columns[1:], rows))
        for _ in range(3):
            flat(values, rows, values.lengths)
        ragged(list(values.values.reshape(count, response)), np.float32)

    return seconds(once, 0.1) / count


def collectives(world: int) -> dict[str, tuple[float, float]]:
    """By kind, seconds at least and bytes/s received, among the products of half a layer, as a model calls them: the
    more ranks have to do in between, the less they come at the same instant."""
    x = torch.randn(256, 128)
    up = torch.randn(128, 512)
    down = torch.randn(512, 128)

    def work() -> None:
        torch.relu(x @ up) @ down

    alone = seconds(work)
    found = {}
    for kind, call, received in _kinds(world):
        taken = []
        for elements in (64, 1 << 18):
            some = torch.ones(elements)
            many = torch.ones(elements * world)
            dist.barrier()
            calls = 40 if elements < 1000 else 15
            # All ranks must make the same number of calls, so it is not the clock that ends them.
            spent = []
            for _ in range(calls):
                start = time.perf_counter()
                work()
                call(some, many)
                spent.append(time.perf_counter() - start - alone)
            taken.append(max(statistics.median(spent), 1e-6))
        moved = received * 4 * (1 << 18)
        found[kind] = (taken[0], moved / max(taken[1] - taken[0], taken[1] / 10))
    return found


def _kinds(world: int) -> list[tuple[str, Callable[[torch.Tensor, torch.Tensor], Any], float]]:
    """Kind, call on a rank's part and on the whole, and what a rank receives of it, in parts."""
    return [
        ("all_reduce", lambda some, _: dist.all_reduce(some), 2 * (world - 1) / world),
        ("all_gather", lambda some, many: dist.all_gather_into_tensor(many, some), world - 1),
        ("reduce_scatter", lambda some, many: dist.reduce_scatter_tensor(some, many), world - 1),
        ("broadcast", lambda some, _: dist.broadcast(some, 0), 1),
    ]
