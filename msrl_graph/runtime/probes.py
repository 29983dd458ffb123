"""What a process of a run is asked when this machine is measured: rates at several sizes, an operator's overhead, collectives.

Invariant: a probe is the very operation that it stands for, called as the engines call it, while all other ranks do the same; a figure is
the median of several stretches. What an operator takes at least is `launch`, and is left out of the rates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from ..backends import prefixes
from .columns import ragged
from .packing import flat, pack

MATRICES = (64, 128, 256, 512, 1024)
BYTES = tuple(2**k for k in range(15, 27, 2))
# Rows, heads, tokens, a head's size: from short rows, whose overhead is most of it, to long ones.
ATTENTION = ((512, 4, 4, 32), (256, 4, 12, 32), (64, 4, 48, 32), (16, 4, 192, 64), (2, 4, 768, 64))
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


def matrix(dtype: torch.dtype) -> list[tuple[float, float]]:
    """(FLOP of a product, FLOP/s)."""
    found = []
    small = torch.ones(4, 4, dtype=dtype)
    least = seconds(lambda: small @ small, 0.01)
    for n in MATRICES:
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        found.append((2.0 * n**3, 2.0 * n**3 / _beyond(seconds(lambda a=a, b=b: a @ b), least)))  # type: ignore[misc]
    return found


def memory() -> list[tuple[float, float]]:
    """(bytes that an operation reads and writes, bytes/s), of a sum into fresh memory, as eager operators make it."""
    found = []
    small = torch.ones(4)
    least = seconds(lambda: small + small, 0.01)
    for size in BYTES:
        a, b = (torch.randn(size // 12) for _ in range(2))
        found.append((float(size), size / _beyond(seconds(lambda a=a, b=b: a + b), least)))  # type: ignore[misc]
    return found


def layer() -> list[tuple[float, float]]:
    """(bytes that an operator on hidden states reads and writes, bytes/s), of what an eager layer does between its products, on so many
    tokens: two norms, rotation of queries and keys, gating, two residuals, and rows laid out for attention; bytes as costs.py counts
    them. Unlike those of one operator again and again, operands come from wherever the one before left them."""
    found, heads, size, hidden, wide = [], 4, 32, 128, 448
    for tokens in TOKENS:
        x, gate, up = torch.randn(tokens, hidden), torch.randn(tokens, wide), torch.randn(tokens, wide)
        weight, half, queries = torch.randn(hidden), size // 2, torch.randn(1, tokens, heads, size).transpose(1, 2)
        cosine = torch.randn(1, 1, tokens, size)
        order = torch.arange(tokens)

        def once(x=x, gate=gate, up=up, weight=weight, half=half, queries=queries, cosine=cosine, order=order):  # type: ignore[no-untyped-def]
            for _ in range(2):
                normed = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
                rotated = queries * cosine + torch.cat((-queries[..., half:], queries[..., :half]), -1) * cosine
                laid = rotated[0].transpose(0, 1).index_select(0, order)
                x = x + normed
            return laid, torch.nn.functional.silu(gate) * up

        moved = tokens * 4.0 * (20 * hidden + 2 * 10 * heads * size + 2 * 2 * heads * size + 5 * wide)
        small = CHAIN * seconds(lambda: weight + weight, 0.01)  # noqa: B023 (called at once)
        found.append((tokens * hidden * 12.0, moved / _beyond(seconds(once, 0.1), small)))
    return found


def attention() -> list[tuple[float, float]]:
    """(FLOP of a row's head, FLOP/s), of causal attention; FLOP as though it were not causal."""
    found = []
    for rows, heads, tokens, size in ATTENTION:
        q, k, v = (torch.randn(rows, heads, tokens, size) for _ in range(3))
        taken = seconds(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True))  # type: ignore[misc]
        found.append((4.0 * tokens**2 * size, rows * heads * 4.0 * tokens**2 * size / taken))
    return found


def _beyond(taken: float, least: float) -> float:
    """What is left of a call beside what any takes; at least a tenth, since both are measured."""
    return max(taken - least, taken / 10)


def launch() -> float:
    """What an operator takes at least, Python's part of it in: a model of transformers on one token, divided by the operators in it that
    are not called by another one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
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
    count, prompt, response = 512, 6, 6
    columns = [ragged(list(rng.integers(0, 1000, (count, n)).astype(np.int32)), np.int32) for n in (prompt, response)]
    values = ragged(list(rng.random((count, response), np.float32)), np.float32)
    rows = np.arange(count)

    def once() -> None:
        prefixes.tree(pack(columns[:1], columns[1], rows))
        for _ in range(3):
            flat(values, rows, values.lengths)
        ragged(list(values.values.reshape(count, response)), np.float32)

    return seconds(once, 0.1) / count


def collectives(world: int) -> dict[str, tuple[float, float]]:
    """By kind, seconds at least and bytes/s received, among operators as a model calls them: ranks do not come at the same instant."""
    x, layer = torch.randn(32, 64), torch.nn.Linear(64, 64)

    def work() -> None:
        with torch.no_grad():
            y = x
            for _ in range(10):
                y = torch.relu(layer(y))

    alone = seconds(work)
    found = {}
    for kind, call, received in _kinds(world):
        taken = []
        for elements in (64, 1 << 18):
            some, many = torch.ones(elements), torch.ones(elements * world)
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
