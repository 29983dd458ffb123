"""Rates that a device reaches: matrix products, attention, memory and the launch of an operator.

`msrl-doctor --calibrate` measures hosts. These are the same figures of a GPU, for bench/gpu.py: a device with them
replaces the shares of peak figures that a plan assumes. Each figure is the median of several series of calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from msrl_graph.hardware.cluster import Curve, Device, Figure

HIDDEN = 1536
WIDE = 8960
SIZES = {  # by whether they are small
    False: {
        "matrix": (256, 512, 1024, 2048, 4096, 8192),
        "memory": tuple(2**k for k in range(20, 33, 3)),
        "tokens": (64, 512, 4096, 16384),
        "attention": ((512, 16, 64, 64), (128, 16, 256, 64), (32, 16, 1024, 128), (4, 16, 8192, 128)),
        "copy": 1 << 30,
    },
    True: {
        "matrix": (64, 128),
        "memory": (2**14, 2**17),
        "tokens": (4, 16),
        "attention": ((8, 2, 8, 16), (2, 2, 32, 16)),
        "copy": 1 << 16,
    },
}


def seconds(action: Callable[[], Any], finish: Callable[[], None], budget: float = 0.05, series: int = 5) -> float:
    """Return the median seconds of a call, of series that take `budget` seconds together."""
    for _ in range(2):
        action()
    finish()
    start = time.perf_counter()
    action()
    finish()
    calls = max(1, int(budget / series / max(time.perf_counter() - start, 1e-6)))
    samples = []
    for _ in range(series):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        finish()
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


def measure(where: str, small: bool) -> dict[str, Any]:
    """Return the rates of a torch device: curves as in `Device`, `launch`, and `copy` (bytes/s)."""
    finish = torch.cuda.synchronize if where == "cuda" else lambda: None
    sizes: dict[str, Any] = SIZES[small]
    device = torch.device(where)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def took(action: Callable[[], Any]) -> float:
        return seconds(action, finish)

    tiny = torch.ones(4, device=device)
    launch = took(lambda: tiny + tiny)
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        curves[name] = []
        for n in sizes["matrix"]:
            left, right = draw(n, n, dtype=dtype), draw(n, n, dtype=dtype)
            curves[name].append((2.0 * n**3, 2.0 * n**3 / took(lambda left=left, right=right: left @ right)))
    curves["memory_bandwidth"] = []
    for size in sizes["memory"]:
        left, right = (draw(size // 6) for _ in range(2))
        curves["memory_bandwidth"].append((float(size), size / took(lambda left=left, right=right: left + right)))
    curves["layer"] = [(tokens * HIDDEN * 6.0, _layer(tokens, draw, took)) for tokens in sizes["tokens"]]
    curves["attention"] = []
    for rows, heads, tokens, size in sizes["attention"]:
        operands = [draw(rows, heads, tokens, size) for _ in range(3)]
        flop = 4.0 * tokens**2 * size
        spent = took(lambda operands=operands: scaled_dot_product_attention(*operands, is_causal=True))
        curves["attention"].append((flop, rows * heads * flop / spent))
    host = torch.empty(sizes["copy"], dtype=torch.uint8, pin_memory=where == "cuda")
    there = torch.empty_like(host, device=device)
    copy = host.nbytes / took(lambda: there.copy_(host, non_blocking=True))
    return {"curves": curves, "launch": launch, "copy": copy}


def _layer(tokens: int, draw: Callable[..., torch.Tensor], took: Callable[[Callable[[], Any]], float]) -> float:
    """Return the bytes/s of a norm, a residual addition and a gating, counted as cost/operators.py counts them."""
    states, gate, up, weight = draw(tokens, HIDDEN), draw(tokens, WIDE), draw(tokens, WIDE), draw(HIDDEN)

    def once() -> Any:
        normed = weight * (states * torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(states.dtype))
        return states + normed, silu(gate) * up

    return tokens * 2.0 * (10 * HIDDEN + 5 * WIDE) / took(once)


def calibrated(device: Device, rates: dict[str, Any]) -> Device:
    """Return a device with these rates in place of its assumed ones."""
    curves: dict[str, Curve] = {
        name: tuple((float(size), float(rate)) for size, rate in curve) for name, curve in rates["curves"].items()
    }
    basis = "measured on this device"
    return replace(
        device,
        curves=curves,
        launch=Figure(rates["launch"], "measured", basis),
        host_link=Figure(rates["copy"], "measured", basis),
        peaks=tuple(peak for peak in device.peaks if peak != "host_link"),
    )
