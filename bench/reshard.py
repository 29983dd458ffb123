"""Resharding on two ranks over gloo: time and peak memory.

Its time is compared with a bare collective and a bare copy of the same bytes, in the same ranks, one after the other.
Its peak memory is compared with the plan and with naive resharding.

Each case is an edge of a plan: a model of random weights, from the layout of its update to that of its generation. The
bare collective fills one buffer bucket by bucket, with calls of the same sizes; the bare copy writes the same weights
from one place to another. Prints a table and, last, one line of JSON: the worst case of each figure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import smoke
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.backends.devices import allocate, release
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.cost import holdings
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.process.memory import Peak
from msrl_graph.runtime.weights.reshard import HostSwap, Resharder
from msrl_graph.runtime.weights.transfer_routes import make_blocks
from msrl_graph.sharding.layout import elements, shard

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"
RANKS = 2
DENSE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 8192}
SMALL = DENSE | {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
CASES = {  # layouts and engines of update and generation
    "ZeRO 3 to whole": ("dp = 2, zero = 3", "fsdp", "dp = 2", "hf"),
    "tp 2 to whole": ("tp = 2", "fsdp", "dp = 2", "hf"),
    "ZeRO 3 to tp 2": ("dp = 2, zero = 3", "fsdp", "tp = 2", "hf"),
    "pp 2 to whole": ("pp = 2", "megatron", "dp = 2", "vllm"),
    "pp 2 to tp 2": ("pp = 2", "megatron", "tp = 2", "vllm"),
    "experts: ep 2 to whole": ("dp = 2, ep = 2", "fsdp", "dp = 2", "hf"),
}


def plan_of(folder: Path, case: str, sizes: dict[str, int]) -> Plan:
    """Return the plan of the example's program for a model of the bench's size."""
    update, trainer, generate, generator = CASES[case]
    (folder / "model").mkdir()
    config = json.loads((EXAMPLE / "model" / "config.json").read_text()) | sizes
    config |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "layer_types": None}
    if "experts" in case:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8}
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for file in (*(EXAMPLE / "model").glob("tokenizer*"), EXAMPLE / "train.jsonl", EXAMPLE / "test.jsonl"):
        shutil.copy(file, folder / "model" if file.name.startswith("tokenizer") else folder)
    text = (EXAMPLE / "grpo.rlg").read_text()
    engines = f"engine actor.update = {trainer}\n  engine actor.generate = {generator}"
    for old, new in (
        ("layout actor.update   { dp = 2, zero = 3 }", f"layout actor.update {{ {update} }}\n  {engines}"),
        ("layout actor.generate { tp = 2 }", f"layout actor.generate {{ {generate} }}"),
    ):
        assert old in text
        text = text.replace(old, new)
    return compile(folder / "p.rlg", text=text)


def time_action(action: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def measure_rank(rank: int, plan: Plan, rounds: int) -> dict[str, float]:
    """Return the medians of a rank."""
    (edge,) = plan.reshards
    model = plan.model(edge.src)
    source, target = (holdings.side(plan, ENGINES, node) for node in (edge.src, edge.dst))
    draw = torch.Generator().manual_seed(0)
    boxes = [(tensor.name, shard(tensor, source, rank)) for tensor in model.weights]
    shards = [
        Shard(name, box, torch.randn([stop - start for start, stop in box], generator=draw)) for name, box in boxes
    ]
    wanted = [
        Shard(tensor.name, box := shard(tensor, target, rank), torch.empty([stop - start for start, stop in box]))
        for tensor in model.weights
    ]
    neighbours = make_blocks(edge.ways, source, RANKS, rank)

    def allocate_all() -> list[Shard]:
        for piece in wanted:
            allocate(piece.tensor)
        return wanted

    def forget() -> None:
        for piece in wanted:
            release(piece.tensor)

    swap = HostSwap(shards)
    ours, naive = (
        Resharder(variant, model, rank, (source, target), neighbours, swap)
        for variant in (edge, replace(edge, mode="naive", buckets=(tuple(tensor.name for tensor in model.weights),)))
    )
    measurements: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        measurements.setdefault(name, []).append(value)

    for turn in range(rounds + 1):
        forget()
        total = time_action(lambda: ours.run(allocate_all))
        seconds = dict(ours.seconds)
        swap.start_in()
        swap_in = time_action(swap.wait)
        bare = time_action(lambda: collectives(ours, shards))
        copies = time_action(lambda: copy(wanted))
        ctypes.CDLL(None).malloc_trim(0)  # else the copy would reuse memory of the previous one
        out = time_action(lambda: copy(shards))
        if turn:  # the first round takes memory from the system
            note("gather", seconds["buffer"] + seconds["all-gather"] + seconds["select"])
            note("bare gather", bare + copies)
            note("swap", seconds["swap out"])
            note("bare swap", out)
            note("whole", total)
            note("back", swap_in)
    peaks = []
    for mover in (ours, naive):
        forget()
        with Peak() as peak:
            mover.run(allocate_all)
        peaks.append(peak.peak["device"])
        swap.wait()
    result = {name: statistics.median(values) for name, values in measurements.items()}
    size = 4 * sum(elements(held_shard.box) for held_shard in shards)
    return result | {"peak": peaks[0], "naive": peaks[1], "update": size, "moved": ours.moved}


def collectives(mover: Resharder, shards: list[Shard]) -> None:
    """Run the collective calls of a resharding, and nothing else."""
    buffer = torch.empty(mover.buffer_elements, dtype=shards[0].tensor.dtype)
    for loads in mover.loads:
        for load in loads:
            load.exchange(buffer)


def copy(shards: list[Shard]) -> None:
    """Copy the same bytes to memory allocated for all of them."""
    copies = [torch.empty_like(piece.tensor).copy_(piece.tensor) for piece in shards]
    del copies


def rank_of(rank: int, store: str, plan: Plan, rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    pipe.send(measure_rank(rank, plan, rounds))
    dist.barrier()
    dist.destroy_process_group()


def run(case: str, rounds: int, sizes: dict[str, int]) -> tuple[Plan, list[dict[str, float]]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(Path(folder), case, sizes)
        pipes = [context.Pipe() for _ in range(RANKS)]
        ranks = [
            context.Process(target=rank_of, args=(rank, f"{folder}/store", plan, rounds, pipe))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        results = [ours.recv() for ours, _ in pipes]
        for process in ranks:
            process.join()
    return plan, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.set_defaults(sizes=DENSE)
    options = smoke.parse(parser, rounds=1, cases=["pp 2 to tp 2"], sizes=SMALL)
    columns = ("case", "ways", "moved", "gather", "bare", "of bare", "swap", "of bare", "peak / plan", "naive / ours")
    table = Table(title="resharding on two ranks, medians", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("case", "ways") else "right")
    worst: dict[str, list[float]] = {}
    for case in options.cases:
        plan, ranks = run(case, options.rounds, options.sizes)
        (edge,) = plan.reshards
        slow = {name: max(measured_rank[name] for measured_rank in ranks) for name in ranks[0]}
        update = max(measured_rank["update"] for measured_rank in ranks)
        figures = {
            "gather_fraction_of_bare": slow["bare gather"] / slow["gather"],
            "swap_fraction_of_bare": slow["bare swap"] / slow["swap"],
            "peak_over_bound": slow["peak"] / edge.peak_bytes_per_device,
            "naive_peak_over_ours": slow["naive"] / slow["peak"],
        }
        assert update == edge.update_bytes_per_device, "the plan counts other weights"
        for name, value in figures.items():
            worst.setdefault(name, []).append(value)
        table.add_row(
            case,
            ", ".join(f"{route.of} {route.how}" for route in edge.ways),
            f"{slow['moved'] / 1e6:.0f} MB",
            f"{slow['gather'] * 1e3:.0f} ms",
            f"{slow['bare gather'] * 1e3:.0f} ms",
            f"{figures['gather_fraction_of_bare']:.2f}",
            f"{slow['swap'] * 1e3:.0f} ms",
            f"{figures['swap_fraction_of_bare']:.2f}",
            f"{figures['peak_over_bound']:.3f}",
            f"{figures['naive_peak_over_ours']:.2f}",
        )
    Console(width=160).print(table)
    print(
        json.dumps({name: round((max if "over_bound" in name else min)(values), 3) for name, values in worst.items()})
    )


if __name__ == "__main__":
    main()
