"""The paper's equations 1 to 5 (arXiv:2507.19017), each a function of its own.

Invariant: nothing here looks at a graph or a plan. The compiler counts what the actual graph moves; these are what
tests and `make paper` hold it to. G prompts an iteration, N responses a prompt, B bytes an element, PL and SL prompt
and response length, n items as long as a response, M scalars a row, C controllers, S warehouses. Volumes are bytes (the
paper divides by 1024^3).
"""

from __future__ import annotations

GIB = 1024**3
MIB = 1024**2


def request_bytes(g: float, n_responses: float, b: float, pl: float, n: float, sl: float, m: float) -> float:
    """CV of eq. 1: what one state asks of the sample flow in an iteration, in bytes."""
    return g * n_responses * b * (pl + n * sl + m)


def central_bytes(g: float, n_responses: float, b: float, pl: float, n: float, sl: float, m: float) -> float:
    """TCV of eq. 2: all that goes through one central replay buffer in an iteration of GRPO, in bytes."""
    return g * n_responses * b * (2 * pl + 3 * n * sl + 8 * m)


def warehouse_bytes(
    g: float, n_responses: float, b: float, pl: float, n: float, sl: float, m: float, c: float, s: float
) -> float:
    """TCV of eq. 4: what goes through each of the S warehouses of a transfer dock with C controllers, in bytes."""
    return g * n_responses * b * (2 * pl + 3 * n * sl + 8 * (c + 1) * m) / s


def dispatch_seconds(volume: float, rate: float) -> float:
    """Seconds that `volume` bytes take at `rate` bytes/s: T100 and T1K of Table 1 at 100 MiB/s and 1 GiB/s."""
    return volume / rate


def redundant_bytes(gdp: float, tw: float, utp: float, ew: float = 0.0, gep: float = 1.0) -> float:
    """R of eq. 3, in bytes over all devices: what naive resharding leaves behind.

    `tw` and `ew` are the bytes of the tensor-parallel and of the expert weights, `utp` the update's tensor-parallel
    size, `gdp` and `gep` the generation's data- and expert-parallel sizes. It holds for the shape of the paper's figure
    3: generation with tp 1 on `gdp` devices.
    """
    return gdp * (tw / utp + ew / gep)


def throughput(g: float, n_responses: float, pl: float, sl: float, devices: float, seconds: float) -> float:
    """T of eq. 5: tokens a second a device, prompts counted once a response, at the lengths' bounds."""
    return g * n_responses * (pl + sl) / devices / seconds
