"""Timed operations (probes), which measure this machine's rates and overheads.

Invariant: a probe runs the same operation that the engines run, and calls this operation in the same way, while all
other ranks run the same probe. A figure is the median of several timed series of calls. `launch` returns the least time
of an operator: its time with tiny tensors. The rates of `matrix`, `memory` and `layer` do not include the least time of
their operators.
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
from ..rank.packing import flatten_column

MATRICES = (64, 128, 256, 512, 1024)
BYTES = tuple(2**k for k in range(15, 27, 2))
# Rows, heads, tokens, head size: from short rows, which are mostly overhead, to long ones.
ATTENTION = ((512, 4, 4, 32), (256, 4, 12, 32), (64, 4, 48, 32), (16, 4, 192, 64), (2, 4, 768, 64))
OPERAND_BYTES = 1 << 24  # bytes of operands, more than a core's own cache
TOKENS = (16, 128, 512, 2048, 8192)
CHAIN = 35  # operators of `layer`
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def seconds(action: Callable[[], Any], budget: float = 0.06, stretches: int = 5) -> float:
    """Return the seconds that one call of `action` takes.

    The result is the median over `stretches` series of calls. All series have the same number of calls. All series
    together take about `budget` seconds. If one call takes longer than that, the result is the time of the second call.
    """
    action()
    start = time.perf_counter()
    action()
    once = time.perf_counter() - start
    if once > budget:
        return once
    calls = max(1, int(budget / stretches / max(once, 1e-6)))
    samples = []
    for _ in range(stretches):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


def rotate_operands(make: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yield sets of operands in turn, endlessly; `make` returns one set.

    All sets together are larger than a core's own cache. A set is yielded again only after all other sets have been
    yielded.
    """
    first = make()
    size = sum(tensor.nbytes for tensor in first)
    return itertools.cycle([first, *(make() for _ in range(min(OPERAND_BYTES // size, 255)))])


def seconds_beyond(action: Callable[[], Any], least: float, budget: float = 0.06) -> float:
    """Return the seconds of one call of `action`, minus `least`.

    `least` is the least time of the operators that the call runs. The result is at least a tenth of the time of the
    call, because both times are measured, and their difference may be too small by chance.
    """
    total = seconds(action, budget)
    return max(total - least, total / 10)


def matrix(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return (FLOP of a matrix product, FLOP/s) for several sizes of matrices."""
    rates = []
    small = torch.ones(4, 4, dtype=dtype)
    least = seconds(lambda: small @ small, 0.01)
    for n in MATRICES:
        operands = rotate_operands(lambda n=n: [torch.randn(n, n).to(dtype) for _ in range(2)])  # type: ignore[misc]
        rates.append((2.0 * n**3, 2.0 * n**3 / seconds_beyond(lambda source=operands: torch.mm(*next(source)), least)))  # type: ignore[misc]
    return rates


def memory() -> list[tuple[float, float]]:
    """Return (bytes that an addition reads and writes, bytes/s) for several sizes.

    The addition adds two tensors into newly allocated memory, as the operators of eager PyTorch do.
    """
    rates = []
    small = torch.ones(4)
    least = seconds(lambda: small + small, 0.01)
    for size in BYTES:
        operands = rotate_operands(lambda size=size: [torch.randn(size // 12) for _ in range(2)])  # type: ignore[misc]
        rates.append((float(size), size / seconds_beyond(lambda source=operands: torch.add(*next(source)), least)))  # type: ignore[misc]
    return rates


def layer() -> list[tuple[float, float]]:
    """Return (bytes that an addition moves, bytes/s) for several numbers of tokens.

    The addition is a residual addition: it adds two tensors of hidden states. The rate (bytes/s) is measured over
    everything that an eager layer runs between its matrix products: two norms, the rotation of queries and keys, the
    gating, two residual additions, and a copy of the rows into the order for attention. Moved bytes are read and
    written bytes, counted as in cost/time.py.
    """
    heads = 4
    size = 32
    hidden = 128
    wide = 448
    small = torch.ones(hidden)
    least = CHAIN * seconds(lambda: small + small, 0.01)
    rates = []
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
        operands = rotate_operands(lambda shapes=shapes: [torch.randn(shape) for shape in shapes])  # type: ignore[misc]

        def once(operands: Any = operands, order: torch.Tensor = order) -> Any:
            states, gate, up, weight, queries, cosine = next(operands)
            half = size // 2
            for _ in range(2):
                states = states + weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6))
                rotated = queries * cosine + torch.cat((-queries[..., half:], queries[..., :half]), -1) * cosine
                laid = rotated[0].transpose(0, 1).index_select(0, order)
            return states, laid, silu(gate) * up

        moved = tokens * 4.0 * (20 * hidden + 2 * 10 * heads * size + 2 * 2 * heads * size + 5 * wide)
        rates.append((tokens * hidden * 12.0, moved / seconds_beyond(once, least, 0.1)))
    return rates


def attention() -> list[tuple[float, float]]:
    """Return (FLOP of one head for one row, FLOP/s) for several shapes of attention.

    The attention is causal, but the FLOP are counted as if it were not causal.
    """
    rates = []
    for rows, heads, tokens, size in ATTENTION:
        shape = (rows, heads, tokens, size)
        operands = rotate_operands(lambda shape=shape: [torch.randn(shape) for _ in range(3)])  # type: ignore[misc]
        elapsed = seconds(lambda source=operands: scaled_dot_product_attention(*next(source), is_causal=True))  # type: ignore[misc]
        rates.append((4.0 * tokens**2 * size, rows * heads * 4.0 * tokens**2 * size / elapsed))
    return rates


def copy() -> float:
    """Return the bytes/s of copying a tensor into newly allocated memory.

    Memory that the process has released and allocates again also counts as new.
    """
    tensor = torch.randn(1 << 24)  # larger than what the allocator keeps
    return tensor.nbytes / seconds(tensor.clone, 0.2)


def launch() -> float:
    """Return the least seconds that an operator takes, including its time in Python.

    The probe runs a forward pass of a small transformers model on two tokens. The result is the time of the forward
    pass, divided by the number of top-level operators, which are operators that no other operator calls.
    """
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
        elapsed = seconds(lambda: model(input_ids=ids, use_cache=False), 0.3)
        return elapsed / operators(lambda: model(input_ids=ids, use_cache=False))


def operators(action: Callable[[], Any]) -> int:
    """Count the operators that a call of `action` runs.

    Operators that another operator calls are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        action()
    events = [event for event in profiler.events() if event.name.startswith("aten::")]
    return sum(not (event.cpu_parent and event.cpu_parent.name.startswith("aten::")) for event in events)


def row() -> float:
    """Return the seconds per row for packing rows into tensors and unpacking them."""
    rng = np.random.default_rng(0)
    count = 512
    prompt = 6
    response = 6
    columns = [
        ragged(list(rng.integers(0, 1000, (count, length)).astype(np.int32)), np.int32) for length in (prompt, response)
    ]
    values = ragged(list(rng.random((count, response), np.float32)), np.float32)
    rows = np.arange(count)

    def once() -> None:
        prefix_tree.build_tree(pack(columns[:1], columns[1:], rows))
        for _ in range(3):
            flatten_column(values, rows, values.lengths)
        ragged(list(values.values.reshape(count, response)), np.float32)

    return seconds(once, 0.1) / count


def collectives(world: int) -> dict[str, tuple[float, float]]:
    """Return (least seconds, received bytes/s) of each kind of collective.

    As in a model, each call of a collective follows the matrix products of half a layer. These matrix products matter:
    with more work between two collectives, the ranks are less likely to reach a collective at the same instant.
    """
    states = torch.randn(256, 128)
    up = torch.randn(128, 512)
    down = torch.randn(512, 128)

    def work() -> None:
        torch.relu(states @ up) @ down

    alone = seconds(work)
    rates = {}
    for kind, call, received in _kinds(world):
        medians = []
        for elements in (64, 1 << 18):
            part = torch.ones(elements)
            full = torch.ones(elements * world)
            dist.barrier()
            calls = 40 if elements < 1000 else 15
            # All ranks must make the same number of calls, so it is not the clock that ends them.
            samples = []
            for _ in range(calls):
                start = time.perf_counter()
                work()
                call(part, full)
                samples.append(time.perf_counter() - start - alone)
            medians.append(max(statistics.median(samples), 1e-6))
        moved = received * 4 * (1 << 18)
        rates[kind] = (medians[0], moved / max(medians[1] - medians[0], medians[1] / 10))
    return rates


def _kinds(world: int) -> list[tuple[str, Callable[[torch.Tensor, torch.Tensor], Any], float]]:
    """Return (name, call, received parts) of each kind of collective.

    The arguments of `call` are one rank's part of the tensor, and the full tensor. `received parts` is the amount of
    data that a rank receives, in units of one rank's part.
    """
    return [
        ("all_reduce", lambda part, _: dist.all_reduce(part), 2 * (world - 1) / world),
        ("all_gather", lambda part, full: dist.all_gather_into_tensor(full, part), world - 1),
        ("reduce_scatter", lambda part, full: dist.reduce_scatter_tensor(part, full), world - 1),
        ("broadcast", lambda part, _: dist.broadcast(part, 0), 1),
    ]
